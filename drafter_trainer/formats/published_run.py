"""The run that a published drafter comes from, as far as its directory says. No torch here."""

from pathlib import Path

from drafter_trainer.formats.provenance import read_provenance
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DataSpec, RunSpec, TargetSpec, TrainSpec


def is_published(directory: Path) -> bool:
    """Whether this is a drafter in one of the formats, and no checkpoint."""
    return (directory / "config.json").is_file()


def run_of_published(directory: Path, target_model: str | None) -> tuple[RunSpec, str | None]:
    """The run definition that evaluation takes its defaults from, and the target's fingerprint.

    Args:
        directory: with config.json.
        target_model: from the command line.

    Returns:
        What the export recorded; without a record a definition that holds no more than the target, and None.

    Raises:
        SlipstreamError: CHECKPOINT_INVALID, a file has changed since the export; SPEC_INVALID, nothing says what the
            target is; pydantic's ValidationError, the definition is of another version.
    """
    made_from = read_provenance(directory)
    if made_from is not None:
        return RunSpec.model_validate(made_from.spec), made_from.target_fingerprint
    if target_model is None:
        raise SlipstreamError(
            f"{directory} was not exported by Slipstream and does not say where its target is",
            reason=Reason.SPEC_INVALID,
            remedy="Give the target with --target-model.",
        )
    # Nothing is trained with this: data and length are there because a definition has them.
    spec = RunSpec(
        name="published",
        target=TargetSpec(model=target_model),
        data=DataSpec(files=("unknown",)),
        train=TrainSpec(max_steps=1),
    )
    return spec, None
