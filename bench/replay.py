"""What does a returning conversation cost, restored through the tiers, against recomputing it?

    python -m bench.replay              replays examples/demo.toml; rows to results/replay.jsonl
    python -m bench.replay --smoke      a model of two small layers, no rows

Both ways run in the same process, turn by turn, and their outputs are compared. Returning turns are
sorted by the slowest tier that served them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from bench import rows
from bench.arguments import new_file
from tiered_kv.replay.report import TurnRecord
from tiered_kv.replay.session import run_replay
from tiered_kv.replay.settings import ReplaySettings

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.toml"
_SMOKE: dict[str, Any] = {"model": "micro-qwen3", "conversations": 2, "turns": 3}
_SMOKE |= {"context_tokens": 300, "system_tokens": 64}
_LONG_TOKENS = 2000


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print, append."""
    options = _parser().parse_args(arguments)
    log = rows.Log()
    settings: dict[str, Any] = tomllib.loads(DEMO.read_text())
    if options.smoke:
        settings |= _SMOKE
    turns: list[TurnRecord] = []
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            report = run_replay(ReplaySettings.model_validate({**settings, "disk": folder}))
        if not report.is_passed:
            print("outputs differ from recomputing: no figure is worth anything", file=sys.stderr)
            return 1
        turns += report.turns
    measure(log, turns, 0 if options.smoke else _LONG_TOKENS)
    for made in log.measured:
        case = " ".join(f"{key}={value}" for key, value in made.params.items())
        print(f"{made.metric:18} {made.p50:10,.4g} {made.unit:6} {case}")
    path = options.rows or (None if options.smoke else rows.RESULTS / "replay.jsonl")
    if path:
        rows.append(path, log.measured, rows.origin())
    return 0


def measure(log: rows.Log, turns: Sequence[TurnRecord], least_tokens: int) -> None:
    """Rows of the turns that reused enough, by the slowest tier that served each."""
    by_tier: dict[str, list[TurnRecord]] = {}
    for turn in turns:
        served = [tier for tier, tokens in turn.reused_tokens.items() if tokens]
        if served and turn.reused >= least_tokens:
            by_tier.setdefault(served[-1], []).append(turn)
            by_tier.setdefault("any", []).append(turn)
    for tier, found in by_tier.items():
        case = {"slowest_tier": tier, "least_reused_tokens": least_tokens}
        case["load"] = rows.load_average()
        tokens = [turn.reused for turn in found]
        log.add("replay", "reused_tokens", "tokens", tokens, **case)
        log.add("replay", "ttft_store_s", "s", [t.ttft_store_s for t in found], **case)
        log.add("replay", "ttft_recompute_s", "s", [t.ttft_recompute_s for t in found], **case)
        log.add("replay", "ttft_ratio", "ratio", [t.ttft_ratio for t in found], **case)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench.replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--smoke", action="store_true", help="a very small model and no rows")
    parser.add_argument("--repeats", type=int, default=3, help="whole replays (default 3)")
    parser.add_argument(
        "--dir", type=Path, help="where the disk tier stands (default: a temp folder)"
    )
    parser.add_argument("--rows", type=new_file, help="append the rows to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
