"""The target's fingerprint: two servers with equal fingerprints give the same hidden states up to rounding."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from slipstream.target_files import TargetFiles

_FORMAT = "slipstream-target-1"
_BLOCK_BYTES = 32 << 20
_MAX_THREADS = 16


def fingerprint_target(files: TargetFiles, dtype: str) -> str:
    """SHA-256 (hex) over the content of weights, configuration, tokenizer and template, the revision and the dtype.

    Raises:
        SlipstreamError: MODEL_INVALID, when a file cannot be read any more.
    """
    return fingerprints_of(files, (dtype,))[0]


def fingerprints_of(files: TargetFiles, dtypes: Sequence[str]) -> tuple[str, ...]:
    """One for each dtype; the files are read once.

    Paths are not in it, file names are. Files are hashed in blocks by several threads, and the digests of the blocks
    are hashed in order, so that one large file is as fast as many.

    Raises:
        SlipstreamError: MODEL_INVALID, when a file cannot be read any more.
    """
    paths = (*files.weights, *files.descriptions)
    try:
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            digests = list(pool.map(_hash_block, *zip(*_blocks(paths), strict=True)))
    except OSError as error:
        raise SlipstreamError(
            f"A file of the target cannot be read: {error}.",
            reason=Reason.MODEL_INVALID,
            remedy="Check that the model's files stay in place and are readable.",
        ) from error
    identities = (
        {"format": _FORMAT, "blocks": digests, "revision": files.revision, "dtype": dtype} for dtype in dtypes
    )
    return tuple(hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest() for one in identities)


def _blocks(paths: Iterable[Path]) -> Iterator[tuple[Path, int]]:
    for path in paths:
        for offset in range(0, max(path.stat().st_size, 1), _BLOCK_BYTES):
            yield path, offset


def _hash_block(path: Path, offset: int) -> tuple[str, int, str]:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        block = file.read(_BLOCK_BYTES)
    return path.name, offset, hashlib.sha256(block).hexdigest()
