"""Makes transformers read a GGUF file once instead of three times.

transformers parses the whole file for the tokenizer, for the configuration and for the weights, and rebuilds its table
of tensor names for every module of the model. For SmolLM2-135M that is 23 of 28 seconds. Both results depend only on
the arguments, so they are remembered while one target is loaded.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Within the block, `gguf` remembers parsed files and tensor-name tables, silently. Needs the package `gguf`."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    class PlainArrayReader(gguf.GGUFReader):
        """Reads fields through plain arrays: a slice of a memmap costs eight times as much, and there are 500,000."""

        def _get(
            self, offset: int, dtype: npt.DTypeLike, count: int = 1, override_order: Any = None
        ) -> npt.NDArray[Any]:
            array = np.frombuffer(self.data, dtype, int(count), int(offset))
            order = self.byte_order if override_order is None else override_order
            return array if order == "I" else array.view(array.dtype.newbyteorder(order))

    progress_bar = modeling_gguf_pytorch_utils.tqdm

    def without_bar(*arguments: Any, **options: Any) -> Any:
        return progress_bar(*arguments, **(options | {"disable": True}))

    replacements = (
        (gguf, "GGUFReader", functools.cache(PlainArrayReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        # The one progress bar that does not obey the switch of transformers.
        (modeling_gguf_pytorch_utils, "tqdm", without_bar),
    )
    originals = [(module, name, getattr(module, name)) for module, name, _ in replacements]
    for module, name, replacement in replacements:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
