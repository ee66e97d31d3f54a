"""What decoding costs with a drafter and without: one loop, one process, one GPU, rounds captured as CUDA graphs.

    python -m benchmarks.decode_speed --model SmolLM2-135M-Instruct --prompts P.jsonl [--run RUN] [--leave-by 90]

A round with a drafter costs so many plain steps, and pays from that accepted length on: the break-even, which needs no
trained drafter. With --run the prompts are also decoded by the trained one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_parts import profile_steps
from benchmarks.results_file import RESULTS, Row, write_results
from drafter_trainer.drafter import initialise_weights
from drafter_trainer.drafter_config import DrafterConfig, resolve_drafter_config
from drafter_trainer.drafter_interface import Drafter
from drafter_trainer.evaluation.batch_decoder import BatchDecoder, DecodingSetting, static_length
from drafter_trainer.evaluation.captured import captured
from drafter_trainer.evaluation.command import open_checkpoint
from drafter_trainer.evaluation.compare import compare
from drafter_trainer.evaluation.decode import Decoded
from drafter_trainer.evaluation.report import total
from drafter_trainer.evaluation.setting import COMPILER, PLAIN, TRAINED, Setting
from slipstream.chat_rendering import render_chat
from slipstream.eval_prompts import Prompt, end_ids, load_prompts
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.spec import DrafterSpec
from slipstream.target_facts import read_frozen_weights, read_target_facts
from slipstream.target_loading import LoadedTarget, load_causal_lm
from slipstream.wire.target_config import TargetConfig

FLOOR = 1.3
"""Of the speed-up on all prompts."""
NEW_TOKENS = 128
REPETITIONS, ROUNDS = 5, 40
SHAPES = ((5, 16), (2, 16), (1, 16), (5, 8))
"""(draft layers, block size) of untrained drafters; the first one is also measured compiled."""


@dataclass(frozen=True)
class Target:
    """The loaded target and what drafters for it are made from."""

    loaded: LoadedTarget
    config: TargetConfig
    final_norm: Tensor
    recipe: DrafterSpec

    def untrained(self, layers: int, block_size: int) -> Drafter:
        """A drafter with first weights, placed beside the target."""
        layer_types = ("full_attention",) * layers
        shape = {"num_layers": layers, "block_size": block_size, "layer_types": layer_types}
        drafter = resolve_drafter_config(self.recipe.model_copy(update=shape), self.config).build()
        initialise_weights(drafter, 0, self.final_norm)
        return drafter.to(self.loaded.model.device, self.loaded.model.dtype).eval()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--run", type=Path, help="run or checkpoint directory of a trained drafter")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-135m-1gpu.toml"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompts-per-source", type=int, default=12)
    parser.add_argument("--leave-by", type=float, default=90.0, help="seconds from now; what is left then is left out")
    parser.add_argument("--no-graphs", action="store_true", help="for a try-out on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument("--commit", help="for machines without the repository")
    return measure(parser.parse_args())


def measure(args: argparse.Namespace) -> int:
    """Measure one thing after the other; the file holds what was measured, also where a later thing fails."""
    deadline = time.monotonic() + args.leave_by
    target = load_target(args)
    chosen = load_prompts(args.prompts, args.prompts_per_source)
    rows: list[Row] = []
    extra: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}, "profiles": {}, "left_out": []}
    for name, found in measurements(args, target, chosen, extra):
        rows += found
        for row in found:
            sys.stdout.write(f"{row.case:44} {row.metric:44} {row.ours:10.3f} {row.unit}\n")
        path = write_results("decode_speed", rows, commit=args.commit, extra=extra, directory=args.out)
        if time.monotonic() > deadline:
            extra["left_out"].append(f"what follows {name}: out of time")
            break
    path = write_results("decode_speed", rows, commit=args.commit, extra=extra, directory=args.out)
    sys.stdout.write(f"{path}\n")
    return 0


def measurements(
    args: argparse.Namespace, target: Target, chosen: list[Prompt], extra: dict[str, Any]
) -> Iterator[tuple[str, list[Row]]]:
    """What there is to measure, the most telling first."""
    prompts = [prompt_ids(target.loaded, prompt) for prompt in chosen[: args.batch_size]]
    graphs = not args.no_graphs
    plain = Timed(target, None, prompts, graphs=graphs)
    yield "plain", plain.rows("plain", None)
    for number, (layers, block_size) in enumerate(SHAPES):
        drafter = Timed(target, target.untrained(layers, block_size), prompts, graphs=graphs)
        case = f"{layers} draft layers, block {block_size}"
        yield case, drafter.rows(case, plain)
        if number == 0:
            if args.run:
                yield "trained", list(trained_rows(args, target, chosen, extra))
            profile(extra, {"plain step": plain, case: drafter})
            if graphs:
                yield from compiled_measurements(args, target, chosen, extra)
    if graphs:
        launched = Timed(target, None, prompts, graphs=False)
        yield "plain, launched kernel by kernel", launched.rows("plain, launched kernel by kernel", None)


def compiled_measurements(
    args: argparse.Namespace, target: Target, chosen: list[Prompt], extra: dict[str, Any]
) -> Iterator[tuple[str, list[Row]]]:
    """The same with the target's layers and the drafter compiled, which takes a while."""
    prompts = [prompt_ids(target.loaded, prompt) for prompt in chosen[: args.batch_size]]
    plain = Timed(target, None, prompts, graphs=True, compiler=COMPILER)
    yield "plain, compiled", plain.rows("plain, compiled", None)
    case = f"{SHAPES[0][0]} draft layers, block {SHAPES[0][1]}, compiled"
    drafter = Timed(target, target.untrained(*SHAPES[0]), prompts, graphs=True, compiler=COMPILER)
    yield case, drafter.rows(case, plain)
    if args.run:
        yield "trained, compiled", list(trained_rows(args, target, chosen, extra, compiler=COMPILER))
    profile(extra, {"plain step, compiled": plain, case: drafter})


