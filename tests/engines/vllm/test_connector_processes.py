"""TieredKVConnector in engines of several processes, and beside other connectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from connector_rig import (
    PAGES,
    cached,
    connector,
    core_of,
    decider_of,
    open_connected,
    prompts_of,
    stats_of,
    truth_of,
)
from engine_rig import (
    BLOCK_TOKENS,
    counter,
    external_hits,
    generate,
    open_engine,
    reset_apc,
    settle,
    tokens_of,
)

from tiered_kv.plan import HOST

NAMES = ("processes", "ranks", "one-fails", "multi-first", "multi-second")
PAGE_TOKENS = 9 * BLOCK_TOKENS


def break_next_copy_on_rank_1(worker: Any) -> None:
    """Runs in a worker: there alone, the next copy of pages into HBM breaks."""
    from connector_rig import break_next_copy

    if worker.rank == 1:
        break_next_copy(pytest.MonkeyPatch())


def test_two_ranks_carry_out_one_plan_each_on_its_share(qwen3: Path, tmp_path: Path) -> None:
    """Row 32: a page counts when both have it; a load that fails on one has failed."""
    expected = {name: truth_of(qwen3, name, NAMES) for name in ("ranks", "one-fails")}
    store: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with open_connected(qwen3, options=options, **store) as engine:

        def ask(name: str) -> list[int]:
            """Cached tokens; a few steps are enough, three processes share few cores here."""
            reset_apc(engine)
            answers = generate(engine, prompts_of(name), max_tokens=4)
            assert tokens_of(answers) == [tokens[:4] for tokens in expected[name]]
            return cached(answers)

        ask("ranks")
        assert ask("ranks") == [PAGE_TOKENS] * 4
        assert external_hits(engine)[1] > 0
        ask("one-fails")
        engine.collective_rpc(break_next_copy_on_rank_1)
        ask("one-fails")
        assert ask("one-fails") == [PAGE_TOKENS] * 4
        settle(engine)
        assert stats_of(engine).why_miss["failed"] > 0
        assert decider_of(engine).check() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


def test_an_engine_core_in_a_process_of_its_own(qwen3: Path, tmp_path: Path) -> None:
    """As `vllm serve` runs: it finds what an engine in this process stored, and the reverse.

    Row 16: keys do not differ from one process to the next.
    """
    expected, prompts = truth_of(qwen3, "processes", NAMES), prompts_of("processes")
    store: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(qwen3, **store) as engine:
        assert tokens_of(generate(engine, prompts[:2])) == expected[:2]
        reset_apc(engine)
    with open_connected(qwen3, options={"in_process": False}, **store) as engine:
        answers = generate(engine, prompts)
        assert tokens_of(answers) == expected
        assert cached(answers)[:2] == [PAGE_TOKENS] * 2
        assert counter(engine, "vllm:prompt_tokens_cached_by_source", source="disk") > 0
    with open_connected(qwen3, **store) as engine:
        answers = generate(engine, prompts)
        assert tokens_of(answers) == expected
        assert cached(answers) == [PAGE_TOKENS] * 4


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_beside_another_connector(is_first: bool, qwen3: Path, tmp_path: Path) -> None:
    """VLLM loads from the first that has something, and stores to both."""
    name = f"multi-{'first' if is_first else 'second'}"
    expected, prompts = truth_of(qwen3, name, NAMES), prompts_of(name)
    ours = connector(load="async")
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    config = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [ours, theirs] if is_first else [theirs, ours]},
        "kv_load_failure_policy": "recompute",
    }
    with open_engine(qwen3, kv_transfer_config=config) as engine:
        assert tokens_of(generate(engine, prompts)) == expected
        reset_apc(engine)
        answers = generate(engine, prompts)
        assert tokens_of(answers) == expected
        assert cached(answers) == [PAGE_TOKENS] * 4
        settle(engine)
        children = core_of(engine).connector.sub_connectors
        stats = children[0 if is_first else 1].scheduler.stats()
        assert stats.resident_pages == {HOST: PAGES}
        assert stats.hit_pages[HOST] == (4 * 9 if is_first else 0)
        assert counter(engine, "vllm:tiered_kv_put_pages") > 0  # beside the other's metrics
