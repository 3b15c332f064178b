"""`tiered-kv replay`: conversations or a trace through a store or a live engine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console

from tiered_kv.cli import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED
from tiered_kv.cli.options import Options, flag, parse
from tiered_kv.cli.progress import Progress
from tiered_kv.errors import ConfigError
from tiered_kv.replay.live.report import LiveReport
from tiered_kv.replay.report import ReplayReport
from tiered_kv.replay.settings import LIVE_ENGINES, ReplaySettings, engines_of

_WIDTH = 120
"""Columns of tables that go to a file or a pipe."""


class ReplayOptions(Options, ReplaySettings):  # type: ignore[misc]  # pydantic merges model_config
    """Replay conversations (generated, or from --trace) through a store or a live engine."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(ReplayOptions, arguments, "replay")
    _refuse_flags_of_other_engines(arguments, options.engine)
    report = _replay(options)
    if options.print_json:
        print(json.dumps(report.as_json()))
    width = None if sys.stderr.isatty() else _WIDTH
    _print(report, Console(stderr=True, width=width))
    if not report.is_passed:
        return EXIT_FAILED
    return EXIT_INTERRUPTED if report.interrupted else EXIT_DONE


def _replay(options: ReplayOptions) -> ReplayReport | LiveReport:
    with Progress(sys.stderr) as progress:
        if options.engine in LIVE_ENGINES:
            from tiered_kv.replay.live.session import run_live_replay

            with _stdout_for_json_alone():
                return run_live_replay(options, progress.show)
        from tiered_kv.replay.session import run_replay  # torch: not for --help or a wrong flag

        return run_replay(options, progress.show)


def _print(report: ReplayReport | LiveReport, console: Console) -> None:
    if isinstance(report, LiveReport):
        from tiered_kv.replay.live.tables import print_live_report

        print_live_report(report, console)
    else:
        from tiered_kv.replay.tables import print_report

        print_report(report, console)


def _refuse_flags_of_other_engines(arguments: Sequence[str], engine: str) -> None:
    """A flag that would do nothing is a mistake; a variable or a file may be for several runs."""
    given = {argument.split("=", 1)[0] for argument in arguments}
    for name in ReplaySettings.model_fields:
        engines = engines_of(name)
        if flag(name) in given and engine not in engines:
            kind = "engine" if len(engines) == 1 else "engines"
            raise ConfigError(f"{flag(name)}: is for {kind} {' and '.join(engines)}, not {engine}")


@contextlib.contextmanager
def _stdout_for_json_alone() -> Iterator[None]:
    """What an engine's libraries print meanwhile, from Python or C++, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
