"""`tiered-kv replay --engine vllm`: vLLM in this process, restarted between rounds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from engine_rig import BLOCK_TOKENS, KV_BYTES

from tiered_kv.cli import main
from tiered_kv.errors import ConfigError
from tiered_kv.replay.engines.vllm import VllmEngine
from tiered_kv.replay.live.answer import LiveRequest
from tiered_kv.replay.live.report import LiveReport, Round
from tiered_kv.replay.live.session import run_live_replay
from tiered_kv.replay.requests import as_ids
from tiered_kv.replay.settings import ReplaySettings

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": BLOCK_TOKENS,
    "kv_cache_memory_bytes": KV_BYTES,
    "max_model_len": 1024,
    "max_num_seqs": 16,
}


QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)


def settings(model: Path, engine: dict[str, Any] | None = None, **more: Any) -> ReplaySettings:
    """Three conversations of three turns without pauses, with what a test wants different."""
    values: dict[str, Any] = {
        "engine": "vllm",
        "model": str(model),
        "engine_args": json.dumps({**ENGINE, **(engine or {})}),
        "speed_up": 1e9,
        "conversations": 3,
        "turns": 3,
        "kind": "chat",
        "context_tokens": 700,
        "system_tokens": 64,
        "reply_tokens": 8,
        "page_tokens": BLOCK_TOKENS,
    }
    return ReplaySettings.model_validate({**values, **more})


def replay(model: Path, engine: dict[str, Any] | None = None, **more: Any) -> LiveReport:
    """A whole replay with these settings."""
    return run_live_replay(settings(model, engine, **more))


def connector(name: str, folder: Path) -> str:
    """A KVTransferConfig as JSON: vLLM's example, or ours with a disk."""
    if name == "ExampleConnector":
        chosen: dict[str, Any] = {
            "kv_connector": name,
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        }
    else:
        chosen = {
            "kv_connector": name,
            "kv_connector_module_path": "tiered_kv.plugins.vllm",
            "kv_connector_extra_config": {
                "host": "16MiB",
                "disk": str(folder),
                "disk_size": "64MiB",
            },
        }
    return json.dumps({**chosen, "kv_role": "kv_both"})


