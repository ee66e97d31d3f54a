"""The one exception that users see: what was found, what was expected, and the remedy."""

from slipstream.run_spec.reasons import Reason

_EXIT_CODES = {
    Reason.SPEC_INVALID: 2,
    Reason.DATA_INVALID: 3,
    Reason.MODEL_INVALID: 3,
    Reason.PATH_NOT_ALLOWED: 3,
    Reason.ENVIRONMENT_UNSUPPORTED: 4,
    Reason.PORT_IN_USE: 4,
    Reason.DATABASE_INVALID: 4,
    Reason.DATABASE_NEWER: 4,
    Reason.DATABASE_LOCKED: 4,
    Reason.DATABASE_READ_ONLY: 4,
    Reason.DISK_FULL: 5,
    Reason.OUT_OF_MEMORY: 6,
    Reason.INCARNATION_STALE: 7,
    Reason.TARGET_FINGERPRINT_MISMATCH: 8,
    Reason.TARGET_INCOMPATIBLE: 8,
    Reason.STREAM_CHANGED: 8,
    Reason.LOSS_NOT_FINITE: 9,
    Reason.CHECKPOINT_INVALID: 11,
    Reason.NOT_LOSSLESS: 12,
    Reason.REQUEST_INVALID: 2,
    Reason.BODY_TOO_LARGE: 2,
    Reason.NOT_FOUND: 13,
    Reason.RUN_UNKNOWN: 13,
    Reason.TARGET_UNKNOWN: 13,
    Reason.TRAINER_UNKNOWN: 13,
    Reason.TRANSITION_ILLEGAL: 14,
    Reason.NAME_TAKEN: 14,
    Reason.TARGET_IN_USE: 14,
    Reason.TRAINER_BUSY: 14,
    Reason.TRAINER_IDLE: 14,
    Reason.TRAINER_LOST: 14,
    Reason.TRAINER_UNSUITABLE: 14,
    Reason.RUN_HAS_TRAINER: 14,
    Reason.SUBSCRIPTION_UNKNOWN: 14,
    Reason.NOT_READY: 15,
    Reason.TARGET_UNREACHABLE: 15,
    Reason.LEDGER_UNWRITABLE: 15,
    Reason.ACCESS_DENIED: 16,
    Reason.STACK_DIFFERS: 18,
    Reason.STACK_FAILED: 19,
}


_SENTENCE_ENDS = (".", "!", "?", ":", ",")


class SlipstreamError(Exception):
    """An error that names what was found, what was expected, and how to mend it.

    Process entry points print `message` and `remedy` without a traceback and leave with `exit_code`;
    the gRPC service turns `reason` into a status with `google.rpc.ErrorInfo`.
    """

    def __init__(self, message: str, *, reason: Reason, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the way from a worker process to its parent."""
        return _restore, (self.message, self.reason, self.remedy)

    @property
    def exit_code(self) -> int:
        """Exit status for a command line.

        2 recipe or flag, 3 data, model or path, 4 machine, port or database, 5 disk, 6 memory, 7 a newer owner,
        8 target and run do not fit, 9 loss not finite, 11 checkpoint, 12 output differs from plain decoding,
        13 no such run, target or trainer, 14 not possible in the present state, 15 no control API or target server
        answers or it is not ready, 16 access denied, 18 another stack is up in this home, 19 a process of a stack keeps
        dying, else 1. What the command line adds is in `docs/cli.md`.
        """
        return _EXIT_CODES.get(self.reason, 1)

    def __str__(self) -> str:
        if not self.remedy:
            return self.message
        # In one line, as REST, gRPC and logs have it: two sentences.
        return f"{self.message}{'' if self.message.endswith(_SENTENCE_ENDS) else '.'} {self.remedy}"


def _restore(message: str, reason: Reason, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=reason, remedy=remedy)
