"""Runs variants one after another: a folder, a server where it needs one, an engine, a restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench import rows
from bench.engine_runs import lmcache_server
from bench.engine_runs.comparison import GROUPS
from bench.engine_runs.conversations import Phase, Turn, questions
from bench.engine_runs.models import SIZES
from bench.engine_runs.player import Job, Result, read_result
from bench.engine_runs.report import Outcome
from bench.engine_runs.variants import BLOCK_TOKENS, VARIANTS, Setup, Variant
from tiered_kv.bench.limits import Memcpy
from tiered_kv.bench.raw_disk import RawDisk, has_direct_io

ROOT = rows.RESULTS.parents[1]
_ENGINE_S = 900.0  # one process, from its start to its end
_LIMIT_REPEATS = 5

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all cores compute, and share them with what copies
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
    **lmcache_server.ENVIRONMENT,
}


def plan(
    names: Sequence[str], rounds: int, venvs: Path
) -> tuple[list[tuple[int, str]], dict[str, str]]:
    """(round, variant) in the order in which they run, and variant -> why it is left out."""
    left_out = {}
    for name in names:
        python = python_of(VARIANTS[name], venvs)
        if not python.exists():
            left_out[name] = f"{python} is not there (see bench/README.md)"
    runs = [
        (number, name)
        for number in range(rounds)
        for name in VARIANTS
        if name in names and name not in left_out and number < (VARIANTS[name].rounds or rounds)
    ]
    return runs, left_out


def python_of(variant: Variant, venvs: Path) -> Path:
    """The interpreter of a variant's environment."""
    return venvs / f".venv-{variant.venv}" / "bin" / "python"


