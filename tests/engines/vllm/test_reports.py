"""What vLLM is told: metrics, through its own aggregation, loggers and registry, and KV events."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine_rig import (
    BLOCK_TOKENS,
    SETTLE_S,
    counter,
    generate,
    open_engine,
    random_prompts,
    reset_apc,
)
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from pydantic import ByteSize
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tiered_kv.counters import Counters
from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK, HBM, HOST, MISS_REASONS
from tiered_kv.plugins.vllm.events import EventLog, open_event_log
from tiered_kv.plugins.vllm.metrics import (
    COUNTERS,
    GAUGES,
    TieredKVPromMetrics,
    TieredKVStats,
    build_prom_metrics,
    build_stats,
)

# -- stats -----------------------------------------------------------------------------------------


def test_stats_come_through_every_border_unchanged() -> None:
    stats = TieredKVStats.of(
        {"hit_pages": {"host": 3, "disk": 1}, "put_pages": 4, "used_bytes": {"disk>0": 0}}
    )
    assert pickle.loads(pickle.dumps(stats)) == stats  # from worker to scheduler
    sent = msgspec.msgpack.encode(stats.to_dict())  # from there to the frontend
    assert build_stats(msgspec.msgpack.decode(sent)) == stats


def test_numbers_of_any_kind_become_plain_ones() -> None:
    """One that vLLM cannot encode ends its output thread: the engine would answer no more."""
    sizes: dict[str, Any] = {
        "disk>0": ByteSize(7),
        "disk>1": np.int64(8),
        "host>0": np.float32(0.5),
    }
    stats = TieredKVStats.of({"used_bytes": sizes, "hit_pages": {"host": 3}})
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.to_dict()))
    assert sent == {
        "used_bytes": {"disk>0": 7, "disk>1": 8, "host>0": 0.5},
        "hit_pages": {"host": 3},
    }


def test_zeros_of_counters_are_not_worth_a_report_but_those_of_gauges_are() -> None:
    assert TieredKVStats.of({"put_pages": 0, "hit_pages": {"host": 0}}).is_empty()
    assert not TieredKVStats.of({"resident_pages": {"host": 0}}).is_empty()
    assert build_stats().is_empty()


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        ({"hits": 1}, "no metric 'hits': there are hit_pages, "),
        ({"hit_pages": 1}, "hit_pages: label '' must be 'tier'"),
        ({"put_pages": {"host": 1}}, "put_pages: label 'host' must be ''"),
        ({"moved_bytes": {"disk": 1}}, "moved_bytes: label 'disk' must be 'source>target'"),
    ],
    ids=str,
)
def test_a_number_under_a_wrong_name_is_an_error(delta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TieredKVStats.of(delta)


def test_ranks_add_up_and_gauges_stay_a_ranks_own() -> None:
    ranks = [
        TieredKVStats.of(
            {
                "moved_bytes": {"hbm>host": 100 * (rank + 1)},
                "used_bytes": {f"disk>{rank}": 7 + rank},
            }
        )
        for rank in range(3)
    ]
    total = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
    assert total.data == {
        "moved_bytes": {"hbm>host": 600},
        "used_bytes": {"disk>0": 7, "disk>1": 8, "disk>2": 9},
    }
    later = TieredKVStats.of({"moved_bytes": {"hbm>host": 1}, "used_bytes": {"disk>1": 5}})
    assert total.aggregate(later).reduce() == {
        "moved_bytes{hbm>host}": 601,
        "used_bytes{disk>0}": 7,
        "used_bytes{disk>1}": 5,
        "used_bytes{disk>2}": 9,
    }


def test_a_logger_that_adds_up_leaves_the_report_of_others_alone() -> None:
    """vLLM hands one dict to every logger; the first adds later reports to what it built of it."""
    data = {"put_pages": {"": 1}}
    built = build_stats(data)
    built.aggregate(build_stats({"put_pages": {"": 5}, "hit_pages": {"host": 1}}))
    assert data == {"put_pages": {"": 1}}
    built.reset()
    assert built.is_empty()
    assert data == {"put_pages": {"": 1}}


# -- from totals to reports ------------------------------------------------------------------------


def test_a_mover_reports_bytes_and_only_what_is_new() -> None:
    counters, counting = Counters(), TieredKVStats.counting(rank=2)
    counters.moved(HBM, HOST, 100)
    counters.moved(HOST, DISK, 90)
    counters.add("total", "write_failed", 1)
    counters.add("total", "corrupt", 4)  # the decider hears of it, and counts it once for all ranks
    first = counting.since_last(counters.snapshot({}), {DISK: (10, 50)})
    assert first is not None
    assert first.data == {
        "moved_bytes": {"hbm>host": 100, "host>disk": 90},
        "failed_writes": {"": 1},
        "used_bytes": {"disk>2": 10},
        "capacity_bytes": {"disk>2": 50},
    }
    assert counting.since_last(counters.snapshot({}), {DISK: (10, 50)}) is None
    counters.moved(DISK, HOST, 40)
    counters.moved(HOST, HBM, 40)
    second = counting.since_last(counters.snapshot({}), {DISK: (0, 50)})
    assert second is not None
    assert second.data == {
        "moved_bytes": {"disk>host": 40, "host>hbm": 40},
        "used_bytes": {"disk>2": 0},
    }


def test_a_decider_reports_pages() -> None:
    counters, counting = Counters(), TieredKVStats.counting()
    counters.add("hit", DISK, 2)
    counters.add("miss", "evicted", 3)
    counters.add("total", "put", 5)
    counters.add("total", "not_stored", 1)
    counters.add("total", "corrupt", 1)
    report = counting.since_last(counters.snapshot({HOST: 0, DISK: 4}), {})
    assert report is not None
    assert report.data == {
        "hit_pages": {"disk": 2},
        "missed_pages": {"evicted": 3},
        "put_pages": {"": 5},
        "not_stored_pages": {"": 1},
        "corrupt_pages": {"": 1},
        "resident_pages": {"host": 0, "disk": 4},
    }
    assert counting.since_last(counters.snapshot({HOST: 0, DISK: 4}), {}) is None
    changed = counting.since_last(counters.snapshot({HOST: 1, DISK: 4}), {})
    assert changed is not None
    assert changed.data == {"resident_pages": {"host": 1}}


# -- Prometheus ------------------------------------------------------------------------------------


@pytest.fixture
def exported() -> Iterator[TieredKVPromMetrics]:
    """Registered as vLLM's stat logger does it, for two engines."""
    unregister_vllm_metrics()
    types: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    yield build_prom_metrics(config, types, ["model_name", "engine"], labels)
    unregister_vllm_metrics()


