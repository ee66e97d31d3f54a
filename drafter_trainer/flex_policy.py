"""What keeps flex_attention compiled: checks, a tripwire on its dense kernels, own compiled functions, a freeze.

A compiled call can go dense in silence (another thread traces, a recompile limit is hit, compilation is disabled) and
then asks for the scores of every head at once. Here that is an error with the shapes, on the spot.
"""

import functools
import inspect
import logging
import os
import platform
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

import torch
import torch._dynamo.callback
import torch._dynamo.config
import torch._functorch.config
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.flex_attention import flex_attention as flex_forward_op
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward_op
from torch.nn.attention.flex_attention import flex_attention

from drafter_trainer.anchors import Anchors
from drafter_trainer.block_mask import AttentionLayout, build_block_attention
from slipstream.compile_guards import MINIMUM_TORCH, disabling_variables, guards_of, torch_release
from slipstream.compiled_code import compiled_graphs, with_own_code
from slipstream.errors import SlipstreamError
from slipstream.gpu_limits import gpu_limits
from slipstream.machine_probe import memory_bytes, package_version
from slipstream.run_spec.reasons import Reason
from slipstream.telemetry.logs import log_event

P = ParamSpec("P")
R = TypeVar("R")

_REQUIRED_DYNAMO_CONFIG = {"suppress_errors": False, "disable": False, "error_on_nested_fx_trace": True}
_declared: dict[str, int] = {}
_log = logging.getLogger(__name__)
_SELF_TEST_HEADS, _SELF_TEST_HEAD_DIM, _SELF_TEST_CONTEXT, _SELF_TEST_BLOCK = 2, 64, 256, 16


@dataclass(frozen=True)
class CompilerGuards:
    """What this torch does where a compiled call could go dense."""

    torch_version: str
    guards: Mapping[str, str]
    """See `guards_of`."""

    def in_words(self) -> str:
        """One line for the log at start."""
        return f"torch {self.torch_version}: " + "; ".join(f"{what}: {then}" for what, then in self.guards.items())


def check_environment(device: torch.device) -> CompilerGuards:
    """Refuse what would let compiled attention go dense; say what this torch does against it.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, torch is too old, compilation is disabled or made lenient by
            environment or configuration, or this process sees another number of GPUs than one.
    """
    release = torch_release(torch.__version__)
    if release is None or release < MINIMUM_TORCH:
        minimum = ".".join(map(str, MINIMUM_TORCH))
        raise _unsupported(f"torch is {torch.__version__}, at least {minimum} is needed", "Install a newer torch.")
    if disabling := disabling_variables(os.environ):
        raise _unsupported(
            f"{', '.join(disabling)} is set; attention would run dense without an error",
            "Unset it in the environment of the trainer.",
        )
    for name, expected in _REQUIRED_DYNAMO_CONFIG.items():
        found = getattr(torch._dynamo.config, name, expected)
        if found != expected:
            raise _unsupported(
                f"torch._dynamo.config.{name} is {found}, it must be {expected}",
                "Remove what changes it: an environment variable or an import that configures torch.",
            )
    if device.type == "cuda" and torch.cuda.device_count() != 1:
        raise _unsupported(
            f"this process sees {torch.cuda.device_count()} GPUs, a trainer must see exactly one",
            "Set CUDA_VISIBLE_DEVICES to one device.",
        )
    return CompilerGuards(str(torch.__version__), guards_of(release))


def check_head_dim(device: torch.device, head_dim: int) -> None:
    """Refuse a drafter whose heads the kernels of a CUDA device cannot take, before anything of it is built.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED.
    """
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", None)
    limits = gpu_limits((properties.major, properties.minor), shared_memory, torch_release(torch.__version__))
    if refusal := limits.head_dim_refusal(head_dim):
        raise _unsupported(
            f"{properties.name} cannot train this drafter: {refusal}",
            "Train on another GPU, or with another drafter.head_dim; slipstream doctor says what this machine can do.",
        )