@pytest.fixture(scope="module")
def alone(qwen3: Path) -> LiveReport:
    """Two rounds without a connector, one request at a time."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in QUIET.items():
            monkeypatch.setenv(name, value)
        return replay(qwen3, rounds=2, clients=1)


def digests(one: Round) -> dict[int, str | None]:
    """The answers by their place in the input."""
    return {record.index: record.reply_digest for record in one.done}


def test_without_a_connector_a_restart_forgets(alone: LiveReport) -> None:
    assert alone.is_passed and alone.answers == (9, 0)
    for one in alone.rounds:
        by_index = sorted(one.done, key=lambda record: record.index)
        assert by_index[0].cached_tokens == 0
        assert all(record.cached_tokens == record.repeated_tokens for record in one.returning)
        assert one.counted is not None and one.counted.pair("external_prefix_cache") == (0, 0)
        for record in one.done:
            assert record.completion_tokens == 8 and record.ttft_s and record.tpot_s


@pytest.mark.parametrize("name", ["ExampleConnector", "TieredKVConnector"])
def test_conversations_that_return_after_a_restart_hit_what_a_connector_kept(
    name: str, qwen3: Path, tmp_path: Path, alone: LiveReport
) -> None:
    """Requests of all conversations are in flight together; answers are those of one at a time."""
    report = replay(qwen3, rounds=2, kv_transfer_config=connector(name, tmp_path / "kv"))
    assert report.is_passed and report.facts["kv_connector"] == name
    cold, warm = report.rounds
    assert cold.in_flight_max == 3 and alone.rounds[0].in_flight_max == 1
    assert cold.counted is not None and warm.counted is not None
    cold_asked, cold_hits = cold.counted.pair("external_prefix_cache") or (0, 0)
    warm_asked, warm_hits = warm.counted.pair("external_prefix_cache") or (0, 0)
    assert cold_asked > 0 and cold_hits == 0
    assert warm_asked > 0 and warm_hits > 0
    first = [record for record in warm.done if record.turn == 0]
    assert all(record.cached_tokens for record in first), "the first turns were here before"
    assert digests(cold) == digests(warm) == digests(alone.rounds[0])
    assert report.answers == (9, 0)


def trace(path: Path, *lengths: int) -> Path:
    """Requests of these prompt lengths."""
    lines = [
        {
            "timestamp": 0,
            "input_length": length,
            "output_length": 8,
            "hash_ids": list(range(at * 100, at * 100 + -(-length // 64))),
        }
        for at, length in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_prompt_longer_than_the_context_has_failed_and_the_others_go_on(
    qwen3: Path, tmp_path: Path
) -> None:
    path = trace(tmp_path / "trace", 100, 2000, 200)
    (one,) = replay(qwen3, trace=path, trace_block_tokens=64).rounds
    failures = {record.index: record.failure for record in one.records}
    assert failures == {0: None, 1: "context_too_long", 2: None}


def test_a_request_that_is_given_up_is_aborted_in_the_engine(qwen3: Path) -> None:
    async def run() -> int:
        engine = VllmEngine(settings(qwen3))
        try:
            await engine.open()
            long = asyncio.create_task(engine.answer(asked("long", 900)))
            await engine.answer(asked("beside it", 2))
            assert not long.done()
            long.cancel()
            await engine.answer(asked("after it", 2))
            assert long.cancelled()
            assert engine._thread is not None
            return int(engine._thread._engine.get_num_unfinished_requests())
        finally:
            await engine.close()

    assert asyncio.run(run()) == 0


def asked(name: str, tokens: int) -> LiveRequest:
    """A short prompt, and how long its answer is to be."""
    return LiveRequest(as_ids(range(40)), tokens, name)


def test_an_engine_that_dies_is_reported_and_shut_down(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.llm_engine import LLMEngine

    step, steps = LLMEngine.step, 0

    def fail(self: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps > 12:
            raise RuntimeError("the disk is on fire")
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", fail)
    report = replay(qwen3, turns=12, rounds=2)
    (one,) = report.rounds
    assert one.is_gone and not report.is_passed
    assert one.failures["unreachable"] >= 8
    assert {record.message for record in one.records if record.failure} == {
        "the engine died: the disk is on fire"
    }


@pytest.mark.parametrize(
    ("engine", "more", "words"),
    [
        ({"block_sise": 32}, {}, r"--engine-args: .* block_sise; did you mean block_size\?"),
        ({"max_model_len": 999_999}, {}, "--engine vllm: the engine does not start: .*999999"),
        ({}, {"kv_transfer_config": '{"kv_konnector": "x"}'}, "--kv-transfer-config: .*konnector"),
        ({}, {"kv_transfer_config": '{"kv_connector": "No", "kv_role": "kv_both"}'}, "No"),
    ],
    ids=["argument", "length", "field", "connector"],
)
def test_what_cannot_start_is_one_clear_line(
    engine: dict[str, Any], more: dict[str, Any], words: str, qwen3: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        replay(qwen3, engine, **more)
    assert "\n" not in str(refused.value)


def test_the_command_line_runs_a_random_model_on_a_recorded_dialogue(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said = [("user", "what is a page?"), ("assistant", "KV"), ("user", "and a tier, please?")]
    messages = [{"role": role, "content": text} for role, text in said]
    (tmp_path / "talk").write_text(json.dumps({"messages": messages}) + "\n")
    arguments = ["--engine", "vllm", "--model", "micro-qwen3", "--trace", str(tmp_path / "talk")]
    engine = json.dumps({"block_size": BLOCK_TOKENS, "kv_cache_memory_bytes": KV_BYTES})
    more = ["--speed-up", "1e9", "--reply-tokens", "4", "--engine-args", engine]
    assert main(["replay", *arguments, *more, "--json"]) == 0
    out, error = capfd.readouterr()
    report = json.loads(out)
    assert report["rounds"][0]["requests"]["done"] == 2
    first, second = report["turns"]
    assert first["prompt_tokens"] == len("<|user|>\nwhat is a page?\n")
    added = len("<|user|>\nand a tier, please?\n")
    assert second["prompt_tokens"] == first["prompt_tokens"] + 4 + added
    assert "2 of 2" in error
