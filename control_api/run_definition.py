"""From the body of a create to the definition of a run: read strictly, with files only where they may be."""

import os
import socket
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import recipes
from control_api.schemas import RunCreate
from control_api.store.tables import Target, Trainer
from slipstream.drafter_name import drafter_name
from slipstream.errors import SlipstreamError
from slipstream.first_drafter import require_possible_first_drafter
from slipstream.mask_token import require_mask
from slipstream.plan.admission import known_sizes, require_fit
from slipstream.plan.sizes import RunSizes, TargetSizes
from slipstream.run_spec.data_entries import is_hub_name
from slipstream.run_spec.load import SpecInvalidError, parse_recipe, parse_spec
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import RunSpec
from slipstream.target_files import is_path

_MOST_RECIPE_LINES = 2000
_SIZES = {one.name for one in fields(TargetSizes)}


def define_run(body: RunCreate, data_roots: tuple[Path, ...]) -> RunSpec:
    """The run that the body defines.

    Raises:
        SlipstreamError: SPEC_INVALID, with every problem, or no mask token where the target's files are on this
            machine; PATH_NOT_ALLOWED.
    """
    try:
        spec = _parse(body)
    except RecursionError:
        raise _no_run("The definition is nested too deeply.") from None
    if _model_may_be_read(spec.target.model, data_roots):
        require_mask(spec)
    # What a hub holds is no file of this machine; the target server asks for it.
    files = tuple(file if is_hub_name(file) else _allowed(file, data_roots) for file in spec.data.files)
    prompts = spec.eval.prompts and _allowed(spec.eval.prompts, data_roots)
    heldout = spec.eval.heldout and _allowed(spec.eval.heldout, data_roots)
    init_from = spec.drafter.init_from and _drafter(spec.drafter.init_from, data_roots)
    return spec.model_copy(
        update={
            "data": spec.data.model_copy(update={"files": files}),
            "drafter": spec.drafter.model_copy(update={"init_from": init_from}),
            "eval": spec.eval.model_copy(update={"prompts": prompts, "heldout": heldout}),
        }
    )


def served_sizes(target: Target | None) -> TargetSizes | None:
    """What the target said of its model; None where it was not reached yet, or not by a version that asks for all of
    these."""
    said = None if target is None else target.sizes
    return None if said is None or said.keys() != _SIZES else TargetSizes(**said)


def run_sizes(
    spec: RunSpec, served: TargetSizes | None, data_roots: tuple[Path, ...], *, with_answers: bool
) -> RunSizes | None:
    """As `known_sizes`, without a look at models that lie outside of `data_roots`."""
    if served is None and not _model_may_be_read(spec.target.model, data_roots):
        return None
    return known_sizes(spec, served, with_answers=with_answers)


def require_trainable(spec: RunSpec, sizes: RunSizes | None, present: Sequence[Trainer]) -> None:
    """Refuse what `slipstream plan` refuses, and a missing first drafter, as far as it is known here.

    Args:
        spec: of the run.
        sizes: of the run, where they are known.
        present: the trainers that are heard of.

    Raises:
        SlipstreamError: OUT_OF_MEMORY, ENVIRONMENT_UNSUPPORTED, no trainer's device can train it; CHECKPOINT_INVALID.
    """
    # Only where all trainers are here is the same path the same directory.
    if present and all(one.host == socket.gethostname() for one in present):
        require_possible_first_drafter(spec.drafter.init_from)
    if sizes is not None:
        require_fit(sizes, spec.train, [(one.name, one.devices) for one in present])


def _parse(body: RunCreate) -> RunSpec:
    if body.recipe is None:
        assert body.spec is not None
        return parse_spec(body.spec, body.overrides)
    if body.recipe.count("\n") > _MOST_RECIPE_LINES:
        raise _no_run(f"The recipe has more than {_MOST_RECIPE_LINES} lines.")
    return parse_recipe(body.recipe, body.overrides)


def _model_may_be_read(model: str, roots: tuple[Path, ...]) -> bool:
    """Nobody shall find out through a server with data roots what lies elsewhere; the hub's cache has models alone."""
    if not roots or not is_path(model):
        return True
    try:
        path = Path(model).expanduser().resolve()
    except (OSError, RuntimeError):  # a name too long for a file, a home directory that nobody has
        return False
    return any(path.is_relative_to(root.resolve()) for root in roots)


def _no_run(message: str) -> SpecInvalidError:
    return SpecInvalidError(message, problems=[("", message)])


def _drafter(text: str, roots: tuple[Path, ...]) -> str:
    """The absolute path of a first drafter; the name of a run, or of one of a hub, as it is."""
    named = drafter_name(text, roots[0] if roots else None)
    return _allowed(str(named), roots) if isinstance(named, Path) else text


def _allowed(file: str, roots: tuple[Path, ...]) -> str:
    """The absolute path of a file that a run names; the file itself is not looked at, it may lie on another host.

    What ships with Slipstream is named as its recipes do, and may always be read.
    """
    if (shipped := recipes.data_file(file)) is not None:
        return str(shipped)
    if not roots:
        if Path(file).is_absolute():
            return os.path.normpath(file)
        raise SlipstreamError(
            f"{file!r} is relative, and this server has no --data-root to start from.",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy="Give an absolute path, as the target server sees it.",
        )
    path = Path(os.path.normpath(roots[0] / file))
    if not any(path.is_relative_to(root) for root in roots):
        raise SlipstreamError(
            f"{file!r} is outside of what runs may read.",
            reason=Reason.PATH_NOT_ALLOWED,
            remedy=f"Put it into {' or '.join(map(str, roots))}, or start the server with another --data-root.",
        )
    return str(path)