def profile(extra: dict[str, Any], cases: dict[str, "Timed"]) -> None:
    """Which kernels a round is made of."""
    if torch.cuda.is_available():
        for case, timed_case in cases.items():
            extra["profiles"][case] = profile_steps(timed_case.whole, 20)


class Timed:
    """A decoder in the middle of an answer, and the seconds of its round and of the round's parts."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        prompts: list[Tensor],
        *,
        graphs: bool,
        compiler: str | None = None,
    ) -> None:
        length = static_length(max(map(len, prompts)) + NEW_TOKENS + 16)
        setting = DecodingSetting(len(prompts), length, graphs=graphs, compiler=compiler)
        self.decoder = BatchDecoder(target.loaded.model, drafter, setting)
        self.decoder.prepare(prompts, NEW_TOKENS)
        self.decoder.prefill(prompts, NEW_TOKENS)
        self.whole: Callable[[], None] = self._read_round
        parts = {"drafting": self.decoder.draft, "verifying": self.decoder.verify} if drafter is not None else {}
        self.parts = {name: captured(part) if graphs else part for name, part in parts.items()}
        self.seconds, self.spread = timed(self.whole)

    def _read_round(self) -> None:
        self.decoder.step()
        self.decoder.emitted.tolist()

    def rows(self, case: str, plain: "Timed | None") -> list[Row]:
        """Milliseconds of a round, of its parts, and its cost in plain steps."""
        found = [Row(case, "a round, host read included", "ms", 1e3 * self.seconds, spread=self.spread)]
        found += [Row(case, f"{name} alone", "ms", 1e3 * timed(part)[0]) for name, part in self.parts.items()]
        if plain is None:
            per_second = len(self.decoder.lengths) / self.seconds
            return [*found, Row(case, "tokens/s", "tokens/s", per_second)]
        cost = self.seconds / plain.seconds
        return [*found, Row(case, "break-even accepted length, bonus included", "tokens", cost)]


def timed(function: Callable[[], None]) -> tuple[float, float]:
    """Median seconds of a call, and (max - min) / median over the repetitions."""
    seconds = []
    for _ in range(REPETITIONS):
        synchronise()
        began = time.perf_counter()
        for _ in range(ROUNDS):
            function()
        synchronise()
        seconds.append((time.perf_counter() - began) / ROUNDS)
    median = statistics.median(seconds)
    return median, (max(seconds) - min(seconds)) / median


def synchronise() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def load_target(args: argparse.Namespace) -> Target:
    """The target of the recipe, from where --model says."""
    spec = load_recipe(args.recipe).spec
    used = spec.target.model_copy(update={"model": args.model, "dtype": args.dtype, "revision": None})
    loaded = load_causal_lm(used, "cuda" if torch.cuda.is_available() else "cpu")
    config = read_target_facts(loaded.model, loaded.tokenizer).config
    final_norm = read_frozen_weights(loaded.model, config)["norm.weight"].float()
    return Target(loaded, config, final_norm, spec.drafter)


def prompt_ids(target: LoadedTarget, prompt: Prompt) -> Tensor:
    """int [P], as the chat template writes the prompt."""
    text = render_chat(target.tokenizer, prompt.messages, as_prompt=True)
    return torch.tensor(target.tokenizer(text, add_special_tokens=False)["input_ids"], device=target.model.device)


def trained_rows(
    args: argparse.Namespace,
    target: Target,
    chosen: list[Prompt],
    extra: dict[str, Any],
    compiler: str | None = None,
) -> Iterator[Row]:
    """Real decoding of the prompts, plainly and with the trained drafter, prompt by prompt in turns."""
    from drafter_trainer.checkpoint import load_drafter_weights

    text, weights = load_drafter_weights(open_checkpoint(args.run)[0])
    drafter = DrafterConfig.from_json(text).build()
    drafter.load_state_dict(weights)
    drafter = drafter.to(target.loaded.model.device, target.loaded.model.dtype).eval()
    needed = max(len(prompt_ids(target.loaded, prompt)) for prompt in chosen) + NEW_TOKENS + drafter.config.block_size
    setting = DecodingSetting(1, static_length(needed), graphs=not args.no_graphs, compiler=compiler)
    ways = {
        PLAIN: BatchDecoder(target.loaded.model, None, setting),
        TRAINED: BatchDecoder(target.loaded.model, drafter, setting),
    }
    ends = end_ids(target.loaded)

    def decodings() -> Iterator[tuple[Setting, Prompt, dict[str, Decoded]]]:
        for prompt in chosen:
            ids = prompt_ids(target.loaded, prompt)
            yield Setting(), prompt, {way: decoder.decode([ids], NEW_TOKENS, ends)[0] for way, decoder in ways.items()}

    comparison = compare(decodings(), [TRAINED], 0.0 if args.dtype == "float32" else 0.5)[Setting()]
    named = "trained, compiled" if compiler else "trained"
    extra.setdefault("lossless", {})[named] = comparison.lossless
    with_drafter, plainly = (
        {**comparison.tallies[way], "all": total(comparison.tallies[way])} for way in (TRAINED, PLAIN)
    )
    for source, tally in with_drafter.items():
        plain = plainly[source]
        case = f"{named}, {source}, {tally.prompts} prompts"
        yield Row(case, "accepted length, bonus included", "tokens", tally.accepted_length)
        yield Row(
            *(case, "tokens/s, with the drafter ÷ plain", "tokens/s", tally.tokens_per_second),
            *(plain.tokens_per_second, "plain, same loop", tally.tokens_per_second / plain.tokens_per_second),
            floor=FLOOR if source == "all" else None,
        )


if __name__ == "__main__":
    sys.exit(main())
