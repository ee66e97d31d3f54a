"""Deployment settings of the control plane: from flags, never stored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Everything that a server is started with, beside its database."""

    token: str | None = None
    """Bearer token; the targets' too."""
    targets: Mapping[str, str] = field(default_factory=dict)
    """Target servers that are registered when the server starts: name → address."""
    data_roots: tuple[Path, ...] = ()
    """Files that a run names must lie in one of these; relative ones start at the first. Empty: absolute paths only."""
    export_root: Path | None = None
    """Where exported checkpoints are put; None: this server makes none."""
    heartbeat_seconds: float = 2.0
    trainer_timeout: float = 15.0
    """Seconds without a heartbeat after which a trainer is lost."""
    grace_seconds: float = 300.0
    """A run whose trainers are all lost fails after so many seconds."""
    reconcile_seconds: float = 1.0
    probe_seconds: float = 10.0
    """Between two looks at the targets."""
    probe_deadline: float = 2.0
    body_limit: int = 2**20
    keep_alive_seconds: float = 15.0
    """Between two comments on an idle event stream."""
