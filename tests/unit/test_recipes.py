"""Shipped recipes are found by name."""

from pathlib import Path

import pytest

from recipes import find_recipe, recipe_names, recipe_path
from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason


def test_every_recipe_is_found_with_and_without_suffix() -> None:
    assert "demo-smollm2-135m" in recipe_names()
    for name in recipe_names():
        assert recipe_path(name).is_file()
        assert recipe_path(f"{name}.toml") == recipe_path(name)


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(SlipstreamError, match="demo-smollm2-135n") as refused:
        recipe_path("demo-smollm2-135n")
    assert refused.value.reason is Reason.SPEC_INVALID
    assert "'demo-smollm2-135m'" in refused.value.remedy


def test_unknown_recipe_lists_all_when_none_is_near() -> None:
    with pytest.raises(SlipstreamError) as refused:
        recipe_path("../etc/passwd")
    assert all(name in refused.value.remedy for name in recipe_names())


def test_what_exists_or_has_a_slash_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = recipe_names()[0]
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == recipe_path(name)
    (tmp_path / name).touch()
    assert find_recipe(name) == Path(name)
    assert find_recipe("./missing") == Path("./missing")


def test_every_recipe_says_what_was_measured_with_it() -> None:
    for name in recipe_names():
        head = recipe_path(name).read_text(encoding="utf-8").partition("\nname = ")[0]
        assert "# Measured: " in head, name
