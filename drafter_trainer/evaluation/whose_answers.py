"""Did the drafter learn the target's own answers? Where nothing shows it, low numbers may come from there."""

from dataclasses import asdict
from typing import Any, get_args

from slipstream.data_answers import first_unproven
from slipstream.run_spec.spec import Dtype, RunSpec, TargetSpec
from slipstream.target_files import locate_target
from slipstream.target_fingerprint import fingerprints_of


def unproven_answers(spec: RunSpec, fingerprint: str | None, target: TargetSpec | None) -> dict[str, Any] | None:
    """What the report says of the first file of the run that is not shown to hold the target's own answers.

    Args:
        spec: of the run.
        fingerprint: of its target; None: nothing says where the drafter comes from, and so nothing is said of its data.
        target: the same target, where its files are at hand: it may have answered in another dtype, which is part of a
            fingerprint.

    Returns:
        `file`, `written_by` (None: nothing shows who wrote it) and `fingerprint`; None where there is no such file.
    """
    if fingerprint is None:
        return None
    found = first_unproven(spec.data.files, spec.target.model, (fingerprint,))
    if found is not None and found.fingerprint is not None and target is not None:
        every = fingerprints_of(locate_target(target), get_args(Dtype))
        found = first_unproven(spec.data.files, spec.target.model, every)
    return None if found is None else asdict(found)
