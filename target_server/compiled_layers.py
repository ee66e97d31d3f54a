"""Decoder layers compiled for packs of one length: their own code objects, whole graphs, static shapes, then frozen.

transformers' model stays the caller of its layers, so that embeddings, rotary tables and the order of layers are its
own; only what a layer computes is replaced. Layers of one kind (class, parts, sizes, attention) share one graph, which
no pack changes: documents reach attention past the graph.
"""

import itertools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.compiled_code import with_own_code
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.attention import AttentionTraits

LayerForward = Callable[..., Any]


class CompiledLayers:
    """The layers of one model for packs of one length. One thread compiles and calls them."""

    def __init__(self, layers: Sequence[nn.Module], traits: Mapping[int, AttentionTraits], backend: str) -> None:
        """Nothing is compiled yet: the first forward does it, unless it is `frozen`.

        Args:
            layers: the decoder's.
            traits: of every attention module, by its id.
            backend: of torch.compile.

        Raises:
            RuntimeError: the layers are wrapped by something else, as by hooks that move weights.
        """
        kinds: dict[Hashable, LayerForward] = {}
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        for layer in layers:
            if "forward" in vars(layer):
                raise RuntimeError(f"something else has replaced the forward of a {type(layer).__name__} already")
            kind = kind_of(layer, traits)
            if kind not in kinds:
                kinds[kind] = compile_layer(type(layer), f"{type(layer).__name__}_{len(kinds)}", backend)
            self._forwards.append((layer, kinds[kind]))

    @contextmanager
    def in_place(self, *, frozen: bool) -> Iterator[None]:
        """The layers run compiled while the block runs; `frozen`: compiling anything is an error meanwhile.

        Raises:
            SlipstreamError: PACK_OUTSIDE_BUCKETS, out of the block: something in a forward was not as in the warm-up.
        """
        for layer, forward in self._forwards:
            # Past nn.Module's own bookkeeping: the attribute hides the class's method from __call__.
            vars(layer)["forward"] = types.MethodType(forward, layer)
        try:
            with torch.compiler.set_stance("fail_on_recompile" if frozen else "default"):
                yield
        except RuntimeError as error:
            if "fail_on_recompile" not in str(error):
                raise
            raise SlipstreamError(
                f"A layer of the target would have been compiled again after the warm-up: {error}",
                reason=Reason.PACK_OUTSIDE_BUCKETS,
                remedy="Report this with the log; serve with target.compile = false meanwhile.",
            ) from error
        finally:
            for layer, _ in self._forwards:
                del vars(layer)["forward"]


def compile_layer(layer_class: type[nn.Module], name: str, backend: str) -> LayerForward:
    """A compiled `forward(layer, ...)` with a code object, and so a cache, of its own."""
    original = layer_class.forward

    def forward(layer: nn.Module, *arguments: Any, **named: Any) -> Any:
        return original(layer, *arguments, **named)

    own_code = with_own_code(forward, name)
    compiled: LayerForward = torch.compile(own_code, fullgraph=True, dynamic=False, backend=backend)
    return compiled


def kind_of(layer: nn.Module, traits: Mapping[int, AttentionTraits]) -> Hashable:
    """Equal for layers that one graph fits."""
    tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
    return (
        type(layer),
        tuple((name, type(module), traits.get(id(module))) for name, module in layer.named_modules()),
        tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors),
    )