def install_tripwire() -> None:
    """Replace the dense kernels of both flex operators by one that raises; compiled calls never reach them.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, this torch keeps its dense kernels elsewhere.
    """
    for operator, phase in ((flex_forward_op, "forward"), (flex_backward_op, "backward")):
        kernels = getattr(operator, "py_kernels", {})
        if DispatchKey.CompositeExplicitAutograd not in kernels:
            raise _unsupported(
                f"torch {torch.__version__} registers the dense {phase} of flex_attention in an unknown place",
                "Use a torch version that Slipstream was tested with.",
            )
        kernels[DispatchKey.CompositeExplicitAutograd] = functools.partial(_refuse_dense, phase)
        # Where a torch has none, the self-test shows whether the tripwire holds without.
        getattr(operator, "_dispatch_cache", {}).clear()


def _refuse_dense(phase: str, query: Tensor, key: Tensor, *_rest: Any, **_options: Any) -> NoReturn:
    batch, heads, queries, _ = query.shape
    dense_bytes = 4 * batch * heads * queries * key.shape[2]
    raise SlipstreamError(
        f"flex_attention ran uncompiled ({phase}): query {tuple(query.shape)}, key {tuple(key.shape)}, {query.dtype} "
        f"on {query.device}; dense scores would take {dense_bytes / 2**30:.2f} GiB",
        reason=Reason.DENSE_ATTENTION,
        remedy="Report this with the log: a compiled graph was not used. The run can resume from its checkpoint.",
    )


def self_test(device: torch.device) -> None:
    """Show that an uncompiled call raises and that a compiled one runs: forward and backward, on CPU forward only.

    Raises:
        SlipstreamError: ENVIRONMENT_UNSUPPORTED, one of the two is not so.
    """
    generator = torch.Generator().manual_seed(0)
    anchors = Anchors(torch.tensor([3, 200, 0]), torch.tensor([True, True, False])).to(device)
    positions = torch.arange(_SELF_TEST_CONTEXT, device=device)
    queries = len(anchors.valid) * _SELF_TEST_BLOCK
    attention = build_block_attention(AttentionLayout("flex", _SELF_TEST_BLOCK), anchors, positions)
    lengths = (queries, _SELF_TEST_CONTEXT + queries, _SELF_TEST_CONTEXT + queries)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = [
        torch.randn(_SELF_TEST_HEADS, length, _SELF_TEST_HEAD_DIM, generator=generator).to(device, dtype)
        for length in lengths
    ]
    try:
        with warnings.catch_warnings():
            # torch warns of exactly what is tried here on purpose.
            warnings.simplefilter("ignore")
            flex_attention(inputs[0][None], inputs[1][None], inputs[2][None])
    except SlipstreamError as error:
        if error.reason is not Reason.DENSE_ATTENTION:
            raise
    else:
        raise _unsupported("an uncompiled flex_attention call ran: the tripwire does not hold", "Report this.")
    compiled = compile_owned(functools.partial(attention, sliding=False), name="self_test", graphs=1)
    with torch.set_grad_enabled(device.type == "cuda"):
        inputs = [tensor.requires_grad_(torch.is_grad_enabled()) for tensor in inputs]
        output = compiled(*inputs)
        results = [output, *(torch.autograd.grad(output.sum(), inputs) if output.requires_grad else ())]
    if not all(torch.isfinite(result).all() for result in results):
        raise _unsupported("compiled flex_attention gave values that are not finite", "Report this with the log.")


def configure_compiler() -> None:
    """Set what torch keeps per thread; call it in the one thread that compiles, before anything is compiled."""
    wanted = {
        # A backward compiled at the first .backward() would escape a warm-up without one.
        "force_non_lazy_backward_lowering": True,
        # What is cheap to compute (a norm's output, the gated product, rotated queries) is not kept for the backward's
        # kernels but computed once more: a third of the activations, at the price of one pass over each.
        "ban_recompute_materialized_backward": False,
        # Rotary tables serve every layer, and what is made with them would count as used far apart.
        "ban_recompute_used_far_apart": False,
    }
    unknown = [name for name in wanted if not hasattr(torch._functorch.config, name)]
    for name in wanted.keys() - set(unknown):
        setattr(torch._functorch.config, name, wanted[name])
    if unknown:
        then = "the warm-up runs every backward all the same; memory may differ from what is predicted"
        log_event(_log, "warning", "compiler_setting_unknown", torch=torch.__version__, settings=unknown, then=then)


