"""Which architectures there are, and what becomes of a package that brings none, a wrong one, or two of a name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_trainer.checkpoint_state import read_state
from drafter_trainer.drafter_config import DFlashConfig, DrafterConfig, resolve_drafter_config
from drafter_trainer.evaluation.command import open_checkpoint
from drafter_trainer.formats.first_weights import TrainedTarget, read_first_weights
from drafter_trainer.resume import check_same_run
from slipstream.errors import SlipstreamError
from slipstream.plan.sizes import RunSizes
from slipstream.run_spec.architectures import installed_architectures
from slipstream.run_spec.load import describe, load_recipe, parse_recipe
from slipstream.run_spec.reasons import Reason
from slipstream.run_spec.spec import DrafterSpec
from tests.fakes.drafter_cases import TINY
from tests.fakes.exports import drawn_weights, exportable_config, write_checkpoint
from tests.fakes.plug_in import NAME, installed, write_plug_in
from tests.fakes.tiny_run import RECIPE, write_tiny_run
from tests.unit.drafter.test_drafter_config import target


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return tmp_path / "packages"


def refused(spec: DrafterSpec) -> SlipstreamError:
    with pytest.raises(SlipstreamError) as caught:
        resolve_drafter_config(spec, target(mask_token_id=3))
    return caught.value


def test_names_are_listed_and_the_nearest_is_offered(site: Path) -> None:
    assert installed_architectures() == ("dflash",)
    with installed(write_plug_in(site)):
        assert installed_architectures() == ("dflash", NAME)
        assert parse_recipe(RECIPE, ("drafter.architecture=last_feature",)).drafter.architecture == NAME
        words = (
            r"drafter.architecture: 'last_featur' is no .* expected one of dflash, last_feature; did you mean 'last_f"
        )
        with pytest.raises(SlipstreamError, match=words) as caught:
            parse_recipe(RECIPE, ("drafter.architecture=last_featur",))
        assert caught.value.reason is Reason.SPEC_INVALID
    with pytest.raises(SlipstreamError, match="'last_feature' is no drafter architecture that is installed here"):
        parse_recipe(RECIPE, ("drafter.architecture=last_feature",))


def test_a_plug_in_resolves_and_goes_to_json_and_back(site: Path) -> None:
    with installed(write_plug_in(site)):
        spec = DrafterSpec(architecture=NAME, block_size=4, num_features=2, options={"width": 24})
        config = resolve_drafter_config(spec, target(mask_token_id=3))
        assert config.architecture == NAME and config.num_features == 2 and config.width == 24  # type: ignore[attr-defined]
        assert DrafterConfig.from_json(config.to_json()) == config
    with pytest.raises(SlipstreamError, match="architecture is 'last_feature', installed here: dflash") as caught:
        DrafterConfig.from_json(config.to_json())
    assert caught.value.reason is Reason.CHECKPOINT_INVALID


def test_options_of_a_recipe_say_where_they_came_from(site: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(RECIPE)
    with installed(write_plug_in(site)):
        loaded = load_recipe(recipe, ("drafter.architecture=last_feature", "drafter.options.width=48"))
        assert loaded.spec.drafter.options == {"width": 48} and loaded.origins["drafter.options"] == "override"
        recipe.write_text(describe(loaded))
        assert load_recipe(recipe).spec == loaded.spec
    assert load_recipe(recipe, ("drafter.architecture=dflash", "drafter.options=")).spec.drafter.options == {}


def test_settings_that_nobody_reads_are_refused(site: Path) -> None:
    assert "dflash does not read drafter.options.width = 3" in refused(DrafterSpec(options={"width": 3})).message
    with installed(write_plug_in(site)):
        unread = refused(DrafterSpec(architecture=NAME, num_layers=2, head_dim=8, options={"widht": 3}))
        words = "does not read drafter.head_dim = 8, drafter.num_layers = 2, drafter.options.widht = 3"
        assert words in unread.message and unread.reason is Reason.SPEC_INVALID
        assert "It reads options.width besides" in unread.remedy


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ({"code": "import not_there_at_all"}, "cannot be loaded: ModuleNotFoundError"),
        ({"code": "x = 1"}, "cannot be loaded: AttributeError"),
        ({"code": "def of("}, "cannot be loaded: SyntaxError"),
        ({"code": "raise RuntimeError('no licence')"}, "cannot be loaded: RuntimeError: no licence"),
        ({"code": "LastFeatureConfig = dict"}, "is no subclass of DrafterConfig"),
        ({"name": "other"}, "calls itself 'last_feature'"),
    ],
)
def test_a_package_that_brings_no_architecture(package: dict[str, Any], words: str, site: Path) -> None:
    with installed(write_plug_in(site, **package)):
        error = refused(DrafterSpec(architecture=package.get("name", NAME)))
    assert words in error.message and error.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_a_package_that_fails_on_what_a_recipe_sets(site: Path) -> None:
    with installed(write_plug_in(site)):
        error = refused(DrafterSpec(architecture=NAME, options={"width": "wide"}))
    words = "cannot resolve the settings of [drafter]: ValueError: invalid literal for int() with base 10: 'wide'"
    assert words in error.message and error.reason is Reason.ENVIRONMENT_UNSUPPORTED


def test_two_packages_of_one_name(site: Path) -> None:
    with installed(write_plug_in(site)):
        again = write_plug_in(site / "more", value="elsewhere:Config")
        (again / f"{NAME}-1.0.dist-info").rename(again / "another-1.0.dist-info")
        metadata = again / "another-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace(f"Name: {NAME}", "Name: another"))
        with installed(again):
            error = refused(DrafterSpec(architecture=NAME))
    assert "several packages bring it: elsewhere:Config, last_feature:LastFeatureConfig" in error.message


def test_a_checkpoint_without_a_name_is_dflash() -> None:
    values = json.loads(TINY.to_json())
    assert values.pop("architecture") == "dflash"
    found = DrafterConfig.from_json(json.dumps(values))
    assert isinstance(found, DFlashConfig) and found == TINY
    with pytest.raises(SlipstreamError, match="architecture is 7, installed here"):
        DrafterConfig.from_json(json.dumps(values | {"architecture": 7}))


def test_the_plan_and_a_beginning_of_another_architecture_are_refused(site: Path, tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path / "run")
    saved = write_checkpoint(recipe, tmp_path / "saved", exportable_config(), drawn_weights(exportable_config()))
    with installed(write_plug_in(site)):
        spec = parse_recipe(RECIPE, ("drafter.architecture=last_feature",))
        with pytest.raises(SlipstreamError, match="the plan knows the sizes of 'dflash' alone"):
            RunSizes.of(spec, None)  # type: ignore[arg-type]
        drafter = DrafterSpec(architecture=NAME, num_features=2)
        config = resolve_drafter_config(drafter, target(mask_token_id=3))
        words = r"architecture dflash \(expected last_feature\)"
        with pytest.raises(SlipstreamError, match=words) as caught:
            read_first_weights(saved, config, TrainedTarget("f", "float32", {}))
    assert caught.value.remedy == 'Set in [drafter]: architecture = "dflash".'


def test_a_run_of_an_architecture_that_has_gone(site: Path, tmp_path: Path) -> None:
    recipe = write_tiny_run(tmp_path / "run")
    spec = load_recipe(recipe).spec
    recipe.write_text(recipe.read_text().replace("[drafter]", f'[drafter]\narchitecture = "{NAME}"'))
    with installed(write_plug_in(site)):
        saved = write_checkpoint(recipe, tmp_path / "saved", exportable_config(), drawn_weights(exportable_config()))
    for use in (lambda: open_checkpoint(saved), lambda: check_same_run(read_state(saved), spec, where="it")):
        with pytest.raises(SlipstreamError, match="'last_feature' is no drafter architecture") as caught:
            use()
        assert caught.value.reason is Reason.CHECKPOINT_INVALID
        assert caught.value.remedy.startswith("Install the package that brings this architecture")


def test_layers_are_computed_again_only_where_the_architecture_can(site: Path) -> None:
    with installed(write_plug_in(site)):
        spec = DrafterSpec(architecture=NAME, num_features=2)
        drafter = resolve_drafter_config(spec, target(mask_token_id=3)).build()
        with pytest.raises(SlipstreamError, match="1 layers to be computed again, which last_feature does not do"):
            drafter.recompute_layers(1)


def test_a_growing_context_is_a_fixed_one_that_doubles(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_trainer.drafter_interface._FIRST_ROOM", 8)
    with installed(write_plug_in(site)):
        spec = DrafterSpec(architecture=NAME, num_features=2, block_size=4, options={"width": 6})
        config = dataclasses.replace(resolve_drafter_config(spec, target(mask_token_id=3)), hidden_size=8)
        drafter = config.build()
        torch.nn.init.normal_(drafter.slots)  # type: ignore[arg-type]
        growing, fixed = drafter.growing_context(), drafter.fixed_context(64)
        features, block = torch.randn(1, 40, 16), torch.randn(1, 4, 8)
        done = 0
        with torch.no_grad():
            for step in (5, 1, 3, 1, 20, 2):
                positions = torch.arange(done, done + step)[None]
                growing.extend(features[:, done : done + step], positions)
                fixed.extend(features[:, done : done + step], positions)
                done += step
                slots = torch.arange(done, done + 4)[None]
                assert torch.equal(growing.hidden(block, slots), fixed.hidden(block, slots))
