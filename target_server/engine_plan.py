"""Which devices engines run on: what the flags ask for, held against what there is. Nothing is started here."""

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

PROGRAM = (sys.executable, "-P", "-m", "target_server", "engine")


@dataclass(frozen=True)
class EnginePlan:
    """The engine processes of a server."""

    devices: tuple[tuple[str, ...], ...]
    """Of every engine, the device of each of its ranks: `cpu` or `cuda:N`."""
    threads: int | None = None
    """CPU threads of a rank."""
    program: Sequence[str] = PROGRAM
    flags: tuple[str, ...] = ()
    """Of the program, about logs."""

    @property
    def ranks(self) -> int:
        """Of an engine."""
        return len(self.devices[0])

    def in_words(self) -> str:
        """`cuda:0+cuda:1,cuda:2+cuda:3`: two engines of two ranks."""
        return ",".join("+".join(engine) for engine in self.devices)


def parse_devices(text: str) -> tuple[str, ...]:
    """`cuda:0,cuda:1` or `cpu,cpu`.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    devices = tuple(word.strip() for word in text.split(","))
    wrong = [device for device in devices if not re.fullmatch(r"cpu|cuda:\d+", device)]
    if wrong:
        raise _invalid(f"--devices names {wrong[0]!r}.", "Name each as cpu or cuda:N, as in --devices cuda:0,cuda:1.")
    if len({device.partition(":")[0] for device in devices}) > 1:
        # A pack computed again would have other bytes, and engines of one server wait for each other.
        raise _invalid(f"--devices {text} names GPUs and CPUs.", "Use one kind only.")
    twice = [device for device, count in Counter(devices).items() if count > 1 and device != "cpu"]
    if twice:
        raise _invalid(f"--devices names {twice[0]} more than once.", "One engine fills a GPU: name it once.")
    return devices


def group_devices(devices: Sequence[str], ranks: int) -> tuple[tuple[str, ...], ...]:
    """The devices of each engine: `ranks` neighbours each.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if len(devices) % ranks:
        raise _invalid(
            f"--devices names {len(devices)} devices, which engines of {ranks} cannot share.",
            f"Name a multiple of {ranks}, or choose another --tensor-parallel.",
        )
    return tuple(tuple(devices[start : start + ranks]) for start in range(0, len(devices), ranks))


def check_present(devices: Sequence[str], num_gpus: int) -> None:
    """Refuse GPUs that are not there.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    for device in devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index) >= num_gpus:
            found = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}" if num_gpus else "no GPU"
            raise SlipstreamError(
                f"--devices names {device}, but torch sees {found}.",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="`slipstream doctor` says what there is; GPUs count from cuda:0.",
            )


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.SPEC_INVALID, remedy=remedy)
