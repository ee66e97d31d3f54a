"""What names a drafter: a path that exists, else a run, else a drafter of a hub; and each found, or not, in words."""

from pathlib import Path

import httpx2
import pytest
from huggingface_hub import constants, errors

from slipstream.drafter_name import DrafterName, RunName, drafter_name, find_drafter
from slipstream.errors import SlipstreamError
from slipstream.first_drafter import find_first_drafter, require_possible_first_drafter
from slipstream.hub_drafter import HubDrafter, fetch_drafter, pinned
from slipstream.run_spec.load import load_recipe
from slipstream.run_spec.reasons import Reason
from tests.fakes.hub_cache import COMMIT, put_drafter_into_cache, put_into_cache
from tests.unit.test_checkpoint_name import make_run

DRAFTER = HubDrafter("some/drafter")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that can be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("slipstream.hub_drafter.why_unreachable", lambda _: None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a home of a local stack beside it."""
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path / "home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("demo", RunName("demo", "")),
        ("demo@best", RunName("demo", "best")),
        ("demo@2000", RunName("demo", "2000")),
        ("some/drafter", DRAFTER),
        ("some/drafter@refs/pr/3", HubDrafter("some/drafter", "refs/pr/3")),
        ("owner/other", None),
        ("some/drafter@", None),
        ("./demo", None),
        ("~/demo", None),
        ("/some/drafter", None),
        ("some/drafter/checkpoints", None),
        ("exported", None),
        ("owner/made", None),
    ],
)
def test_what_is_meant(text: str, meant: DrafterName | None, tmp_path: Path) -> None:
    """None: a path. Both `exported` and `owner/made` exist, and of `owner/other` the directory `owner`."""
    (tmp_path / "exported").mkdir()
    (tmp_path / "owner" / "made").mkdir(parents=True)
    path = (tmp_path / Path(text).expanduser()).absolute()
    assert drafter_name(text, tmp_path) == (path if meant is None else meant)


def test_a_recipe_keeps_names_and_resolves_paths(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    (tmp_path / "exported").mkdir()
    for text, expected in (
        ("exported", str(tmp_path / "exported")),
        ("./missing", str(tmp_path / "missing")),
        ("demo@best", "demo@best"),
        ("some/drafter", "some/drafter"),
        ("a" * 300, "a" * 300),
    ):
        recipe.write_text(
            f'name = "n"\n[target]\nmodel = "m"\n[data]\nfiles = ["a"]\n[train]\nmax_steps = 1\n'
            f'[drafter]\ninit_from = "{text}"\n'
        )
        assert load_recipe(recipe).spec.drafter.init_from == expected


def test_a_trainer_looks_for_a_run_beside_its_own(here: Path) -> None:
    runs = here.parent / "runs of the trainer"
    beside = make_run(runs / "demo")
    in_stack = make_run(here.parent / "home" / "runs" / "demo")
    make_run(here / "demo")  # not where a trainer's runs are: its recipe named no path
    assert find_first_drafter("demo", runs) == find_first_drafter("demo@latest", runs) == beside
    assert find_first_drafter("demo", here / "elsewhere") == in_stack
    for text in ("demo@best", f"{beside}@best"):
        (beside / "checkpoints" / "step-00000005" / "manifest.json").touch()
        assert find_first_drafter(text, runs) == beside / "checkpoints" / "step-00000005"
    with pytest.raises(SlipstreamError, match="demo has no checkpoint of step 7, expected one of: 5, 10"):
        find_first_drafter("demo@7", runs)
    with pytest.raises(SlipstreamError) as refused:
        find_first_drafter("dmo", runs)
    places = f"{runs / 'dmo'}, runs/dmo, {here.parent / 'home' / 'runs' / 'dmo'}"
    assert refused.value.message == f"there is no checkpoint or run 'dmo'; looked for {places}"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("checkpoints", "a run that has no checkpoint yet"),
        ("logs", "a directory without a drafter: neither manifest"),
        (None, "no directory on this machine"),
    ],
)
def test_a_path_without_a_drafter(made: str | None, words: str, tmp_path: Path) -> None:
    if made is not None:
        (tmp_path / "fresh" / made).mkdir(parents=True)
    named = str(tmp_path / "fresh")
    with pytest.raises(SlipstreamError, match=f"drafter.init_from is {named}, which is {words}") as caught:
        find_first_drafter(named, tmp_path)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    if made == "checkpoints":
        require_possible_first_drafter(named)
    else:
        with pytest.raises(SlipstreamError, match=words):
            require_possible_first_drafter(named)


def test_a_drafter_in_the_hub_cache_needs_no_hub(cache: Path, here: Path) -> None:
    snapshot = put_drafter_into_cache(cache, "some/drafter")
    assert find_drafter("some/drafter") == find_first_drafter("some/drafter", here) == snapshot
    assert fetch_drafter(HubDrafter("some/drafter", COMMIT)) == snapshot
    assert str(pinned(DRAFTER)) == f"some/drafter@{COMMIT}"
    with pytest.raises(SlipstreamError, match=r"the hub's some/drafter@v2 is neither in its cache"):
        pinned(HubDrafter("some/drafter", "v2"))


def test_without_a_hub_the_words_say_what_was_tried(cache: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_cache(cache, "some/drafter")  # of which nothing was fetched yet
    for find in (find_drafter, lambda text: find_first_drafter(text, here)):
        with pytest.raises(SlipstreamError) as refused:
            find("some/drafter")
        assert refused.value.message == (
            "there is no drafter 'some/drafter': it is no path here, and the hub's some/drafter is neither in its "
            f"cache ({cache}) nor to be had (HF_HUB_OFFLINE is set)"
        )
        assert "`hf download some/drafter --local-dir DIR`, then name DIR" in refused.value.remedy
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("slipstream.hub_drafter.why_unreachable", lambda _: "no route to host")
    with pytest.raises(SlipstreamError, match="cannot be reached: no route to host"):
        find_drafter("some/drafter@v1")


def test_an_address_of_the_web_is_no_drafter(here: Path) -> None:
    for find in (find_drafter, require_possible_first_drafter):
        with pytest.raises(SlipstreamError, match="https://hub/some/drafter is an address elsewhere") as refused:
            find("https://hub/some/drafter")
        assert "named OWNER/NAME" in refused.value.remedy


def test_a_misspelt_path_is_no_name_of_a_hub(here: Path) -> None:
    (here / "runs").mkdir()
    with pytest.raises(SlipstreamError, match="there is no checkpoint or run 'runs/misspelt'"):
        find_drafter("runs/misspelt")


def test_a_checkpoint_that_its_run_has_replaced_is_called_that(tmp_path: Path) -> None:
    checkpoints = make_run(tmp_path / "demo") / "checkpoints"
    gone = checkpoints / "step-00000003"
    for find in (lambda: find_first_drafter(str(gone), tmp_path), lambda: require_possible_first_drafter(str(gone))):
        with pytest.raises(SlipstreamError, match=r"does not keep any more \(there: 5, 10\)\. Begin with one of these"):
            find()


def test_what_the_hub_says_is_kept_as_the_commit(hub: None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = put_drafter_into_cache(cache, "some/drafter")
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: str(snapshot / "config.json"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert pinned(HubDrafter("some/drafter", "v1")) == HubDrafter("some/drafter", COMMIT)
    assert fetch_drafter(DRAFTER) == snapshot


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.HFValidationError, "'some/drafter@v1' is no name of a hub"),
        (errors.GatedRepoError, "its licence has to be accepted first"),
        (errors.RevisionNotFoundError, "the hub's some/drafter has no revision 'v1'"),
        (errors.RepositoryNotFoundError, "the hub has no 'some/drafter', or it is private"),
        (errors.RemoteEntryNotFoundError, "holds no drafter: it has no config.json"),
        (errors.LocalEntryNotFoundError, "could not be asked for .LocalEntryNotFoundError."),
        (httpx2.ReadError, "could not be asked for .ReadError."),  # a connection that breaks within a file
    ],
)
def test_every_answer_of_the_hub_has_its_words(
    kind: type[Exception], words: str, hub: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kind.__new__(kind)  # what it is made with differs from one version of the client to the next

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(SlipstreamError, match=words) as refused:
        pinned(HubDrafter("some/drafter", "v1"))
    assert refused.value.reason is Reason.CHECKPOINT_INVALID and refused.value.remedy
