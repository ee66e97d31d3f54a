"""What the local stack's target serves, for a recipe that names the same model as a hub does.

`slipstream up` serves a file or directory of this machine where it was given one. A run that kept the hub's name would
train, and could then be neither evaluated nor exported here without the hub.
"""

import argparse
from pathlib import Path

from slipstream.cli.api_access import find_api
from slipstream.packaged_model import names_model
from slipstream.run_spec.spec import RunSpec, TargetSpec


def served_model(args: argparse.Namespace, spec: RunSpec) -> TargetSpec | None:
    """What the stack's target serves, its model a path; None where the recipe should say what it says.

    Args:
        args: of `run create`: the control API, the target's name, overrides.
        spec: of the recipe.
    """
    from slipstream.launcher.home import home_directory, is_up, read_supervisor
    from slipstream.launcher.stack import read_stack

    if names_model(args.set) or Path(spec.target.model).exists() or spec.target.model.endswith(".gguf"):
        return None
    home = home_directory(args.home)
    state, stack = read_supervisor(home), read_stack(home)
    if state is None or stack is None or stack.target is None or not is_up(home):
        return None
    if args.target not in (None, stack.target.name) or find_api(args).address.rstrip("/") != state.api.rstrip("/"):
        return None
    return stack.target.model if Path(stack.target.model.model).is_absolute() else None
