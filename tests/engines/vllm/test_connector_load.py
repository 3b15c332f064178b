"""TieredKVConnector under load, in tight places, and from one start of the engine to the next."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connector_rig import (
    PAGES,
    Tokens,
    cached,
    check_quiet,
    decider_of,
    open_connected,
    prompts_of,
    stats_of,
    truth_of,
    two_batches_in_flight,
)
from engine_rig import (
    BLOCK_TOKENS,
    ModelKind,
    counter,
    external_hits,
    generate,
    open_engine,
    random_prompts,
    reset_apc,
    tokens_of,
)

from tiered_kv.plan import DISK, HOST

NAMES = ("restart", "back", "chunks", "limits")
PAGE_TOKENS = 9 * BLOCK_TOKENS
CROWD = random_prompts(16, 330, shared_tokens=128, seed=16)
CROWD_TOKENS = 64
TIGHT: dict[str, Any] = {"kv_bytes": 3 << 20, "max_model_len": 512}
"""64 blocks, where the crowd needs 16 x 9 and four that all share."""


def used_on_disk(directory: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


_crowd_truths: dict[ModelKind, Tokens] = {}


def crowd_truth(kind: ModelKind, model: Path) -> Tokens:
    if kind not in _crowd_truths:
        with open_engine(model, enable_prefix_caching=False) as engine:
            _crowd_truths[kind] = tokens_of(generate(engine, CROWD, CROWD_TOKENS))
    return _crowd_truths[kind]


@pytest.mark.parametrize("is_pipelined", [False, True], ids=["one-batch", "two-in-flight"])
@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_a_crowd_in_tight_tiers_gets_the_right_tokens_round_after_round(
    kind: ModelKind,
    is_pipelined: bool,
    model_of: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Rows 3, 21 and 34: 16 requests that share a prefix, three times, where nothing has room: not
    vLLM's cache, which preempts requests, nor host, nor disk.
    """
    model = model_of(kind)
    truth = crowd_truth(kind, model)
    with (
        two_batches_in_flight(is_pipelined),
        open_connected(
            model, host="2MiB", disk=str(tmp_path), disk_size="8MiB", options=TIGHT
        ) as engine,
    ):
        for _ in range(3):
            answers = tokens_of(generate(engine, CROWD, CROWD_TOKENS))
            assert [at for at in range(16) if answers[at] != truth[at]] == []
            assert used_on_disk(tmp_path) <= 8 << 20
            reset_apc(engine)
        assert counter(engine, "vllm:num_preemptions") > 0
        assert external_hits(engine)[1] > 0
        stats, capacity = stats_of(engine), decider_of(engine).capacity_pages
        assert all(stats.resident_pages[tier] <= capacity[tier] for tier in (HOST, DISK))
        assert stats.resident_pages[DISK] > capacity[DISK] // 2
        check_quiet(engine)


@pytest.mark.parametrize("write_policy", ["through", "back"])
def test_a_restart_keeps_all_pages(write_policy: Any, qwen3: Path, tmp_path: Path) -> None:
    """Row 24; with write-back too, for what is on host alone is written when the engine ends."""
    name = "restart" if write_policy == "through" else "back"
    expected, prompts = truth_of(qwen3, name, NAMES), prompts_of(name)
    store = {"disk": str(tmp_path), "disk_size": "64MiB", "write_policy": write_policy}
    with open_connected(qwen3, **store) as engine:
        assert tokens_of(generate(engine, prompts)) == expected
        reset_apc(engine)
        assert stats_of(engine).resident_pages[DISK] == (PAGES if write_policy == "through" else 0)
    with open_connected(qwen3, **store) as engine:
        answers = generate(engine, prompts)
        assert tokens_of(answers) == expected
        assert cached(answers) == [PAGE_TOKENS] * 4
        hits = external_hits(engine)[1]
        assert hits >= PAGES * BLOCK_TOKENS
        assert counter(engine, "vllm:prompt_tokens_cached_by_source", source="disk") == hits
        check_quiet(engine)


def test_prompts_in_small_chunks_without_vllms_own_cache(qwen3: Path) -> None:
    expected, prompts = truth_of(qwen3, "chunks", NAMES), prompts_of("chunks")
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 64}
    with open_connected(qwen3, options=options) as engine:
        assert tokens_of(generate(engine, prompts)) == expected
        for _ in range(2):
            answers = generate(engine, prompts)
            assert tokens_of(answers) == expected
            assert cached(answers) == [PAGE_TOKENS] * 4
        check_quiet(engine)
        assert stats_of(engine).resident_pages == {HOST: PAGES}


def test_no_more_and_no_less_is_loaded_than_allowed(qwen3: Path) -> None:
    expected, prompts = truth_of(qwen3, "limits", NAMES), prompts_of("limits")
    limits: dict[str, Any] = {
        "min_load_tokens": 4 * BLOCK_TOKENS,
        "max_load_tokens": 6 * BLOCK_TOKENS,
    }
    with open_connected(qwen3, **limits) as engine:
        generate(engine, prompts[:1])
        reset_apc(engine)
        answers = generate(engine, prompts[:2])  # of the second, three pages are stored
        assert tokens_of(answers) == expected[:2]
        assert external_hits(engine)[1] == 6 * BLOCK_TOKENS
        check_quiet(engine)
        assert stats_of(engine).why_miss["not_worth_loading"] == 3
        reset_apc(engine)
        generate(engine, prompts[2:3])
        check_quiet(engine)
        assert stats_of(engine).why_miss["below_threshold"] == 3


@pytest.mark.parametrize("store", ["all", "prompt"])
def test_answers_are_stored_or_not(store: Any, qwen3: Path) -> None:
    prompt = prompts_of("prompt")[0]
    with open_connected(qwen3, store=store) as engine:
        (answer,) = generate(engine, [prompt], max_tokens=3 * BLOCK_TOKENS)
        reset_apc(engine)
        (second,) = generate(engine, [[*prompt, *answer.tokens, *range(3, 40)]])
        computed = len(prompt) + (len(answer.tokens) - 1 if store == "all" else 0)
        assert second.cached_tokens == computed // BLOCK_TOKENS * BLOCK_TOKENS
        check_quiet(engine)
