"""What does keeping KV outside the engine do to TTFT in a real vLLM, beside what others keep?

    python -m bench.engines                  on an idle machine: about 15 minutes
    python -m bench.engines --smoke          a tiny model, about a minute, no rows and no report
    python -m bench.engines --dry-run        what would run, and with which settings

Conversations return to an engine whose own KV cache is too small for all of them: without
offloading their past is computed again. Every variant plays the same ones on an engine in a process
of its own, variants interleaved over several rounds (A B C A B C), and their answers are compared.

Needs an environment with vLLM for CPUs (.venv-engines, made by `make test-engines`) and, for the
LMCache variants, one with LMCache too (.venv-lmcache, see bench/README.md); variants without theirs
are left out, and named. Appends a row for each variant, round and turn to results/engines.jsonl and
writes reports/engines_<host>_<yyyymm>.md. Exit code 1 if a variant of ours fails, or if any answer
differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench import rows
from bench.arguments import new_file, positive
from bench.engine_runs.comparison import differing_tokens
from bench.engine_runs.conversations import Turn, Workload, questions
from bench.engine_runs.models import SIZES
from bench.engine_runs.report import Outcome, render, verdicts
from bench.engine_runs.runs import Runner, plan, ratio_rows, turn_rows
from bench.engine_runs.variants import VARIANTS, Sizes
from bench.markdown import file_name

ROOT = rows.RESULTS.parents[1]
REPORTS = ROOT / "bench" / "reports"
SMOKE_VARIANTS = ("none", "tiered-kv-host", "tiered-kv-disk", "vllm-host")
SMOKE = Workload(
    conversations=4, turns=2, long_tokens=2016, short_tokens=(192, 320), question_tokens=40
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, append, write."""
    options = _parser().parse_args(arguments)
    outcome = _outcome(options)
    names = options.variants or (SMOKE_VARIANTS if options.smoke else list(VARIANTS))
    runs, left_out = plan(names, outcome.rounds, options.venv)
    outcome.failed.update(left_out)
    _say_plan(outcome, [f"{number + 1}:{name}" for number, name in runs])
    if options.dry_run:
        return 0
    path = options.rows or (None if options.smoke else rows.RESULTS / "engines.jsonl")
    began, load = time.monotonic(), rows.load_average()
    with tempfile.TemporaryDirectory(prefix="tiered-kv-engines-", dir=options.dir) as folder:
        runner = Runner(outcome, Path(folder), options.venv, options.models)
        runner.measure_limits((1 if options.smoke else 64) << 20)
        for number, name in runs:
            _keep(path, outcome.model, runner.run(VARIANTS[name], number))
    outcome.wall_s = time.monotonic() - began
    outcome.load_average = load, rows.load_average()
    words = sys.argv[1:] if arguments is None else arguments
    return _conclude(outcome, path, options, ["python", "-m", "bench.engines", *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one round, no rows")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, metavar="NAME", help=str([*VARIANTS])
    )
    parser.add_argument("--rounds", type=positive, help="default 3; with --smoke 1")
    parser.add_argument("--turns", type=positive, help="of each conversation; default 6")
    parser.add_argument("--conversations", type=positive, help="default 8")
    parser.add_argument("--model-size", choices=SIZES, help="default 100m")
    parser.add_argument(
        "--venv",
        type=Path,
        default=ROOT,
        help="folder with .venv-engines and .venv-lmcache (default: the repository)",
    )
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument(
        "--models",
        type=Path,
        default=Path(tempfile.gettempdir()) / "tiered-kv-models",
        help="where random models are kept between runs",
    )
    parser.add_argument("--rows", type=new_file, help="append rows to this file")
    parser.add_argument("--report", type=new_file, help="write the report to this file")
    return parser


def _outcome(options: argparse.Namespace) -> Outcome:
    workload = SMOKE if options.smoke else Workload()
    chosen = {"conversations": options.conversations, "turns": options.turns}
    fields = {name: getattr(workload, name) for name in Workload.__slots__}
    workload = Workload(**fields | {name: value for name, value in chosen.items() if value})
    model = options.model_size or ("tiny" if options.smoke else "100m")
    rounds = options.rounds or (1 if options.smoke else 3)
    return Outcome(model, workload, Sizes.of(workload, SIZES[model]), rounds)


def _say_plan(outcome: Outcome, runs: Sequence[str]) -> None:
    model, workload, sizes = SIZES[outcome.model], outcome.workload, outcome.sizes
    prompts = sum(
        len(talk[0]) * workload.turns
        + (workload.question_tokens + workload.answer_tokens) * sum(range(workload.turns))
        for talk in questions(workload)
    )
    print(f"model: {outcome.model}, {model.parameters / 1e6:.1f} M parameters")
    print(f"prompts: {prompts} tokens in {workload.conversations} x {workload.turns} turns a run")
    print(f"KV: {workload.total_tokens} tokens in the end; the engine keeps {sizes.engine_tokens}")
    print(
        f"host tiers: {rows.size_text(sizes.host_bytes)}, above a disk "
        f"{rows.size_text(sizes.small_host_bytes)}"
    )
    print(f"runs: {' '.join(runs) or 'none'}")
    for name, why in outcome.failed.items():
        print(f"left out: {name}: {why}")
    sys.stdout.flush()


def _keep(path: Path | None, model: str, turns: Sequence[Turn]) -> None:
    """Rows of one run, at once: none is lost to a later one."""
    if path is not None and turns:
        log = rows.Log()
        turn_rows(log, turns, model)
        rows.append(path, log.measured, rows.origin())


def _conclude(
    outcome: Outcome, path: Path | None, options: argparse.Namespace, command: Sequence[str]
) -> int:
    where = rows.origin()
    if path is not None:
        log = rows.Log()
        ratio_rows(log, outcome)
        rows.append(path, log.measured, where)
    report = options.report
    if report is None and not options.smoke:
        report = REPORTS / file_name("engines", where.host, where.timestamp)
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(render(outcome, where, command), encoding="utf-8")
        print(f"report: {report}")
    if options.smoke:
        print("smoke sizes: right or wrong can be told, times mean nothing")
    else:
        print("\n".join(verdicts(outcome)))
    others = {name: n for name, (n, _) in differing_tokens(outcome.turns).items() if n}
    for name, count in others.items():
        print(f"{name}: {count} answer tokens differ")
    ours = [name for name in outcome.failed if VARIANTS[name].is_ours]
    return 1 if others or ours or not outcome.turns else 0


if __name__ == "__main__":
    sys.exit(main())
