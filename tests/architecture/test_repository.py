"""What the documents say is true: commands, paths, the table of a pack's path."""

import re
from pathlib import Path

import pytest

from tests.architecture.sources import AROUND, PRODUCT, ROOT, source_files

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
# A place on one person's machine.
PERSONAL_PATH = re.compile(r"(?<![\w.~-])/(work|home|root|mnt|tmp/venv)/")
STEPS = "①②③④⑤⑥⑦⑧⑨⑩⑪⑫⑬⑭"


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_ci_calls_the_test_command_of_the_readme() -> None:
    commands = re.findall(r"^(make \w+)", _read("README.md"), flags=re.MULTILINE)
    assert commands == ["make demo", "make test"]
    assert re.findall(r"^make test$", _read(".ci/run"), flags=re.MULTILINE) == ["make test"]
    assert re.search(r"^test: venv", _read("Makefile"), flags=re.MULTILINE)


def test_every_step_of_a_pack_is_a_file() -> None:
    rows = re.findall(rf"^\| ([{STEPS}]) .*?\| `([\w/.]+)`", _read("docs/architecture.md"), flags=re.MULTILINE)
    assert "".join(step for step, _ in rows) == STEPS
    assert not [path for _, path in rows if not (ROOT / path).is_file()]
    assert not [path for step, path in rows if not _read(path).startswith(f'"""{step} ')]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", document.read_text(encoding="utf-8"))
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_named_in_documents_exist(document: Path) -> None:
    """Paths in backticks that start with a folder of this repository."""
    folders = "|".join((*PRODUCT, *AROUND, "docs", "proto"))
    named = re.findall(rf"`((?:{folders})/[\w./-]*[\w/])`", document.read_text(encoding="utf-8"))
    assert not [path for path in named if not (ROOT / path).exists()]


def test_nothing_names_a_path_of_one_machine() -> None:
    files = [ROOT / file.name for file in source_files(*PRODUCT, *AROUND)]
    files += [*DOCUMENTS, ROOT / "Makefile", ROOT / "pyproject.toml", *(ROOT / "recipes").glob("*.toml")]
    found = [path.relative_to(ROOT).as_posix() for path in files if PERSONAL_PATH.search(path.read_text("utf-8"))]
    assert not found


def test_decision_records_have_the_four_sections() -> None:
    records = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    for record in records:
        sections = re.findall(r"^## (.+)$", record.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert sections == ["Context", "Options", "Decision", "Consequences"], record.name
