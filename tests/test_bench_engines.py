"""The parts of `bench.engines` that need no vLLM: conversations, statistics, report, runs.

The engine is played by a script here; tests/engines/vllm runs a real one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest

from bench import engines, rows
from bench.engine_runs import runs
from bench.engine_runs.comparison import (
    COLD,
    LONG,
    SHORT,
    by_turn,
    compare,
    counted,
    differing_tokens,
)
from bench.engine_runs.conversations import LONG_TOKENS, Phase, Turn, Workload, prompt, questions
from bench.engine_runs.models import SIZES
from bench.engine_runs.report import Outcome, render, verdicts
from bench.engine_runs.variants import VARIANTS, Setup, Sizes
from bench.markdown import file_name

STUB = """
import json, sys, time
from pathlib import Path
module, first, second = sys.argv[2], sys.argv[3], Path(sys.argv[4])
if module.endswith("models"):
    second.mkdir()
    sys.exit()
job = json.loads(Path(first).read_text())
if job["variant"] in BROKEN:
    sys.exit("no such connector")
turns, said = [], job["answers"]
for turn in range(job["first_turn"], job["end_turn"]):
    for at, asked in enumerate(job["questions"]):
        assert len(said[at]) == turn, "what was answered before the restart must be known"
        history = sum(map(len, asked[:turn])) + sum(map(len, said[at]))
        answer = [sum(asked[turn]) % 997 + n for n in range(job["answer_tokens"])]
        answer[0] += job["variant"] in LYING
        said[at].append(answer)
        turns.append({
            "variant": job["variant"], "round": job["round"], "conversation": at, "turn": turn + 1,
            "phase": job["phase"], "prompt_tokens": history + len(asked[turn]),
            "history_tokens": history, "reused_tokens": history if job["kv_transfer"] else 0,
            "ttft_s": 0.25 if job["kv_transfer"] and history else 1.0,
            "ttft_cpu_s": 2.0, "settle_s": 0.0, "answer": answer,
        })
