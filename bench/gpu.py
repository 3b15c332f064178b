"""Do pages come back right from a GPU, and how near to one pinned copy?

    python -m bench.gpu                 on a machine with a GPU; under 3 minutes
    python -m bench.gpu --smoke         small sizes, any machine, some seconds

Needs torch, numpy and xxhash, and the repository as the current directory; nothing has to be
installed. Ends with a table, and exit code 1 if anything in it failed. On a GPU the rows are
appended to results/gpu.jsonl after every check, so that none is lost to a later one. Without a GPU
the same code runs on threads: its figures are of a CPU standing in, and are kept only where --rows
says.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import rows
from bench.gpu_checks.copies import check_copies
from bench.gpu_checks.layers import check_layers
from bench.gpu_checks.pinning import check_pinning, check_straddling
from bench.gpu_checks.races import check_races
from bench.gpu_checks.rig import Rig, Verdict

CHECKS: dict[str, Callable[[Rig], None]] = {
    "races": check_races,
    "straddling": check_straddling,
    "copies": check_copies,
    "layers": check_layers,
    "pinning": check_pinning,
}
"""Most important first: what time does not allow is left out from the end. Kernels join here."""

_BUDGET_S = 150.0  # no check begins later
_HUNG_S = 240.0  # every thread's trace, and out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks; 0 if none failed."""
    options = _parser().parse_args(arguments)
    has_gpu = torch.cuda.is_available() and not options.cpu
    rig = Rig(torch.device("cuda", 0) if has_gpu else torch.device("cpu"), options.smoke)
    gpu = torch.cuda.get_device_name(0) if has_gpu else None
    where = rows.origin(gpu=gpu, commit=options.commit)
    _say_where(rig, where)
    path = options.rows
    if path is None and rig.has_gpu and not rig.is_smoke:
        path = rows.RESULTS / "gpu.jsonl"
    threads = torch.get_num_threads()
    if not rig.has_gpu:
        torch.set_num_threads(1)  # copies need cores too
    try:
        _run(rig, options.only or list(CHECKS), path, where)
    finally:
        torch.set_num_threads(threads)
    _print_table(rig.verdicts)
    failed = sum(verdict.passed is False for verdict in rig.verdicts)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone that is there")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="CHECK", help=str([*CHECKS]))
    parser.add_argument("--rows", type=Path, help="append rows to this file")
    parser.add_argument("--commit", help="what the rows name, where there is no git")
    return parser


def _say_where(rig: Rig, where: rows.Origin) -> None:
    if rig.has_gpu:
        print(f"GPU: {where.gpu}, on {where.host}; torch {where.torch}")
    else:
        print(f"NO GPU FOUND: every figure below is of a CPU standing in ({where.host})")
    if rig.is_smoke:
        print("smoke sizes: right or wrong can be told, rates mean nothing")


def _run(rig: Rig, names: Sequence[str], path: Path | None, where: rows.Origin) -> None:
    began = time.monotonic()
    for name in names:
        if time.monotonic() - began > _BUDGET_S:
            rig.found(name, "", f"not run: {_BUDGET_S:.0f} s were over")
            continue
        started, kept = time.monotonic(), len(rig.log.measured)
        try:
            CHECKS[name](rig)
        except Exception as error:  # the other checks have their own answers
            traceback.print_exc()
            rig.found(name, "", f"{type(error).__name__}: {error}".splitlines()[0], passed=False)
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        if path is not None:
            rows.append(path, rig.log.measured[kept:], where)


def _print_table(verdicts: Sequence[Verdict]) -> None:
    signs = {True: "ok", False: "FAILED", None: ""}
    table = [("check", "case", "result", "")]
    table += [(v.check, v.case, v.result, signs[v.passed]) for v in verdicts]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    print()
    for line in table:
        cells = [f"{cell:{width}}" for cell, width in zip(line, [*widths, 0], strict=True)]
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_HUNG_S, exit=True)
    sys.exit(main())
