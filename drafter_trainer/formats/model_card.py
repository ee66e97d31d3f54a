"""README.md of an exported drafter: what it is, what it was made from, what was measured, how it is served."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from drafter_trainer.drafter_config import SLIDING, DFlashConfig
from drafter_trainer.formats.self_test import SelfTest
from slipstream.counted import counted
from slipstream.gguf_header import read_gguf_header
from slipstream.model_names import is_hub_model
from slipstream.run_spec.spec import RunSpec, TargetSpec
from slipstream.target_files import MODEL_CARD, TargetFiles, is_path

_SERVE = {
    "vllm": "vllm serve {target} \\\n"
    '  --speculative-config \'{{"model": "{directory}", "method": "dflash", "num_speculative_tokens": {drafts}}}\'',
    "sglang": "python -m sglang.launch_server --model-path {target} \\\n"
    "  --speculative-algorithm DFLASH --speculative-draft-model-path {directory}",
    "zlab": "from transformers import AutoModel, AutoModelForCausalLM\n\n"
    'drafter = AutoModel.from_pretrained("{directory}", trust_remote_code=True)\n'
    "target = AutoModelForCausalLM.from_pretrained({target})\n"
    "drafter.spec_generate(target, input_ids, max_new_tokens=128)",
}


@dataclass(frozen=True)
class TargetFacts:
    """How a stranger finds the target, and whose it is."""

    name: str
    hub_name: str | None
    """OWNER/NAME of the hub; None where nothing shows that the name is one."""
    licence: str | None
    """None: its files name none, or are not at hand."""
    at_hand: bool
    """Its files lie on this machine."""
    also: str | None = None
    """What a .gguf calls its model: no name to load it by, and often not the one it is known by."""
    only_here: bool = False
    """The name is the last part of a path of this machine: nobody can load a model by it elsewhere."""


@dataclass(frozen=True)
class CardFacts:
    """What the card says that is not in the run definition."""

    format_name: str
    dtype: str
    directory_name: str
    target: TargetFacts
    steps: int
    total_steps: int
    tokens: int
    seconds: float | None
    """Of all steps; None where the run's metrics are not at hand."""
    versions: dict[str, str]
    self_test: SelfTest | None
    results: str | None
    """Markdown; None where nothing was measured."""
    answers: str | None
    """Who wrote what was learned; None where nothing says it."""


def model_card(spec: RunSpec, config: DFlashConfig, facts: CardFacts) -> str:
    """The text of README.md."""
    sections = (
        _front_matter(facts),
        f"# Drafter of {_title(facts.target)}\n\n{_what(config, facts)}",
        _section("Measured", _measured(facts)),
        _section("Self-test of these files", _self_test(facts)),
        _section("Serve it", _serving(config, facts)),
        _section("Trained with", _recipe(spec, facts)),
        _section("Licence", _licence(facts)),
    )
    return "\n\n".join(sections) + "\n"


def target_facts(given: str | None, trained: TargetSpec, files: TargetFiles | None) -> TargetFacts:
    """What the card says of the target: never a path of this machine.

    Args:
        given: what the user calls it; None: as the recipe.
        trained: the recipe's target.
        files: of the target, where they are at hand; a directory's config.json or a .gguf may know the model's name.
    """
    licence = read_licence(files) if files else None
    # The user means a name: a directory that happens to be called so here does not make it a path.
    if given is not None and not is_path(given):
        return TargetFacts(given, given if is_hub_model(given) else None, licence, files is not None)
    name = given or trained.model
    if not _leads_somewhere(name):
        # The recipe's OWNER/NAME may also have been a directory where the target was served.
        from_hub = files is not None and files.revision is not None
        return TargetFacts(name, name if from_hub and is_hub_model(name) else None, licence, files is not None)
    if files is not None and files.is_gguf:
        called = read_gguf_header(files.weights[0]).values.get("general.name")
        also = called if isinstance(called, str) and called.isprintable() else None
        return TargetFacts(Path(name).name, None, licence, at_hand=True, also=also, only_here=True)
    known = _hub_name_in(files.root) if files else None
    return TargetFacts(known or Path(name).name, known, licence, files is not None, only_here=known is None)


def is_gguf(name: str) -> bool:
    """Whether a target is one file, which neither servers nor speculators load by a name."""
    return name.endswith(".gguf")


def _leads_somewhere(name: str) -> bool:
    return is_path(name) or Path(name).exists()


def _hub_name_in(root: Path) -> str | None:
    """Where a directory's model came from, as its config.json knows it."""
    config = root / "config.json"
    known = json.loads(config.read_text(encoding="utf-8")).get("_name_or_path") if config.is_file() else None
    usable = isinstance(known, str) and is_hub_model(known) and not _leads_somewhere(known)
    return known if usable else None


def read_licence(files: TargetFiles) -> str | None:
    """The licence of a model, from its card's head, its configuration or its .gguf; None where none names it."""
    if not files.is_gguf:
        return _licence_beside(files.root)
    licence = read_gguf_header(files.weights[0]).values.get("general.license")
    return licence if isinstance(licence, str) else None


def _licence_beside(root: Path) -> str | None:
    card = root / MODEL_CARD
    lines = card.read_text(encoding="utf-8", errors="replace").splitlines() if card.is_file() else []
    if lines[:1] == ["---"]:
        for line in lines[1:]:
            if line.strip() == "---":
                break
            if line.startswith("license:") and line.partition(":")[2].strip():
                return line.partition(":")[2].strip().strip("\"'")
    config = root / "config.json"
    if config.is_file():
        values = json.loads(config.read_text(encoding="utf-8"))
        return str(values["license"]) if values.get("license") else None
    return None


