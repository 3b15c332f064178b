"""Replays with a real, very small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", reason="engine hf needs transformers")

import torch

from tiered_kv.errors import ConfigError
from tiered_kv.replay.engines.hf import logit_tolerance
from tiered_kv.replay.engines.models import load_model
from tiered_kv.replay.report import ReplayReport
from tiered_kv.replay.session import run_replay
from tiered_kv.replay.settings import ReplaySettings

PAGE = 16 * 2 * 2 * 32 * 4  # 16 tokens of micro-qwen3: 2 layers, K and V, one head of 32, float32


def replayed(**more: Any) -> ReplayReport:
    """A small replay on micro-qwen3, with what a test wants different."""
    values: dict[str, Any] = {
        "engine": "hf",
        "model": "micro-qwen3",
        "hbm": 12 * PAGE,
        "host": 24 * PAGE,
        "page_tokens": 16,
        "conversations": 2,
        "turns": 2,
        "context_tokens": 120,
        "system_tokens": 20,
        "reply_tokens": 4,
        "device": "cpu",
    }
    return run_replay(ReplaySettings.model_validate({**values, **more}))


def test_a_model_answers_the_same_from_all_tiers_as_from_nothing(tmp_path: Path) -> None:
    report = replayed(
        conversations=4,
        turns=3,
        context_tokens=200,
        kind="chat",
        hbm=8 * PAGE,
        host=12 * PAGE,
        disk=tmp_path / "disk",
        disk_size=16 << 20,
    )
    assert report.outputs_equal and report.is_passed
    assert all(tokens > 0 for tokens in report.hit_tokens.values()), report.hit_tokens
    assert all(turn.reused > 0 for turn in report.turns if turn.turn)
    differences = [turn.logit_difference for turn in report.turns]
    assert max(difference or 0.0 for difference in differences) <= 1e-5
    assert report.checksums_failed == 0
    assert report.memory.measure == "store"
    assert report.memory.peak_bytes is not None
    assert report.memory.peak_bytes <= report.memory.budget_bytes


def test_the_model_answers_into_its_conversation() -> None:
    """A second prompt contains the first answer, and its pages come back with it."""
    report = replayed(conversations=1, reply_tokens=40, hbm=60 * PAGE, host=60 * PAGE)
    first, second = report.turns
    assert second.reused > first.prompt_tokens


def test_another_model_does_not_hit_the_first_ones_pages(tmp_path: Path) -> None:
    disk: dict[str, Any] = {"disk": tmp_path / "disk", "disk_size": 16 << 20}
    replayed(**disk)
    assert replayed(**disk).turns[0].reused > 0
    assert replayed(**disk, seed=7).turns[0].reused == 0


def test_a_trace_of_blocks_is_spelled_out_for_a_model(tmp_path: Path) -> None:
    lines = [
        {"timestamp": i, "input_length": 70, "output_length": 3, "hash_ids": [0, 1, 2 + i]}
        for i in range(3)
    ]
    (tmp_path / "t").write_text("\n".join(map(json.dumps, lines)))
    report = replayed(trace=tmp_path / "t", trace_block_tokens=32)
    assert [turn.reused for turn in report.turns] == [0, 64, 64]
    assert report.outputs_equal


def test_recorded_dialogues_go_through_a_model(tmp_path: Path) -> None:
    talk = [{"role": role, "content": "hello " * 5} for role in ("user", "assistant", "user")]
    (tmp_path / "t").write_text(json.dumps({"messages": talk}))
    report = replayed(trace=tmp_path / "t")
    assert len(report.turns) == 2
    assert report.turns[1].reused > 0 and report.outputs_equal


def test_a_prompt_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 32768 tokens"):
        replayed(context_tokens=40_000, turns=1, conversations=1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "/no/such/model"}, "--model /no/such/model"),
        ({"dtype": "float3"}, "--dtype float3"),
        ({"device": "gpu"}, "device=gpu"),
    ],
)
def test_what_cannot_be_loaded_is_named(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        replayed(**settings)
    assert "\n" not in str(caught.value)


def test_an_unknown_model_type_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    with pytest.raises(ConfigError, match="cannot be loaded"):
        replayed(model=str(tmp_path))


def test_a_random_model_follows_from_its_seed_and_leaves_torch_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one = load_model("micro-qwen3", dtype="float32", device="cpu", seed=5)
    assert torch.equal(torch.rand(1), expected)
    two = load_model("micro-qwen3", dtype="float32", device="cpu", seed=5)
    for ours, theirs in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (one.vocabulary, one.max_tokens) == (512, 32_768)
    assert one.tokenizer.vocabulary == 512
    assert one.config["model_type"] == "qwen3"


def test_tolerance_is_1e5_in_float32_and_grows_with_rounding() -> None:
    assert np.isclose(logit_tolerance(torch.float32), 1e-5)
    assert logit_tolerance(torch.bfloat16) > 1e-2