def compile_owned(function: Callable[P, R], *, name: str, graphs: int) -> Callable[P, R]:
    """Compile a function so that it shares no cache and no limit with any other: whole graph, static shapes.

    Args:
        function: anything callable; it is traced inside a wrapper with a code object of its own.
        name: of that code object, as it appears in torch's logs.
        graphs: how many variants (train and eval, buckets) are expected.

    Returns:
        A callable for the calling thread only.
    """

    def owned(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    own_code = with_own_code(owned, name)
    wanted: dict[str, Any] = {"recompile_limit": graphs, "isolate_recompiles": True}
    offered = inspect.signature(torch.compile).parameters
    options = {key: value for key, value in wanted.items() if key in offered}
    if "recompile_limit" not in options:
        # One limit for all functions, and it counts per code object: the largest that is declared.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, graphs)
    _declared[name] = graphs
    compiled = torch.compile(own_code, fullgraph=True, dynamic=False, **options)
    owner = threading.get_ident()

    @functools.wraps(own_code)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert threading.get_ident() == owner, f"{name} was compiled by another thread than the one that calls it"
        return compiled(*args, **kwargs)

    return call


class CompilationFreeze:
    """After the warm-up: compiling anything is an error. Also sees a backward that is compiled late."""

    def __init__(self, pack_lengths: Sequence[int] = ()) -> None:
        """`pack_lengths`: the buckets, for the words."""
        self.num_graphs = 0
        self._pack_lengths = pack_lengths

    def freeze(self) -> int:
        """Forbid compilation in this process, for good. Returns the number of graphs compiled so far."""
        self.num_graphs = compiled_graphs()
        torch.compiler.set_stance("fail_on_recompile")
        torch._dynamo.callback.callback_handler.register_start_callback(self._refuse)
        return self.num_graphs

    def _refuse(self, arguments: Any) -> NoReturn:
        declared = f" for packs of {', '.join(map(str, self._pack_lengths))} tokens" if self._pack_lengths else ""
        raise SlipstreamError(
            f"torch began to compile ({arguments}) after the warm-up had compiled {self.num_graphs} graphs{declared}",
            reason=Reason.PACK_OUTSIDE_BUCKETS,
            remedy="A shape, dtype or grad mode was not part of the warm-up; report this with the log.",
        )


def graphs_declared() -> dict[str, int]:
    """What this process means to compile: `graphs` of every `compile_owned`, by name."""
    return dict(_declared)


def describe_failure(error: BaseException, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """What a report of a failed compiled call must hold.

    Args:
        error: what was raised.
        shapes: of the pack at hand, by tensor name.
    """
    report = {
        "error": f"{type(error).__name__}: {error}",
        "guards": "; ".join(guards_that_failed(error)),
        "shapes": shapes_in_words(shapes),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "graphs": str(compiled_graphs()),
        "host_memory": "{} MiB, {} of them available".format(*(size >> 20 for size in memory_bytes())),
    }
    if torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        report |= {
            "triton": package_version("triton") or "unknown",
            "cuda": str(torch.version.cuda),
            "driver": driver.read_text().splitlines()[0] if driver.exists() else "unknown",
        }
        try:
            report |= {"gpu": torch.cuda.get_device_name(), "memory": torch.cuda.memory_summary(abbreviated=True)}
        except RuntimeError as lost:
            # After some failures CUDA answers nothing any more; the report must not hide the failure it is about.
            report["gpu"] = f"does not answer: {lost}"
    return report


def guards_that_failed(error: BaseException) -> list[str]:
    """What differed from every graph there is, as torch wrote it into the error's text."""
    return re.findall(r"^\s*- \d+/\d+: (.+)$", str(error), flags=re.MULTILINE)


def shapes_in_words(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Of tensors, by name."""
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


def _unsupported(message: str, remedy: str) -> SlipstreamError:
    return SlipstreamError(message, reason=Reason.ENVIRONMENT_UNSUPPORTED, remedy=remedy)
