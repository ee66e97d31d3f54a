"""`target-server lineage`: reads the proof that every pack counts exactly once from a ledger, and says it in words.

Reading only, and without a lock: it may run beside the server that writes the ledger.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError
from slipstream.run_spec.reasons import Reason
from target_server.lineage import LineageReport, lineage_report, lineage_reports

COMMAND = "lineage"
PROOF_FAILED = 1
"""Exit status, and of nothing else."""
_EXIT_STATUS = "exit status: 0 every pack counts once; 1 one is missing or counted twice; 2 no ledger or no such run"
_RANGES_SHOWN = 8


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = commands.add_parser(
        COMMAND, help="prove from a ledger that every pack of a run counts exactly once", epilog=_EXIT_STATUS
    )
    parser.add_argument("ledger", type=Path, metavar="LEDGER", help="what the server was given with --ledger")
    parser.add_argument("run", nargs="?", metavar="RUN", help="default: every run that has trained")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--log-json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace) -> int:
    """Write the proof to stdout; 0 when it holds for every run asked for.

    Raises:
        SlipstreamError: SPEC_INVALID, there is no ledger, the file is none, or it knows no such run.
    """
    try:
        reports = [lineage_report(args.ledger, args.run)] if args.run else lineage_reports(args.ledger)
    except SlipstreamError as error:
        raise SlipstreamError(error.message, reason=Reason.SPEC_INVALID, remedy=error.remedy) from error
    holds = all(report.exactly_once for report in reports)
    if args.json:
        answer = {"exactly_once": holds, "runs": [_as_json(report) for report in reports]}
        sys.stdout.write(json.dumps(answer) + "\n")
    else:
        sys.stdout.write("".join(_in_words(report) for report in reports) or "No run has trained on this ledger.\n")
    return 0 if holds else PROOF_FAILED


def _as_json(report: LineageReport) -> dict[str, Any]:
    return {**asdict(report), "packs_counted": report.packs_counted, "exactly_once": report.exactly_once}


def _in_words(report: LineageReport) -> str:
    lines = [
        f"{report.run}: {_counted(report.incarnations, 'incarnation')}, "
        f"{_counted(report.steps_committed, 'step')} on the lineage, {report.steps_discarded} discarded",
        f"  packs {report.first_sequence_number} to {report.next_sequence_number - 1}: {report.packs_counted} counted"
        if report.next_sequence_number > report.first_sequence_number
        else "  no step is committed yet",
    ]
    for words, numbers in (
        ("quarantined", report.quarantined),
        ("MISSING", report.missing),
        ("COUNTED MORE THAN ONCE", report.repeated),
    ):
        if numbers:
            lines.append(f"  {words} {len(numbers)}: {ranges_of(numbers)}")
    holds = "every pack counts exactly once" if report.exactly_once else "PROOF FAILED"
    return "\n".join([*lines, f"  {holds}"]) + "\n"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ranges_of(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined: `3, 7-9`; after some ranges, only how many more numbers there are."""
    ranges: list[tuple[int, int]] = []
    for shown, number in enumerate(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        elif len(ranges) == _RANGES_SHOWN:
            return f"{_joined(ranges)} and {len(numbers) - shown} more"
        else:
            ranges.append((number, number))
    return _joined(ranges)


def _joined(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
