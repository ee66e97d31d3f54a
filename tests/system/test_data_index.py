"""The index of documents: a build that is killed goes on, two builders do not harm each other."""

import json
import sys
from pathlib import Path

import pytest

from slipstream.wire.data_report import DataReport, Finding
from tests.fakes.process_group import survivors
from tests.fakes.processes import ManagedProcess, Processes
from tests.fakes.tiny_tokenizer import build_tiny_tokenizer

# Builds as the command does, but stops for ever in the middle of a block, after two commits: some of what it has
# written is not committed.
STOPS_IN_THE_MIDDLE = """
import sys, threading
from target_server import index_writer
from target_server.cli import run_command
from target_server.index_writer import IndexWriter

index_writer.COMMIT_BYTES = 1
commit, append = IndexWriter.commit, IndexWriter.append
commits = []

def counted(self):
    commits.append(commit(self))
    return commits[-1]

def stopping(self, block, documents, report):
    append(self, block, documents, report)
    if len(commits) == 2:
        for file in self._files.values():
            file.flush()
        print(f"in the middle: {commits[-1].documents} documents", flush=True)
        threading.Event().wait()

IndexWriter.commit, IndexWriter.append = counted, stopping
run_command(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of 2,000 conversations with a bad line now and then, and a tokenizer."""
    directory = tmp_path_factory.mktemp("corpus")
    build_tiny_tokenizer(directory / "tokenizer")
    for name in ("a", "b"):
        with (directory / f"{name}.jsonl").open("w") as file:
            for number in range(2000):
                turns = [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{name} " * 9}]
                file.write((json.dumps({"id": f"{number}", "messages": turns}) if number % 99 else "oops") + "\n")
    return directory


def arguments(corpus: Path, report: Path) -> list[str | Path]:
    files = [corpus / "a.jsonl", corpus / "b.jsonl"]
    return ["index", *files, "--model", corpus / "tokenizer", "--report", report]


def start(processes: Processes, corpus: Path, root: Path) -> ManagedProcess:
    report = root.with_name(root.name + ".json")
    return processes.start("target_server", *arguments(corpus, report), env={"SLIPSTREAM_INDEX_DIR": str(root)})


def finish(process: ManagedProcess) -> None:
    assert process.wait_exit(timeout=120) == 0, process.output


def stopped_in_the_middle(corpus: Path, root: Path) -> ManagedProcess:
    argv = [sys.executable, "-P", "-c", STOPS_IN_THE_MIDDLE, *map(str, arguments(corpus, root / "unused.json"))]
    process = ManagedProcess(argv, env={"SLIPSTREAM_INDEX_DIR": str(root), "PYTHONPATH": ":".join(sys.path)})
    process.wait_for_line("in the middle", timeout=90)
    return process


def content(root: Path) -> dict[str, bytes]:
    """The files of the one index that lies there."""
    (directory,) = [path for path in root.iterdir() if path.is_dir() and path.name != "hashes"]
    assert not directory.name.endswith(".building")
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_a_build_that_is_killed_goes_on_and_ends_as_if_it_had_not_been(
    processes: Processes, corpus: Path, tmp_path: Path
) -> None:
    whole = start(processes, corpus, tmp_path / "whole")
    broken = stopped_in_the_middle(corpus, tmp_path / "broken")
    broken.kill()
    (unfinished,) = (tmp_path / "broken").glob("*.building")
    committed = json.loads((unfinished / "progress.json").read_text())
    assert (unfinished / "tokens.bin").stat().st_size > committed["tokens"] * 4, "killed with bytes behind the commit"
    second = start(processes, corpus, tmp_path / "broken")
    finish(second)
    assert f"documents={committed['documents']}" in second.wait_for_line("index_resumed.*").group()
    finish(whole)
    assert content(tmp_path / "broken") == content(tmp_path / "whole")
    report = DataReport.model_validate_json((tmp_path / "broken.json").read_text())
    assert report == DataReport.model_validate_json((tmp_path / "whole.json").read_text())
    bad = len(range(0, 2000, 99))
    assert (report.read, report.used, report.num_dropped) == (4000, 4000 - 2 * bad, 2 * bad)
    assert report.count(Finding.DUPLICATE_ID) == 2000 - bad  # every id of b.jsonl is one of a.jsonl
    third = start(processes, corpus, tmp_path / "broken")
    finish(third)
    assert "documents_loaded" in third.output and "index_built" not in third.output


def test_a_second_builder_waits_and_takes_over_from_one_that_dies(
    processes: Processes, corpus: Path, tmp_path: Path
) -> None:
    first = stopped_in_the_middle(corpus, tmp_path / "shared")
    second, third = (start(processes, corpus, tmp_path / "shared") for _ in range(2))
    for waiting in (second, third):
        waiting.wait_for_line("index_built_elsewhere", timeout=90)
    first.kill()
    for process in (second, third):
        finish(process)
    resumed = [process for process in (second, third) if "index_resumed" in process.output]
    assert len(resumed) == 1, "the other one used what that one built"
    alone = start(processes, corpus, tmp_path / "alone")
    finish(alone)
    assert content(tmp_path / "shared") == content(tmp_path / "alone")


def test_processes_that_tokenize_together_give_the_same_index(
    processes: Processes, corpus: Path, tmp_path: Path
) -> None:
    alone = start(processes, corpus, tmp_path / "alone")
    flags = [*arguments(corpus, tmp_path / "unused.json"), "--jobs", "2"]
    together = processes.start("target_server", *flags, env={"SLIPSTREAM_INDEX_DIR": str(tmp_path / "together")})
    finish(together)
    finish(alone)
    assert content(tmp_path / "together") == content(tmp_path / "alone")


def test_workers_end_with_a_builder_that_is_killed(corpus: Path, tmp_path: Path) -> None:
    flags = [*arguments(corpus, tmp_path / "unused.json"), "--jobs", "2"]
    argv = [sys.executable, "-P", "-c", STOPS_IN_THE_MIDDLE, *map(str, flags)]
    environment = {"SLIPSTREAM_INDEX_DIR": str(tmp_path / "root"), "PYTHONPATH": ":".join(sys.path)}
    with ManagedProcess(argv, env=environment) as builder:
        builder.wait_for_line("in the middle", timeout=90)
        builder.kill()
        assert not survivors(builder.pid, seconds=60.0)
