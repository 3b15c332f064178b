"""`tiered-kv bench tiers|index|break-even`: a machine and a store, in figures."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO, TypeVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict
from rich.console import Console

from tiered_kv.bench.baseline import Comparison, compare, save
from tiered_kv.bench.report import BenchReport, Kind, refuse_bad_target
from tiered_kv.bench.settings import (
    BenchSettings,
    BreakEvenSettings,
    IndexSettings,
    Show,
    TiersSettings,
)
from tiered_kv.cli import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED
from tiered_kv.cli.options import Options, nearest, parse
from tiered_kv.cli.progress import Progress
from tiered_kv.errors import ConfigError

_Settings = TypeVar("_Settings", bound=BenchSettings)

_WIDTH = 140
"""Columns of tables that go to a file or a pipe."""


class BenchOptions(Options, BenchSettings):
    """What all of `tiered-kv bench` takes."""

    model_config = SettingsConfigDict(cli_shortcuts={"print-json": "json", "directory": "dir"})

    html: Path | None = Field(None, description="write a report with plots to this file")
    save_baseline: Path | None = Field(None, description="keep the figures in this file")
    compare: Path | None = Field(
        None, description="a baseline: exit code 1 if a figure is worse by more than --tolerance"
    )
    tolerance: float = Field(
        0.1, ge=0, lt=1, allow_inf_nan=False, description="0.1: a rate may be 10 % lower"
    )


class TiersOptions(BenchOptions, TiersSettings):
    """How fast pages move between tiers, beside memcpy and raw disk. No engine, no GPU needed."""


class IndexOptions(BenchOptions, IndexSettings):
    """What deciding costs: keys, match, plans, evictions, memory, reopening."""


class BreakEvenOptions(BenchOptions, BreakEvenSettings):
    """From how many tokens on a load from each tier beats computing them again."""


_BENCHES: dict[str, tuple[type[BenchOptions], str]] = {
    "tiers": (TiersOptions, "rates and latencies of put, get and prefetch, beside the limit"),
    "index": (IndexOptions, "keys, match, plans and evictions at up to a million pages"),
    "break-even": (BreakEvenOptions, "from how many tokens on loading beats recomputing"),
}


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(_usage())
        return EXIT_DONE if arguments else EXIT_BAD_INPUT
    if name not in _BENCHES:
        hint = nearest(name, _BENCHES) or f"expected one of {', '.join(_BENCHES)}"
        raise ConfigError(f"bench {name}: no such benchmark; {hint}")
    options = parse(_BENCHES[name][0], arguments[1:], f"bench {name}")
    baseline = _baseline(options, name)
    _refuse_bad_targets(options)
    if options.html is not None:
        from tiered_kv.bench import html

        html.require()
    with _stopped_by_sigterm(), Progress(_people()) as progress:
        report = _measured(options, progress.show)
    return _tell(options, report, baseline)


def _usage() -> str:
    lines = ["usage: tiered-kv bench BENCHMARK [options]", "", "benchmarks:"]
    lines += [f"  {name:<10} {text}" for name, (_, text) in _BENCHES.items()]
    lines += ["", "`tiered-kv bench BENCHMARK --help` lists its options."]
    return "\n".join(lines)


def _baseline(options: BenchOptions, name: str) -> BenchReport | None:
    """Read before anything is measured: a wrong file should not cost minutes."""
    if options.compare is None:
        return None
    kind: Kind = name  # type: ignore[assignment]
    with _named("--compare"):
        return BenchReport.from_json(options.compare, kind)


def _refuse_bad_targets(options: BenchOptions) -> None:
    named = {"--html": options.html, "--save-baseline": options.save_baseline}
    targets = {flag: path for flag, path in named.items() if path is not None}
    for flag, path in targets.items():
        with _named(flag):
            refuse_bad_target(path)
    if len(targets) == 2 and len({path.resolve() for path in targets.values()}) == 1:
        raise ConfigError(
            f"--html {options.html}: is the file of --save-baseline too; give another"
        )


@contextmanager
def _named(flag: str) -> Iterator[None]:
    """What is wrong with a file is said with the flag that named it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from error


def _measured(options: BenchOptions, show: Show) -> BenchReport:
    """Run one; each is imported only now: torch is not for --help or a wrong flag."""
    if isinstance(options, TiersOptions):
        from tiered_kv.bench import tiers

        return tiers.measure(_settings(options, TiersSettings), show)
    if isinstance(options, IndexOptions):
        from tiered_kv.bench import index

        return index.measure(_settings(options, IndexSettings), show)
    assert isinstance(options, BreakEvenOptions)
    from tiered_kv.bench import break_even

    return break_even.measure(_settings(options, BreakEvenSettings), show)


def _settings(options: BenchOptions, kind: type[_Settings]) -> _Settings:
    """Those that were given: a default may depend on others (`smoke`)."""
    given = kind.model_fields.keys() & options.model_fields_set
    return kind(**{name: getattr(options, name) for name in given})


def _tell(options: BenchOptions, report: BenchReport, baseline: BenchReport | None) -> int:
    from tiered_kv.bench.tables import print_comparison, print_report

    comparison = None
    if baseline is not None:
        comparison = compare(report, baseline, options.tolerance)
    _keep(options, report)  # first: who reads the rest may have gone meanwhile
    if options.print_json:
        _print_json(report)
    people = _people()
    console = _Console(file=people, width=None if people.isatty() else _WIDTH, highlight=False)
    print_report(report, console)
    if comparison is not None:
        print_comparison(comparison, console)
    return EXIT_DONE if report.is_passed and _is_as_good(comparison) else EXIT_FAILED


def _keep(options: BenchOptions, report: BenchReport) -> None:
    if options.save_baseline is not None:
        with _named("--save-baseline"):
            save(report, options.save_baseline)
    if options.html is not None:
        from tiered_kv.bench import html

        with _named("--html"):
            html.write(report, options.html)


def _print_json(report: BenchReport) -> None:
    try:
        print(json.dumps(report.to_json()), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"--json: stdout cannot be written: {error.strerror}") from error


def _people() -> TextIO:
    """Where people read: stderr, nowhere if it was closed before we began."""
    return sys.stderr or io.StringIO()


class _Console(Console):
    """Leaves it to the command line what a reader that has gone means."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _is_as_good(comparison: Comparison | None) -> bool:
    return comparison is None or (comparison.compared > 0 and not comparison.regressions)


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: files are removed on the way out."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    try:
        kept = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: nobody else's business
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)
