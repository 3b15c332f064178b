"""`tiered-kv replay`: conversations or a trace through a store, with real bytes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from tiered_kv.cli import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from tiered_kv.cli.options import Options, parse
from tiered_kv.cli.progress import Progress
from tiered_kv.replay.report import ReplayReport
from tiered_kv.replay.settings import ReplaySettings


class ReplayOptions(Options, ReplaySettings):  # type: ignore[misc]  # pydantic merges model_config
    """Replay conversations (generated, or from --trace) through a store, with real bytes."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(ReplayOptions, arguments, "replay")
    report = _replay(options)
    if options.print_json:
        print(json.dumps(report.as_json()))
    from tiered_kv.replay.tables import print_report

    print_report(report, Console(stderr=True))
    if not report.is_passed:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if report.interrupted else EXIT_DONE


def _replay(options: ReplayOptions) -> ReplayReport:
    from tiered_kv.replay.session import run_replay  # torch: not for --help, not for a wrong flag

    with Progress(sys.stderr) as progress:
        return run_replay(options, progress.show)
