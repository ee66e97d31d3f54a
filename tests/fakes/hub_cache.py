"""Drafters in a hub cache, as its client leaves them there."""

from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def put_into_cache(cache: Path, repository: str, *, branch: str = "main", commit: str = COMMIT) -> Path:
    """An empty snapshot of a repository, which the branch points to."""
    root = cache / f"models--{repository.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / branch).write_text(commit)
    return snapshot


def put_drafter_into_cache(cache: Path, repository: str, *, branch: str = "main", commit: str = COMMIT) -> Path:
    """The same with the files by which a drafter is known."""
    snapshot = put_into_cache(cache, repository, branch=branch, commit=commit)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").touch()
    return snapshot