made = {"turns": turns, "start_s": 1.0, "counters": {}, "versions": {"vllm": "0"}}
second.write_text(json.dumps(made))
"""


def turn_of(
    variant: str,
    ttft_s: float,
    *,
    number: int = 2,
    history: int = 2100,
    conversation: int = 0,
    in_round: int = 0,
    phase: Phase = "start",
    answer: Sequence[int] = (1, 2),
) -> Turn:
    return Turn(
        variant=variant,
        round=in_round,
        conversation=conversation,
        turn=number,
        phase=phase,
        prompt_tokens=history + 50 if history else 2100,
        history_tokens=history,
        reused_tokens=history // 32 * 32,
        ttft_s=ttft_s,
        ttft_cpu_s=2 * ttft_s,
        settle_s=0.0,
        answer=tuple(answer),
    )


# -- conversations ---------------------------------------------------------------------------------


def test_no_two_conversations_begin_alike_and_seeds_decide() -> None:
    talks = questions(Workload())
    assert all(one[0][:4] != other[0][:4] for one, other in combinations(talks, 2))
    assert talks == questions(Workload())
    assert talks != questions(Workload(seed=1))


def test_a_prompt_is_all_that_was_said_and_the_next_question() -> None:
    assert prompt([[1, 2], [3], [4]], [[9], [8]]) == [1, 2, 9, 3, 8, 4]
    assert prompt([[1, 2], [3]], []) == [1, 2]


def test_every_returning_turn_of_a_long_conversation_counts_as_long() -> None:
    workload = Workload()
    talks = questions(workload)
    lengths = [len(talk[0]) for talk in talks]
    longs = [length for length in lengths if length >= LONG_TOKENS]
    assert (len(lengths), len(longs)) == (8, 3)
    assert min(longs) + workload.answer_tokens >= LONG_TOKENS
    shorts = [length for length in lengths if length < LONG_TOKENS]
    assert (min(shorts), max(shorts)) == workload.short_tokens


@pytest.mark.parametrize("workload", [Workload(), Workload(conversations=12, turns=3)])
def test_nothing_of_a_conversation_is_left_in_what_is_small_when_it_returns(
    workload: Workload,
) -> None:
    model = SIZES["100m"]
    sizes = Sizes.of(workload, model)
    first = [len(talk[0]) for talk in questions(workload)]
    others = sum(first) - max(first)  # at least so much is played before a conversation returns
    assert workload.longest_tokens < sizes.engine_tokens < others
    assert sizes.small_host_bytes < others * model.kv_bytes_per_token
    assert sizes.host_bytes > workload.total_tokens * model.kv_bytes_per_token
    assert sizes.all_tokens > workload.total_tokens


def test_model_sizes_are_what_their_names_say() -> None:
    assert SIZES["100m"].parameters == pytest.approx(100e6, rel=0.1)
    assert SIZES["200m"].parameters == pytest.approx(200e6, rel=0.1)


# -- what runs when --------------------------------------------------------------------------------


def venv(folder: Path, name: str, broken: Sequence[str] = (), lying: Sequence[str] = ()) -> None:
    """An environment whose interpreter plays the engine."""
    stub = folder / f"{name}.py"
    stub.write_text(f"BROKEN, LYING = {list(broken)}, {list(lying)}\n{STUB}")
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {stub} "$@"\n')
    python.chmod(0o755)


def test_variants_are_interleaved_and_some_run_in_fewer_rounds(tmp_path: Path) -> None:
    venv(tmp_path, ".venv-engines")
    made, left_out = runs.plan(["vllm-example", "tiered-kv-host", "none"], 2, tmp_path)
    assert made == [
        (0, "none"),
        (0, "tiered-kv-host"),
        (0, "vllm-example"),
        (1, "none"),
        (1, "tiered-kv-host"),
    ]
    assert left_out == {}


def test_a_variant_without_its_environment_is_left_out_and_named(tmp_path: Path) -> None:
    venv(tmp_path, ".venv-engines")
    made, left_out = runs.plan(["none", "lmcache-host"], 1, tmp_path)
    assert made == [(0, "none")]
    assert ".venv-lmcache" in left_out["lmcache-host"]


def test_a_dry_run_says_what_would_run_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".venv-engines" / "bin").mkdir(parents=True)
    (tmp_path / ".venv-engines" / "bin" / "python").touch()
    arguments = ["--dry-run", "--venv", str(tmp_path), "--variants", "none", "lmcache-disk"]
    assert engines.main([*arguments, "--rounds", "2", "--turns", "4"]) == 0
    out = capsys.readouterr().out
    assert "runs: 1:none 2:none" in out
    assert "8 x 4 turns" in out
    assert "left out: lmcache-disk" in out


def test_all_variants_give_their_engine_one_complete_configuration(tmp_path: Path) -> None:
    setup = Setup(Sizes.of(Workload(), SIZES["100m"]), tmp_path, 5555)
    for variant in VARIANTS.values():
        if variant.kv_transfer is not None:
            made = json.loads(json.dumps(variant.kv_transfer(setup)))
            assert made["kv_role"] == "kv_both", variant.name
            assert made["kv_connector"], variant.name
        assert variant.is_ours + variant.is_peer + (variant.kv_transfer is None) == 1


# -- statistics ------------------------------------------------------------------------------------


def test_the_ratio_is_of_medians_on_turns_that_both_have_played() -> None:
    turns = [turn_of("none", s, conversation=at) for at, s in enumerate((4.0, 2.0, 3.0, 90.0))]
    turns += [turn_of("ours", s, conversation=at) for at, s in enumerate((1.0, 1.5, 0.9))]
    found = compare(turns, "ours", "none", LONG)
    assert found is not None
    assert (found.turns, found.ttft_s, found.baseline_s) == (3, 1.0, 3.0)
    assert found.ratio == pytest.approx(1 / 3)
    assert found.paired == pytest.approx(0.3)
    assert found.cpu_ratio == pytest.approx(0.3)
    assert found.reused_tokens == 2080


def test_the_spread_is_that_of_single_rounds() -> None:
    turns = []
    for in_round, (base, own) in enumerate([(2.0, 1.0), (4.0, 1.0)]):
        turns += [turn_of("none", base, in_round=in_round), turn_of("ours", own, in_round=in_round)]
    found = compare(turns, "ours", "none", LONG)
    assert found is not None
    assert found.by_round == (0.5, 0.25)
    assert found.ratio == pytest.approx(1 / 3)


def test_turns_are_grouped_by_what_could_be_reused() -> None:
    turns = [
        turn_of(name, 1.0, conversation=at, number=number, history=history)
        for name in ("none", "ours")
        for at, number, history in ((0, 1, 0), (1, 2, LONG_TOKENS), (2, 2, LONG_TOKENS - 1))
    ]
    for group in (COLD, LONG, SHORT):
        found = compare(turns, "ours", "none", group)
        assert found is not None and found.turns == 1
    assert compare(turns[:1], "ours", "none", COLD) is None


def test_of_a_variant_that_restarts_returning_turns_count_only_after_it() -> None:
    turns = [
        turn_of("ours", 1.0, number=1, history=0),
        turn_of("ours", 2.0, number=2),
        turn_of("ours", 3.0, number=3, phase="restarted"),
    ]
    assert [turn.turn for turn in counted(turns, "ours")] == [1, 3]
    assert [turn.turn for turn in counted(turns[:2], "ours")] == [1, 2]


def test_answers_are_compared_token_by_token_with_the_rounds_first() -> None:
    turns = [turn_of("none", 1.0, answer=(1, 2, 3)), turn_of("ours", 1.0, answer=(1, 9, 9))]
    turns += [
        turn_of("none", 1.0, in_round=1, answer=(5,)),
        turn_of("ours", 1, in_round=1, answer=(5,)),
    ]
    assert differing_tokens(turns) == {"none": (0, 4), "ours": (2, 4)}


def test_by_turn_keeps_long_conversations_apart() -> None:
    turns = [turn_of("none", 3.0, number=1, history=0), turn_of("none", 4.0)]
    assert by_turn(turns, "none", is_long=True) == {1: [3.0], 2: [4.0]}
    assert by_turn(turns, "none", is_long=False) == {}


# -- report ----------------------------------------------------------------------------------------


def outcome_of(turns: Sequence[Turn]) -> Outcome:
    workload = Workload()
    made = Outcome("100m", workload, Sizes.of(workload, SIZES["100m"]), 3, turns=list(turns))
    made.limits = {"memcpy": 1e10}
    return made


def played(ours: float, peer: float, cold: float) -> list[Turn]:
    turns = []
    for name, ttft_s in (("none", 4.0), ("tiered-kv-host", ours), ("vllm-host", peer)):
        first = cold if name.startswith("tiered") else 1.0
        turns += [turn_of(name, first, number=1, history=0), turn_of(name, ttft_s)]
    return turns


def test_the_verdict_names_goals_that_are_missed_and_peers_that_are_ahead() -> None:
    good = "\n".join(verdicts(outcome_of(played(1.0, 2.0, 1.02))))
    assert good.count(": met") == 2
    assert good.endswith("host level): ahead")
    bad = "\n".join(verdicts(outcome_of(played(3.0, 2.0, 1.1))))
    assert bad.count("MISSED") == 2
    assert bad.endswith("host level): BEHIND")


def test_the_report_says_machine_command_answers_and_what_failed() -> None:
    outcome = outcome_of(played(1.0, 2.0, 1.0))
    outcome.failed["lmcache-host"] = "no module named lmcache"
    text = render(outcome, rows.origin(commit="abc"), ["python", "-m", "bench.engines"])
    assert "`python -m bench.engines`" in text
    assert "commit abc" in text
    assert "- tiered-kv-host: 0 of 4 tokens" in text
    assert "lmcache-host did not run: no module named lmcache" in text
    assert "| tiered-kv-host | 1 | 1.000 | 4.000 | 0.250 (one round) |" in text
    assert "## What this does not show" in text


def test_the_reports_name_has_the_host_and_the_month() -> None:
    host = "2 x Intel(R) Xeon(R) Processor @ 2.80GHz, 24 GiB, Linux 6.18"
    assert (
        file_name("engines", host, "2026-11-29T16:00:00Z")
        == "engines_2-x-intel-xeon-2.80ghz_202611.md"
    )


def test_there_is_a_row_for_every_turn_and_kind_of_conversation(tmp_path: Path) -> None:
    log, path = rows.Log(), tmp_path / "rows.jsonl"
    turns = [
        turn_of("ours", 3.0, number=1, history=0),
        turn_of("ours", 1.0, number=2),
        turn_of("ours", 1.2, number=2, conversation=3),
    ]
    turns.append(turn_of("ours", 5.0, number=1, history=0, conversation=3))
    runs.turn_rows(log, turns, "100m")
    rows.append(path, log.measured, rows.origin(commit="abc"))
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["params"]["turn"], first["params"]["conversations"]) == (1, "long")
    assert (second["metric"], second["p50"], second["params"]["repeats"]) == ("ttft_s", 1.1, 2)


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_plays_restarts_keeps_rows_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv(tmp_path, ".venv-engines", broken=["vllm-host"])
    for name in ("scratch", "models"):
        (tmp_path / name).mkdir()
    arguments = ["--smoke", "--rounds", "2", "--turns", "3", "--venv", str(tmp_path)]
    arguments += ["--dir", str(tmp_path / "scratch"), "--models", str(tmp_path / "models")]
    arguments += ["--rows", str(tmp_path / "r.jsonl"), "--report", str(tmp_path / "r.md")]
    assert engines.main(arguments) == 0
    captured = capsys.readouterr()
    assert "vllm-host: FAILED: exit code 1: no such connector" in captured.out
    assert captured.out.count("vllm-host: FAILED") == 1, "it is not tried again"
    assert list((tmp_path / "scratch").iterdir()) == []
    kept = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    disk = [row["params"] for row in kept if row["params"]["variant"] == "tiered-kv-disk"]
    phases = [one["phase"] for one in disk if one.get("turn") and one["conversations"] == "long"]
    assert phases == ["start", "start", "restarted"] * 2
    ratios = {
        (row["params"]["variant"], row["params"]["group"]): row["p50"]
        for row in kept
        if row["metric"] == "ttft_ratio"
    }
    assert ratios["tiered-kv-host", LONG] == 0.25
    assert ratios["tiered-kv-disk", COLD] == 1.0
    assert "vllm-host did not run" in (tmp_path / "r.md").read_text()


def test_a_run_fails_where_a_variant_of_ours_does(tmp_path: Path) -> None:
    venv(tmp_path, ".venv-engines", broken=["tiered-kv-host"])
    arguments = ["--smoke", "--venv", str(tmp_path), "--dir", str(tmp_path)]
    assert engines.main([*arguments, "--models", str(tmp_path / "models")]) == 1


def test_a_run_fails_where_an_answer_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    venv(tmp_path, ".venv-engines", lying=["tiered-kv-disk"])
    arguments = ["--smoke", "--venv", str(tmp_path), "--dir", str(tmp_path)]
    assert engines.main([*arguments, "--models", str(tmp_path / "models")]) == 1
    assert "tiered-kv-disk: 8 answer tokens differ" in capsys.readouterr().out


def test_an_engine_that_hangs_is_ended_with_all_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_ENGINE_S", 2.0)
    log, path = tmp_path / "log", tmp_path / "child"
    with pytest.raises(RuntimeError, match="not done after"):
        runs.call(["sh", "-c", f"sleep 600 & echo $! > {path}; sleep 600"], log)
    child, deadline = int(path.read_text()), time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < deadline, "it was left behind"


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and not yet waited for


def test_files_are_forgotten_by_the_page_cache_and_kept(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "file"
    path.write_bytes(b"kept")
    runs.forget_files(tmp_path)
    assert path.read_bytes() == b"kept"
