"""Tests in this folder run on one CUDA device; elsewhere each is skipped and says so."""

import pytest


@pytest.fixture(autouse=True)
def _cuda_device() -> None:
    # Imported here: collecting the folder must stay cheap.
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch finds none")