class Runner:
    """Plays variants and gathers what they give in an `Outcome`."""

    def __init__(self, outcome: Outcome, folder: Path, venvs: Path, models: Path) -> None:
        self._outcome = outcome
        self._folder = folder
        self._venvs = venvs
        self._models = models
        self._questions = questions(outcome.workload)

    def measure_limits(self, n_bytes: int) -> None:
        """What one thread copies, and what the disk reads past the page cache: medians."""
        copies = Memcpy(n_bytes, n_bytes)
        direct = has_direct_io(self._folder)
        disk = RawDisk(self._folder, n_bytes, 1, 1, read_threads=4, is_direct=direct)
        taken: dict[str, list[float]] = {"memcpy, one thread": [], "O_DIRECT reads": []}
        try:
            disk.fill()
            for _ in range(_LIMIT_REPEATS):
                works: list[Callable[[], object]] = [copies.large, partial(disk.read, n_bytes)]
                for seconds, work in zip(taken.values(), works, strict=True):
                    began = time.perf_counter()
                    work()
                    seconds.append(time.perf_counter() - began)
        finally:
            disk.close()
            copies.close()
        self._outcome.limits = {
            name: n_bytes / sorted(seconds)[len(seconds) // 2] for name, seconds in taken.items()
        }

    def run(self, variant: Variant, number: int) -> list[Turn]:
        """One variant in one round; its turns, none if it failed in this round or one before."""
        if variant.name in self._outcome.failed:
            return []
        folder = self._folder / f"{variant.name}-{number}"
        folder.mkdir()
        began = time.monotonic()
        try:
            turns = self._play(variant, number, folder)
        except (RuntimeError, OSError) as error:
            self._outcome.failed[variant.name] = str(error)
            print(f"round {number + 1}, {variant.name}: FAILED: {error}", flush=True)
            return []
        finally:
            shutil.rmtree(folder)
        self._outcome.turns += turns
        print(
            f"round {number + 1}, {variant.name}: {len(turns)} turns in "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
        return turns

    def _play(self, variant: Variant, number: int, folder: Path) -> list[Turn]:
        workload = self._outcome.workload
        setup = Setup(self._outcome.sizes, folder / "kv", lmcache_server.free_port())
        setup.folder.mkdir()
        self._note_configuration(variant)
        end_turn = min(workload.turns, variant.turns or workload.turns)
        half = (end_turn + 1) // 2
        phases: list[tuple[Phase, int, int]] = [("start", 0, end_turn)]
        if variant.restarts:
            phases = [("start", 0, half), ("restarted", half, end_turn)]
        turns: list[Turn] = []
        for phase, first, end in phases:
            answers: list[list[list[int]]] = [[] for _ in self._questions]
            for turn in turns:
                answers[turn.conversation].append(list(turn.answer))
            job = Job(
                variant=variant.name,
                round=number,
                phase=phase,
                engine=self._engine_options(variant),
                kv_transfer=_kv_transfer(variant, setup),
                questions=self._questions,
                answers=answers,
                first_turn=first,
                end_turn=end,
                answer_tokens=workload.answer_tokens,
            )
            python = python_of(variant, self._venvs)
            with lmcache_server.running(python, variant, setup, folder / "server.log"):
                turns += self._play_phase(variant, job, folder).turns
            forget_files(setup.folder)
        return turns

    def _play_phase(self, variant: Variant, job: Job, folder: Path) -> Result:
        paths = [folder / f"{job.phase}-{name}.json" for name in ("job", "result")]
        paths[0].write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [str(python_of(variant, self._venvs)), "-m", "bench.engine_runs.player"]
        call([*command, *map(str, paths)], folder / f"{job.phase}.log")
        result = read_result(paths[1])
        self._outcome.started_s.setdefault(variant.name, []).append(result.start_s)
        self._outcome.counters[variant.name] = result.counters
        self._outcome.versions[f".venv-{variant.venv}"] = result.versions
        return result

    def _engine_options(self, variant: Variant) -> dict[str, Any]:
        outcome = self._outcome
        sizes = outcome.sizes
        tokens = sizes.all_tokens if variant.keeps_all else sizes.engine_tokens
        longest = outcome.workload.longest_tokens
        return {
            "model": str(self._model(outcome.model)),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": tokens * SIZES[outcome.model].kv_bytes_per_token,
            "max_model_len": longest,
            "max_num_batched_tokens": max(4096, longest),
            "max_num_seqs": 8,
            "disable_log_stats": False,
            "seed": 0,
        }

    def _model(self, name: str) -> Path:
        """The folder of a random model; made if it is not there yet."""
        size = "-".join(map(str, asdict(SIZES[name]).values()))
        folder = self._models / f"{name}-{size}"
        if not folder.exists():
            self._models.mkdir(parents=True, exist_ok=True)
            python = python_of(VARIANTS["none"], self._venvs)
            with tempfile.TemporaryDirectory(dir=self._models) as half:
                made = Path(half) / "model"
                command = [str(python), "-m", "bench.engine_runs.models", name, str(made)]
                call(command, Path(half) / "log")
                made.rename(folder)
        return folder

    def _note_configuration(self, variant: Variant) -> None:
        """As for the report: a folder and a port that stand for those of each run."""
        setup = Setup(self._outcome.sizes, Path("FOLDER"), 5555)
        noted: dict[str, Any] = {"kv_transfer_config": _kv_transfer(variant, setup)}
        if variant.server:
            noted["server"] = ["lmcache", "server", *lmcache_server.arguments(variant, setup)]
        self._outcome.configuration[variant.name] = noted


def _kv_transfer(variant: Variant, setup: Setup) -> dict[str, Any] | None:
    return variant.kv_transfer(setup) if variant.kv_transfer else None


def call(command: Sequence[str], log: Path) -> None:
    """Run a command to its end, in a group of its own that does not outlive it.

    Raises:
        RuntimeError: it failed, or took too long; with the last lines it wrote.
    """
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(_ENGINE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        what = f"not done after {_ENGINE_S:.0f} s" if code is None else f"exit code {code}"
        sys.stderr.write(_tail(log, 4000))
        raise RuntimeError(f"{what}: {_last_line(log)}")


def _tail(path: Path, n_bytes: int) -> str:
    return path.read_bytes()[-n_bytes:].decode(errors="replace")


def _last_line(path: Path) -> str:
    lines = [line for line in _tail(path, 4000).splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it wrote nothing"


def forget_files(folder: Path) -> None:
    """Have what a run has written on disk, and nothing of it in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def turn_rows(log: rows.Log, turns: Sequence[Turn], model: str) -> None:
    """One row for each turn of each kind of conversation that one variant played in one round."""
    starts = {turn.conversation: turn.prompt_tokens for turn in turns if turn.turn == 1}
    longest = max(starts.values(), default=0)
    for number in sorted({turn.turn for turn in turns}):
        for kind in ("long", "short"):
            some = [
                turn
                for turn in turns
                if turn.turn == number
                and (starts[turn.conversation] == longest) == (kind == "long")
            ]
            if not some:
                continue
            log.add(
                "engines",
                "ttft_s",
                "s",
                [turn.ttft_s for turn in some],
                variant=some[0].variant,
                round=some[0].round + 1,
                turn=number,
                conversations=kind,
                phase=some[0].phase,
                reused_tokens=sorted(turn.reused_tokens for turn in some)[len(some) // 2],
                model=model,
                load_average=rows.load_average(),
            )


def ratio_rows(log: rows.Log, outcome: Outcome) -> None:
    """Of each variant in each group of turns: its ratio to the baseline, one sample a round."""
    for group in GROUPS:
        for one in outcome.compared(group):
            case = {"variant": one.variant, "group": group, "turns": one.turns}
            case |= {"model": outcome.model, "of_all_rounds": round(one.ratio, 4)}
            log.add("engines", "ttft_ratio", "ratio", one.by_round, **case)
            case["of_all_rounds"] = round(one.paired, 4)
            log.add("engines", "ttft_paired_ratio", "ratio", one.paired_by_round, **case)
