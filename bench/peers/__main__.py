"""How does this store compare with its peers, without an engine and without a GPU?

    python -m bench.peers                  on an idle machine, 6 minutes
    python -m bench.peers --smoke          ours and the machine alone, small sizes, no rows
    python -m bench.peers --dry-run        what would run, and what is missing

Every peer is a process of its own in an environment of its own (`make bench-peers` makes them and
then calls this). All get the same pages, random bytes in a caller's memory, and the same disk. One
operation of one peer at a time, round after round; every byte read back is verified:

    put           accepted by the memory tier
    host get      from the memory tier to the caller
    durable put   from host memory to disk, and synced
    cold get      from disk to the caller, nothing in memory or in the page cache
    lookup        1,000 keys, present and absent

Appends rows to results/peers.jsonl and writes reports/peers_<host>_<yyyymm>.md. Exit code 1 if one
of ours fails, 2 for bad arguments.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench import rows
from bench.arguments import n_bytes, new_file, positive
from bench.markdown import file_name
from bench.peers import cold
from bench.peers.catalogue import PEERS, SMOKE
from bench.peers.client import ROOT, missing
from bench.peers.pages import WARM_UP_ROUNDS
from bench.peers.report import render
from bench.peers.results import Outcome, measurements, peers_ahead, verdicts
from bench.peers.run import Driver, scratch

REPORTS = ROOT / "bench" / "reports"
_PATHS = ("--dir", "--venv", "--rows", "--report")
_SET_BYTES, _SMOKE_SET_BYTES = 128 << 20, 1 << 20
_PAGE_BYTES, _SMOKE_PAGE_BYTES = (256 << 10, 2 << 20), (64 << 10, 256 << 10)
_ROUNDS, _SMOKE_ROUNDS = 9, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, append, write."""
    parser = _parser()
    options = parser.parse_args(arguments)
    outcome = _outcome(parser, options)
    _say_plan(outcome)
    if options.dry_run:
        return 0
    began, load = time.monotonic(), rows.load_average()
    try:
        with scratch(options.dir) as folder:
            outcome.is_cold = cold.can_be_cold(folder)
            if not outcome.is_cold and not options.smoke:
                parser.error(f"--dir {options.dir}: files stay in memory there; give one on a disk")
            Driver(outcome, folder, options.venv).run()
    except KeyboardInterrupt:
        print("\nstopped: workers ended, files removed, no rows", file=sys.stderr)
        return 130
    outcome.wall_s = time.monotonic() - began
    outcome.load_average = load, rows.load_average()
    return _conclude(outcome, options, sys.argv[1:] if arguments is None else arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="ours and the machine, small sizes")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    parser.add_argument("--peers", nargs="+", choices=PEERS, metavar="NAME", help=str([*PEERS]))
    parser.add_argument("--rounds", type=positive, help=f"counted; default {_ROUNDS}")
    parser.add_argument(
        "--set-bytes", type=n_bytes, help="all pages of a round; default 128MiB", metavar="SIZE"
    )
    parser.add_argument(
        "--page-bytes", nargs="+", type=n_bytes, help="default 256KiB 2MiB", metavar="SIZE"
    )
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument(
        "--venv", type=Path, default=ROOT, help="folder with the peers' environments"
    )
    parser.add_argument("--rows", type=new_file, help="append rows to this file")
    parser.add_argument("--report", type=new_file, help="write the report to this file")
    return parser


def _outcome(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Outcome:
    is_smoke = options.smoke
    names = options.peers or (SMOKE if is_smoke else list(PEERS))
    set_bytes = options.set_bytes or (_SMOKE_SET_BYTES if is_smoke else _SET_BYTES)
    page_bytes = options.page_bytes or (_SMOKE_PAGE_BYTES if is_smoke else _PAGE_BYTES)
    for size in page_bytes:
        if size % (4 << 10) or set_bytes % size:
            parser.error(
                f"--page-bytes {size}: give a multiple of 4096 that divides --set-bytes {set_bytes}"
            )
    if not options.dir.is_dir():
        parser.error(f"--dir {options.dir}: no such directory")
    rounds = options.rounds or (_SMOKE_ROUNDS if is_smoke else _ROUNDS)
    ordered = [name for name in PEERS if name in names]
    outcome = Outcome(ordered, sorted(set(page_bytes)), set_bytes, rounds)
    for name in ordered:
        why = missing(PEERS[name], options.venv)
        if why is not None and options.peers and not options.dry_run:
            parser.error(f"--peers {name}: {why}")
        if why is not None:
            outcome.failed[name] = why
    return outcome


def _say_plan(outcome: Outcome) -> None:
    sizes = ", ".join(rows.size_text(size) for size in outcome.page_bytes)
    print(
        f"{rows.size_text(outcome.set_bytes)} a round in pages of {sizes}; "
        f"{outcome.rounds} rounds and {WARM_UP_ROUNDS} to warm up"
    )
    for name in outcome.peers:
        why = outcome.failed.get(name)
        print(f"  {name}: {PEERS[name].what if why is None else f'LEFT OUT: {why}'}")
    sys.stdout.flush()


def _conclude(outcome: Outcome, options: argparse.Namespace, words: Sequence[str]) -> int:
    where = rows.origin()
    path = options.rows or (None if options.smoke else rows.RESULTS / "peers.jsonl")
    if path is not None:
        rows.append(path, measurements(outcome, outcome.load_average[1]), where)
    report = options.report
    if report is None and not options.smoke:
        report = REPORTS / file_name("peers", where.host, where.timestamp)
    if report is not None:
        command = ["python", "-m", "bench.peers", *_without_paths(words)]
        report.write_text(render(outcome, where, command), encoding="utf-8")
        print(f"report: {report}")
    if options.smoke:
        print("smoke sizes: right or wrong can be told, rates mean nothing")
    else:
        print("\n".join([*map(str, verdicts(outcome)), *peers_ahead(outcome)]))
    ours = [name for name in outcome.failed if PEERS[name].is_ours or PEERS[name].is_limit]
    return 1 if ours or not outcome.samples else 0


def _without_paths(words: Sequence[str]) -> list[str]:
    """The command with the name of a flag in place of a path of this machine."""
    made: list[str] = []
    for word in words:
        flag, is_joined, _ = word.partition("=")
        if made and made[-1] in _PATHS:
            made.append(made[-1].removeprefix("--").upper())
        elif flag in _PATHS and is_joined:
            made.append(f"{flag}={flag.removeprefix('--').upper()}")
        else:
            made.append(word)
    return made


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # files are removed on the way out
    sys.exit(main())
