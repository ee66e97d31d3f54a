"""Every recipe that ships loads, by its name, and says in its head what was measured with it."""

from pathlib import Path

import pytest

import recipes
from slipstream.run_spec.device import resolve_device
from slipstream.run_spec.load import describe, load_recipe

NAMES = recipes.recipe_names()


def test_there_are_recipes() -> None:
    assert {"demo-smollm2-135m", "smollm2-135m-1gpu", "qwen3-8b-reference-box"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_loads_and_says_what_was_measured(name: str, tmp_path: Path) -> None:
    path = recipes.recipe_path(name)
    loaded = load_recipe(path)
    assert loaded.spec.name == name
    head = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "Measured:" in head
    copy = tmp_path / "copy.toml"
    copy.write_text(describe(loaded))
    assert load_recipe(copy).spec == loaded.spec


@pytest.mark.parametrize("name", NAMES)
def test_shipped_files_exist(name: str) -> None:
    """What a recipe names below data/ ships with it; the rest is the user's to bring."""
    spec = load_recipe(recipes.recipe_path(name)).spec
    shipped = recipes.recipe_path(name).parent / "data"
    named = [Path(file) for file in (*spec.data.files, spec.eval.prompts) if file]
    assert [file for file in named if file.is_relative_to(shipped) and not file.is_file()] == []


def test_the_demo_trains_on_a_cpu_and_takes_a_gpu_by_override() -> None:
    path = recipes.recipe_path("demo-smollm2-135m")
    assert resolve_device(load_recipe(path).spec.train, cuda_available=False) == "cpu"
    gpu = ["train.device=cuda", "train.attention=flex", "train.precision=bfloat16"]
    assert resolve_device(load_recipe(path, gpu).spec.train, cuda_available=True) == "cuda"
