"""A stack on one CPU, as data."""

from typing import Any

from slipstream.launcher.stack import ApiPart, Stack, TargetPart, TrainerPart
from slipstream.run_spec.spec import TargetSpec


def a_stack(**changes: Any) -> Stack:
    """Control API, target server and one trainer on loopback."""
    listen = {"api": "127.0.0.1:8080", "target": "127.0.0.1:50051"}
    parts: dict[str, Any] = {
        "api": ApiPart(listen=listen["api"], address=listen["api"]),
        "target": TargetPart(
            name="local",
            listen=listen["target"],
            address=listen["target"],
            model=TargetSpec(model="some/model", dtype="float32"),
            device="cpu",
            threads=1,
        ),
        "trainers": (TrainerPart(name="cpu", device="cpu", threads=1),),
        "data_roots": ("/data/recipe", "/data"),
    }
    return Stack(**parts | changes)
