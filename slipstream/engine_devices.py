"""Which devices a target's engines run on: `--devices` and `--tensor-parallel`, read alike by whoever takes them."""

import re
from collections import Counter
from collections.abc import Sequence

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason

Groups = tuple[tuple[str, ...], ...]
"""Of every engine, the device of each of its ranks: `cpu` or `cuda:N`."""


def engine_groups(devices: str | None, ranks: int) -> Groups | None:
    """The engines that the two flags ask for; None where no devices are named.

    Args:
        devices: `cuda:0,cuda:1` or `cpu,cpu`.
        ranks: devices that share the layers of one engine.

    Raises:
        SlipstreamError: SPEC_INVALID.
    """
    if devices is not None:
        return group_devices(parse_devices(devices), ranks)
    if ranks > 1:
        raise _invalid(
            f"--tensor-parallel {ranks} needs to know which devices share the target.",
            "Name them, as in --devices cuda:0,cuda:1.",
        )
    return None


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


def group_devices(devices: Sequence[str], ranks: int) -> Groups:
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


def check_present(devices: Sequence[str], num_gpus: int, flag: str = "--devices") -> None:
    """Refuse GPUs that are not there.

    Args:
        devices: `cpu`, `cuda:N`; `cuda` is the first one.
        num_gpus: that torch sees.
        flag: that names them.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    for device in devices:
        kind, _, index = device.partition(":")
        if kind == "cuda" and int(index or 0) >= num_gpus:
            found = f"{num_gpus} GPU{'s' if num_gpus > 1 else ''}" if num_gpus else "no GPU"
            raise SlipstreamError(
                f"{flag} names {device}, but torch sees {found}.",
                reason=Reason.ENVIRONMENT_UNSUPPORTED,
                remedy="`slipstream doctor` says what there is; GPUs count from cuda:0.",
            )


def _invalid(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.SPEC_INVALID, remedy=remedy)
