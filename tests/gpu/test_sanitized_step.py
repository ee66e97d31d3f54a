"""No kernel of a step reads or writes outside its tensors: one bucket under compute-sanitizer, where that is."""

import pytest

from tests.gpu.sanitized_step import check, sanitizer


def test_memcheck_finds_nothing() -> None:
    if sanitizer() is None:
        pytest.skip("compute-sanitizer is not installed: pip install nvidia-cuda-sanitizer-api")
    result = check("memcheck")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout
