"""What do tiers and deciding reach on this machine? `tiered-kv bench`, kept as rows.

    python -m bench.tiers                   tiers and index; appends its rows to results/tiers.jsonl
    python -m bench.tiers --only tiers      one of them
    python -m bench.tiers --smoke           small sizes, no rows
    python -m bench.tiers --dir DIR         where files are made, on the disk to measure

Runs `tiered-kv bench tiers --json` and `tiered-kv bench index --json` as a user does, in processes
of their own, and keeps a row for every metric of every row that has samples. Ends with the exit
code of the first that failed; its rows are not kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench import rows
from bench.arguments import new_file
from tiered_kv.bench.report import row_id

BENCHES = ("tiers", "index")

_UNITS = (
    ("_bytes_per_s", "B/s"),
    ("_per_gb", "s/GB"),
    ("_tokens_per_s", "tokens/s"),
    ("_pages_per_s", "pages/s"),
    ("_bytes_per_page", "B"),
    ("_pages", "pages"),
    ("_per_page", "s"),
    ("_s", "s"),
    ("_us", "us"),
)
_PARAMS = (
    *("path", "page_bytes", "space", "batch", "pages", "page_tokens"),
    *("set_bytes", "latency_bytes", "cold", "limit", "ratio"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and append."""
    options = _parser().parse_args(arguments)
    for name in options.only or BENCHES:
        report, code = measured(name, options)
        if code:
            return code
        path = options.rows or (None if options.smoke else rows.RESULTS / "tiers.jsonl")
        if path:
            log = rows.Log()
            for metric, samples, params in figures(report):
                log.add(name, metric, unit_of(metric), samples, **params)
            rows.append(path, log.measured, rows.origin(gpu=report["machine"]["gpu"]))
    return 0


def measured(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The report of one benchmark, and the command's exit code: if not 0, there may be none."""
    command = [sys.executable, "-m", "tiered_kv", "bench", name, "--json"]
    command += ["--dir", str(options.dir)] if options.dir else []
    command += ["--smoke"] if options.smoke else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return report, done.returncode


def figures(report: dict[str, Any]) -> Iterator[tuple[str, list[float], dict[str, Any]]]:
    """(metric, samples, params) of everything that was sampled."""
    load = report["machine"]["load_average"]["before"]
    for row in report["rows"]:
        params = {name: row[name] for name in _PARAMS if row.get(name) is not None}
        interval = row.get("ci95")
        if isinstance(interval, list):
            params["ratio_ci95"] = [round(edge, 4) for edge in interval]
        if "ratio" in params:
            params["ratio"] = round(params["ratio"], 4)
        start = f"{row_id(row)} "
        for name, samples in report["samples"].items():
            metric = name.removeprefix(start)
            if name.startswith(start) and " " not in metric:
                yield metric, samples, {**params, "load_average": load}


def unit_of(metric: str) -> str:
    """The unit that a metric's name ends in."""
    return next((unit for end, unit in _UNITS if f"_{metric}".endswith(end)), "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.tiers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", choices=BENCHES, help="leave the others out")
    parser.add_argument("--dir", type=Path, help="on the disk to measure")
    parser.add_argument("--rows", type=new_file, help="append rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