def value(name: str, engine: int = 0, **labels: str) -> float | None:
    full = {"model_name": "m", "engine": str(engine), **labels}
    found: float | None = REGISTRY.get_sample_value(f"vllm:tiered_kv_{name}", full)
    return found


@pytest.mark.usefixtures("exported")
def test_every_counter_is_exported_from_the_start() -> None:
    """Else the first hit would be no increase, and a dashboard would not know what can happen."""
    assert [value("hit_pages_total", tier=tier) for tier in (HOST, DISK)] == [0, 0]
    assert {value("missed_pages_total", reason=reason) for reason in MISS_REASONS} == {0}
    assert value("moved_bytes_total", engine=1, source=DISK, target=HOST) == 0
    for name, metric in COUNTERS.items():
        assert metric.labels or value(f"{name}_total") == 0


def test_reports_arrive_under_their_engine(exported: TieredKVPromMetrics) -> None:
    report = TieredKVStats.of(
        {
            "hit_pages": {"disk": 2},
            "moved_bytes": {"disk>host": 1000},
            "put_pages": 3,
            "resident_pages": {"host": 8},
            "used_bytes": {"disk>1": 64},
        }
    )
    exported.observe(report.to_dict(), engine_idx=1)
    exported.observe(report.to_dict(), engine_idx=1)
    assert value("hit_pages_total", 1, tier=DISK) == 4
    assert value("moved_bytes_total", 1, source=DISK, target=HOST) == 2000
    assert value("put_pages_total", 1) == 6
    assert value("resident_pages", 1, tier=HOST) == 8
    assert value("used_bytes", 1, tier=DISK, rank="1") == 64
    assert value("hit_pages_total", 0, tier=DISK) == 0


def test_every_metric_says_what_it_is(exported: TieredKVPromMetrics) -> None:
    told = {
        family.name: family
        for family in REGISTRY.collect()
        if family.name.startswith("vllm:tiered_kv_")
    }
    assert told.keys() == {f"vllm:tiered_kv_{name}" for name in (*COUNTERS, *GAUGES)}
    assert all(family.documentation.endswith(".") for family in told.values())
    assert isinstance(exported, TieredKVPromMetrics)