def _front_matter(facts: CardFacts) -> str:
    library = "transformers" if facts.format_name == "zlab" else facts.format_name
    base = f"base_model: {facts.target.hub_name}\n" if facts.target.hub_name else ""
    return f"---\n{base}library_name: {library}\ntags:\n- speculative-decoding\n- dflash\n---"


def _title(target: TargetFacts) -> str:
    return f"{target.name} ({target.also})" if target.also else target.name


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}"


def _what(config: DFlashConfig, facts: CardFacts) -> str:
    layers = counted(config.num_layers, "layer")
    if SLIDING in config.layer_types:
        layers += f", {config.layer_types.count(SLIDING)} of them with a window of {config.sliding_window}"
    notes = [
        f"A DFlash drafter (arXiv 2602.06036): {layers}, blocks of {config.block_size} tokens, hidden states of target "
        f"layers {list(config.target_layer_ids)} (counted from 0), MASK token {config.mask_token_id}; {facts.dtype} "
        f"weights in the layout of {facts.format_name}."
    ]
    if config.embedding_scale != 1.0 or config.logit_soft_cap is not None:
        notes.append(
            f"The target multiplies its embeddings by {config.embedding_scale:g}"
            + (f" and caps its logits at {config.logit_soft_cap:g}" if config.logit_soft_cap is not None else "")
            + ": the engine must embed the drafter's blocks in the same way."
        )
    return "\n\n".join(notes)


def _measured(facts: CardFacts) -> str:
    return facts.results or (
        "Nothing was measured before the export: `slipstream eval DIRECTORY --target-model … --prompts …` does."
    )


def _self_test(facts: CardFacts) -> str:
    found = facts.self_test
    if found is None:
        return "**Left out** (`--without-self-test`): nobody has decoded with these files yet."
    ties = f" ({found.near_ties} near-ties)" if found.near_ties else ""
    return (
        f"The files were read back by other code than wrote them and drafted on the target's own greedy text: "
        f"{found.equal_drafts} of {found.drafts} drafted tokens are those of the checkpoint{ties}; accepted length "
        f"{found.accepted_length_of_files:.3f}, checkpoint {found.accepted_length:.3f} ({found.prompts} plain prompts, "
        f"{found.rounds} rounds: a test of the files, no measurement of the drafter)."
    )


def _serving(config: DFlashConfig, facts: CardFacts) -> str:
    language = "python" if facts.format_name == "zlab" else "bash"
    name, note = facts.target.name, "Not run where this was exported."
    if language == "python" and is_gguf(name):
        target, note = f'".", gguf_file="{name}"', f"With `{name}` in the working directory. {note}"
    elif facts.target.only_here:
        target = "TARGET" if language == "bash" else '"TARGET"'
        note = f"Put in place of TARGET: {_where_a_target_is(facts.target)} {note}"
    else:
        target = shlex.quote(name) if language == "bash" else f'"{name}"'
    command = _SERVE[facts.format_name].format(
        target=target, directory=facts.directory_name, drafts=config.block_size - 1
    )
    return f"```{language}\n{command}\n```\n\n{note}"


def _where_a_target_is(target: TargetFacts) -> str:
    if is_gguf(target.name):
        return (
            f"the hub name or directory of the model that `{target.name}` was made from, in safetensors. "
            "Its weights are others where the .gguf is quantised: measure the drafter on them."
        )
    return f"the hub name or directory of the target, which was `{target.name}` where the drafter was trained."


def _recipe(spec: RunSpec, facts: CardFacts) -> str:
    objective = spec.model_dump(mode="json")["loss"]["objective"]
    objective = objective if isinstance(objective, str) else json.dumps(objective)
    pace = "" if facts.seconds is None else f", {facts.seconds / 60:.1f} minutes of steps"
    files = ", ".join(f"`{Path(file).name if file.startswith('/') else file}`" for file in spec.data.files)
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items() if name != "machine")
    rows = {
        "run": f"`{spec.name}`, {facts.steps} of {facts.total_steps} steps, {facts.tokens:,} tokens{pace}",
        "begun from": spec.drafter.init_from and f"`{_without_path(spec.drafter.init_from)}`",
        "data": f"{files}: {facts.answers}" if facts.answers else files,
        "objective": f"{objective}, slots weighted by {spec.loss.slot_weights}",
        "optimizer": f"{spec.optimizer.kind}, learning rate {spec.optimizer.learning_rate:g}, "
        f"{spec.optimizer.schedule}",
        "pack": f"{spec.data.pack_tokens} tokens, {spec.train.anchors_per_pack} anchors, "
        f"{spec.train.packs_per_step} a step, {spec.train.precision}",
        "hardware": facts.versions.get("machine", "not recorded by the run"),
        "software": versions,
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items() if text)
    return f"| | |\n|---|---|\n{table}\n\nThe whole run definition is in `slipstream.json`."


def _without_path(init_from: str) -> str:
    """RUN@step-N of a checkpoint's path, the name of any other directory, what names no path as it is."""
    path = Path(init_from)
    if not path.is_absolute():
        return init_from
    return f"{path.parent.parent.name}@{path.name}" if path.parent.name == "checkpoints" else path.name


def _licence(facts: CardFacts) -> str:
    found = facts.target.licence
    unknown = "unknown: its files name none" if facts.target.at_hand else "not looked at: its files were not at hand"
    target = f"`{found}`, by its own files" if found else unknown
    return (
        f"Of the target's weights: {target}. The drafter was trained on the target's hidden states and holds none of "
        "its weights; whether the target's licence covers it is for whoever publishes it to find out."
    )