def test_beside_another_connector_ours_are_the_same(exported: TieredKVPromMetrics) -> None:
    """As vLLM's MultiConnector wraps them: by the name of the connector's class."""
    mine = MultiKVConnectorStats({"TieredKVConnector": TieredKVStats.of({"put_pages": 2})})
    mine.aggregate(MultiKVConnectorStats({"TieredKVConnector": TieredKVStats.of({"put_pages": 1})}))
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(mine.to_dict()))
    assert sent == {"TieredKVConnector": {"put_pages": {"": 3}}}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    types: dict[Any, Any] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    both = MultiKVConnectorPromMetrics(config, types, [], {}, {"TieredKVConnector": exported})
    both.observe(sent)
    assert value("put_pages_total") == 3


def count(engine: Any, name: str, **labels: str) -> float:
    return counter(engine, f"vllm:tiered_kv_{name}", **labels)


def await_count(engine: Any, expected: float, name: str, **labels: str) -> None:
    """Lets the engine answer a word, too short to be stored, until a counter has come that far."""
    deadline = time.monotonic() + SETTLE_S
    while count(engine, name, **labels) < expected:
        assert time.monotonic() < deadline, (name, count(engine, name, **labels), expected)
        generate(engine, [[5, 6, 7]], max_tokens=1)
    assert count(engine, name, **labels) == expected


PAGE_BYTES = 3 * BLOCK_TOKENS * 2 * 2 * 32 * 4  # layers, tokens, K and V, heads, dims, float32


@pytest.mark.parametrize("in_process", [True, False], ids=["one-process", "two-processes"])
def test_an_engine_counts_a_scripted_run_exactly(
    qwen3: Path, tmp_path: Path, in_process: bool
) -> None:
    """Two prompts of nine full pages and a bit: computed, forgotten by vLLM, loaded again."""
    connector = {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.plugins.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "host": "16MiB",
            "disk": str(tmp_path / "kv"),
            "disk_size": "64MiB",
        },
    }
    prompts = random_prompts(2, 9 * BLOCK_TOKENS + 1)
    with open_engine(qwen3, kv_transfer_config=connector, in_process=in_process) as engine:
        generate(engine, prompts, max_tokens=1)
        await_count(engine, 18, "resident_pages", tier="disk")
        reset_apc(engine)
        generate(engine, prompts, max_tokens=1)
        await_count(engine, 18, "hit_pages", tier="host")
        await_count(engine, 18, "missed_pages", reason="never_stored")
        for source, target in (("hbm", "host"), ("host", "disk"), ("host", "hbm")):
            await_count(engine, 18 * PAGE_BYTES, "moved_bytes", source=source, target=target)
        assert count(engine, "hit_pages") == count(engine, "missed_pages") == 18
        assert count(engine, "moved_bytes", source="disk") == 0
        assert count(engine, "resident_pages", tier="host") == 18
        for name in ("not_stored_pages", "corrupt_pages", "failed_writes"):
            assert count(engine, name) == 0
        assert 18 * PAGE_BYTES <= count(engine, "used_bytes", tier="disk", rank="0") <= 64 << 20
        assert count(engine, "capacity_bytes", tier="disk", rank="0") == 64 << 20


# -- events ----------------------------------------------------------------------------------------

TOKENS = 4
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
SLIDING = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8
)
ONE_GROUP = KVCacheConfig(9, [], [KVCacheGroupSpec(["a"], FULL)])
TWO_GROUPS = KVCacheConfig(9, [], [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], SLIDING)])


def key(number: int) -> PageKey:
    return PageKey(bytes([number]) * 32)


def block(number: int) -> bytes:
    return bytes([100 + number]) * 32


def shown(*numbers: int) -> list[Any]:
    """The hashes as vLLM publishes them, by default as numbers."""
    return [maybe_convert_block_hash(BlockHash(block(number))) for number in numbers]


def blocks(*numbers: int) -> dict[PageKey, bytes]:
    return {key(number): block(number) for number in numbers}


def stored(*events: KVCacheEvent) -> list[BlockStored]:
    assert all(isinstance(event, BlockStored) for event in events)
    return [event for event in events if isinstance(event, BlockStored)]


def test_events_are_kept_only_where_someone_listens() -> None:
    off: Any = SimpleNamespace(kv_events_config=None)
    muted: Any = SimpleNamespace(kv_events_config=KVEventsConfig(publisher="null"))
    on: Any = SimpleNamespace(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    assert open_event_log(off, ONE_GROUP) is None
    assert open_event_log(muted, ONE_GROUP) is None
    assert open_event_log(on, ONE_GROUP) is not None


def test_a_page_is_told_with_all_a_router_needs() -> None:
    log = EventLog(ONE_GROUP)
    adapter = LoRARequest("tuned", 3, "/somewhere")
    log.stored(blocks(1, 2), HOST, parent=block(0), token_ids=list(range(8)), lora_request=adapter)
    (event,) = stored(*log.take())
    assert event.block_hashes == shown(1, 2)
    assert [event.parent_block_hash] == shown(0)
    assert (event.token_ids, event.block_size) == (list(range(8)), TOKENS)
    assert (event.medium, event.group_idx) == ("CPU", 0)
    assert (event.lora_id, event.lora_name) == (3, "tuned")
    assert event.kv_cache_spec_kind == "full_attention"
    assert log.take() == []


def test_without_tokens_an_event_says_so_as_vllm_does() -> None:
    log = EventLog(ONE_GROUP)
    log.stored(blocks(1), DISK, parent=block(0))
    (event,) = stored(*log.take())
    assert (event.medium, event.block_size, event.token_ids) == ("STORAGE", 0, [])
    assert event.parent_block_hash is None


def test_every_group_is_told_of_its_block() -> None:
    log = EventLog(TWO_GROUPS)
    log.stored(blocks(1), HOST)
    full, sliding = stored(*log.take())
    assert (full.group_idx, sliding.group_idx) == (0, 1)
    assert sliding.kv_cache_spec_kind == "sliding_window"
    assert sliding.kv_cache_spec_sliding_window == 8
    log.removed([key(1)], HOST)
    assert log.take() == [
        BlockRemoved(block_hashes=shown(1), medium="CPU", group_idx=group) for group in (0, 1)
    ]


def test_what_is_known_already_is_not_told_again() -> None:
    """The pages between are told with their own tokens and parents."""
    log = EventLog(ONE_GROUP)
    log.stored(blocks(2), HOST)
    log.take()
    log.stored(blocks(1, 2, 3, 4), HOST, token_ids=list(range(16)))
    first, rest = stored(*log.take())
    assert (first.block_hashes, first.token_ids) == (shown(1), [0, 1, 2, 3])
    assert first.parent_block_hash is None
    assert rest.block_hashes == shown(3, 4)
    assert rest.token_ids == list(range(8, 16))
    assert [rest.parent_block_hash] == shown(2)


def test_a_page_is_in_each_tier_for_itself() -> None:
    log = EventLog(ONE_GROUP)
    log.stored(blocks(1), HOST)
    log.stored(blocks(1), DISK)
    log.removed([key(1)], HOST)
    log.removed([key(1)], HOST)
    log.removed([key(1)], DISK)
    log.removed([key(1)], DISK)
    told = [(type(event).__name__, getattr(event, "medium", None)) for event in log.take()]
    assert told == [
        ("BlockStored", "CPU"),
        ("BlockStored", "STORAGE"),
        ("BlockRemoved", "CPU"),
        ("BlockRemoved", "STORAGE"),
    ]
    log.stored(blocks(1), HOST)
    assert len(log.take()) == 1  # it may come again


def test_of_pages_never_told_of_no_removal_is_told() -> None:
    """They were found on disk at the start: their block hashes are not known."""
    log = EventLog(ONE_GROUP)
    log.removed([key(1), key(2)], DISK)
    assert log.take() == []


def test_the_hash_of_a_page_is_known_as_long_as_a_tier_has_it() -> None:
    log = EventLog(ONE_GROUP)
    assert log.hash_of(key(1)) is None
    log.stored(blocks(1), HOST)
    log.stored(blocks(1), DISK)
    log.removed([key(1)], HOST)
    assert log.hash_of(key(1)) == block(1)
    log.removed([key(1)], DISK)
    assert log.hash_of(key(1)) is None


def test_cleared_removes_all_that_was_told() -> None:
    log = EventLog(ONE_GROUP)
    log.stored(blocks(1, 2), HOST)
    log.stored(blocks(2), DISK)
    log.take()
    log.cleared()
    events: list[Any] = list(log.take())
    assert {event.medium: event.block_hashes for event in events} == {
        "CPU": shown(1, 2),
        "STORAGE": shown(2),
    }
    log.cleared()
    assert log.take() == []


def test_tokens_that_are_not_whole_pages_are_refused() -> None:
    log = EventLog(ONE_GROUP)
    with pytest.raises(ValueError, match="7 token ids for 2 pages of 4 tokens"):
        log.stored(blocks(1, 2), HOST, token_ids=list(range(7)))
    assert log.take() == []


def test_events_can_be_published() -> None:
    log = EventLog(replace(TWO_GROUPS))
    log.stored(blocks(1, 2), HOST, token_ids=list(range(8)))
    log.removed([key(1)], HOST)
    events: Any = log.take()
    sent = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    assert msgspec.msgpack.decode(sent, type=KVEventBatch).events == events
