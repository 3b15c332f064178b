"""What a model keeps beside the KV of a page, through SGLang's HybridCacheController.

The model is both sparse (index keys of every page, lying where the KV lies) and recurrent (a state
after the last page of what was backed up): both kinds of SGLang's sidecars, in one cache.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_rig import flip
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host import PoolEntry
from sglang_rig import Cache, Loaded, Opener, device_pool, host_pool, make_storage

from tiered_kv.errors import ConfigError, TierIOError


def held(cache: Cache) -> dict[str, int]:
    return {pool: stats.resident_pages["disk"] for pool, stats in cache.storage.stats().items()}


def store_of(cache: Cache, pool: str) -> Any:
    return cache.storage._stores[pool][1]


def lose(cache: Cache, pool: str, key: str) -> None:
    """Damage a page on disk."""
    store = store_of(cache, pool)
    slot = store._disk.slot[store._index.find(bytes.fromhex(key))]
    flip(store._tier, slot, cache.storage._stores.directory / pool)


def failing(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise TierIOError("no space left (injected)", tier="disk", errno=28)

    monkeypatch.setattr(store._tier, "write", fail)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_sidecars_come_back_after_a_restart(open_cache: Opener, layout: str) -> None:
    """Layer-first, SGLang gives no pointers to index keys: they pass through its flat form."""
    cache = open_cache(kind="dsa", layout=layout)
    assert cache.storage._stores["indexer"][0].is_flat == (layout == "layer_first")
    prompt = cache.prompt(1, 140)
    assert cache.backup(prompt) == 140
    assert cache.prefetch(prompt) == Loaded(140, 140, {"mamba": 1})
    open_cache.close()
    cache = open_cache(kind="dsa", layout=layout)
    assert cache.prefetch(prompt) == Loaded(140, 140, {"mamba": 1})
    assert held(cache) == {"kv": 140, "indexer": 140, "mamba": 1}


def test_a_prompt_is_restored_to_where_a_state_was_kept(open_cache: Opener) -> None:
    cache = open_cache(kind="dsa")
    cache.backup(cache.prompt(1, 6))
    cache.backup(cache.prompt(1, 10), start=6)
    assert cache.prefetch(cache.prompt(1, 9)) == Loaded(6, 6, {"mamba": 1})
    assert cache.prefetch(cache.prompt(1, 12)) == Loaded(10, 10, {"mamba": 1})
    assert cache.prefetch(cache.prompt(1, 5)) == Loaded(0, 0)
    assert cache.storage._traffic.meter.questions()["no_sidecar"] == 2


def test_without_its_state_a_prompt_falls_back_to_the_one_before(open_cache: Opener) -> None:
    cache = open_cache(kind="dsa")
    cache.backup(cache.prompt(1, 6))
    cache.backup(cache.prompt(1, 10), start=6)
    lose(cache, "mamba", cache.keys(cache.prompt(1, 10))[-1])
    assert cache.prefetch(cache.prompt(1, 10)) == Loaded(10, 10, {"mamba": 0})
    assert cache.prefetch(cache.prompt(1, 10)) == Loaded(6, 6, {"mamba": 1})


def test_a_page_whose_index_keys_are_lost_is_no_hit(open_cache: Opener) -> None:
    """kvcache-ai/Mooncake#2236: silent garbage where index keys were missing on a hit."""
    cache = open_cache(kind="dsa")
    cache.backup(cache.prompt(1, 4))
    cache.backup(cache.prompt(1, 10), start=4)
    lose(cache, "indexer", cache.keys(cache.prompt(1, 10))[6])
    loaded = cache.prefetch(cache.prompt(1, 10))
    assert (loaded.promised, loaded.pages) == (10, 6)
    assert cache.prefetch(cache.prompt(1, 10)) == Loaded(4, 4, {"mamba": 1})
    assert cache.backup(cache.prompt(1, 10), start=4) == 6
    assert cache.prefetch(cache.prompt(1, 10)) == Loaded(10, 10, {"mamba": 1})


def test_pages_are_not_stored_without_their_index_keys(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sgl-project/sglang#30321: sidecars shorter than the KV they belong to."""
    cache = open_cache(kind="dsa")
    with monkeypatch.context() as patch:
        failing(store_of(cache, "indexer"), patch)
        assert cache.backup(cache.prompt(1, 10)) == 0
    assert held(cache) == {"kv": 0, "indexer": 0, "mamba": 1}
    assert cache.backup(cache.prompt(1, 10)) == 10
    assert cache.prefetch(cache.prompt(1, 10)) == Loaded(10, 10, {"mamba": 1})


def test_index_keys_do_not_stay_without_their_pages(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(kind="dsa")
    with monkeypatch.context() as patch:
        failing(store_of(cache, "kv"), patch)
        assert cache.backup(cache.prompt(1, 10)) == 0
    assert held(cache) == {"kv": 0, "indexer": 0, "mamba": 1}
    assert cache.prefetch(cache.prompt(1, 10)) == Loaded(0, 0)


def test_index_keys_of_pages_that_are_there_stay_when_one_cannot_be_stored_again(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(kind="dsa")
    prompt = cache.prompt(1, 10)
    cache.backup(prompt)
    lose(cache, "indexer", cache.keys(prompt)[6])
    assert cache.prefetch(prompt).pages == 6
    with monkeypatch.context() as patch:
        failing(store_of(cache, "indexer"), patch)
        assert cache.backup(prompt) == 0
    assert held(cache) == {"kv": 10, "indexer": 9, "mamba": 1}
    assert cache.backup(prompt) == 10
    assert cache.prefetch(prompt) == Loaded(10, 10, {"mamba": 1})


def test_every_pool_together_stays_within_the_size(open_cache: Opener) -> None:
    cache = open_cache(kind="dsa", size="24MiB")
    for conversation in range(12):
        cache.backup(cache.prompt(conversation, 40))
        command = ["du", "-s", "-B1", str(open_cache.directory)]
        assert int(subprocess.check_output(command).split()[0]) <= 24 << 20
    assert cache.prefetch(cache.prompt(11, 40)) == Loaded(40, 40, {"mamba": 1})
    assert cache.prefetch(cache.prompt(0, 40)) == Loaded(0, 0)
    rooms = {pool: store_of(cache, pool).capacity_pages for pool in held(cache)}
    assert rooms["indexer"] == pytest.approx(rooms["kv"], rel=0.2), "as many pages of each"


def test_sglangs_fault_injector_never_mixes_pages_and_sidecars(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page that counts as loaded is compared, its index keys and its state too."""
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.2")
    cache = open_cache(kind="dsa")
    came = [
        cache.prefetch(cache.prompt(1, 6))
        for _ in range(40)
        if cache.backup(cache.prompt(1, 6)) in (0, 6)
    ]
    assert {loaded.pages for loaded in came} == {0, 6}
    assert {loaded.sidecars.get("mamba", 0) for loaded in came} == {0, 1}


def register_draft(cache: Cache) -> Any:
    """What SGLang does for a draft model, after the storage has been attached."""
    device = device_pool("dsa")
    pool = host_pool(device, "page_first")
    entry = PoolEntry(PoolName.DRAFT, pool, device, int)
    cache.controller.register_host_pool_entry(entry)
    return pool


def test_a_draft_models_pool_that_comes_late_gets_its_share(open_cache: Opener) -> None:
    cache = open_cache(kind="dsa")
    alone = store_of(cache, "kv").capacity_pages
    register_draft(cache)
    room = store_of(cache, "kv").capacity_pages
    assert room < alone
    assert store_of(cache, "draft").capacity_pages == pytest.approx(room, rel=0.2)
    keys = cache.keys(cache.prompt(1, 3))
    indices = cache.group.alloc(3 * cache.page_tokens)
    draft = PoolTransfer(PoolName.DRAFT, host_indices=indices, keys=keys)
    assert cache.storage.batch_set_v2([draft]) == {"draft": [True] * 3}
    assert cache.backup(cache.prompt(1, 3)) == 3
    result = cache.storage.batch_exists_v2(keys, [draft])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages["draft"]) == (3, 3)
    open_cache.close()
    cache = open_cache(kind="dsa")
    assert store_of(cache, "kv").capacity_pages == room, "the division of the first start is kept"
    assert cache.prefetch(cache.prompt(1, 3)) == Loaded(3, 3, {"mamba": 1})
    register_draft(cache)
    assert cache.storage.batch_get_v2([draft]) == {"draft": [True] * 3}


def test_a_pool_that_finds_the_directory_divided_and_in_use_stops_the_start(
    open_cache: Opener,
) -> None:
    cache = open_cache(kind="dsa")
    cache.backup(cache.prompt(1, 3))
    with pytest.raises(ConfigError, match="divided among the pools indexer, kv, mamba, and now"):
        register_draft(cache)
    record = json.loads((cache.storage._stores.directory / "pools.json").read_text())
    assert set(record["pool_bytes"]) == {"kv", "indexer", "mamba"}
    assert cache.prefetch(cache.prompt(1, 3)) == Loaded(3, 3, {"mamba": 1})


def test_a_pool_nobody_registered_is_a_miss_and_not_the_others(open_cache: Opener) -> None:
    cache = open_cache(kind="dsa")
    cache.backup(cache.prompt(1, 3))
    keys = cache.keys(cache.prompt(1, 3))
    indices = cache.group.alloc(3 * cache.page_tokens)
    swa = PoolTransfer(PoolName.SWA, host_indices=indices, keys=keys)
    indexer = PoolTransfer(PoolName.INDEXER, host_indices=indices, keys=keys)
    expected = {"swa": [False] * 3, "indexer": [True] * 3}
    assert cache.storage.batch_get_v2([swa, indexer]) == expected
    assert cache.storage.batch_set_v2([swa, indexer]) == expected
    assert cache.storage.batch_exists_v2(keys, [swa]).kv_hit_pages == 0
    short = PoolTransfer(PoolName.INDEXER, host_indices=indices[:-1], keys=keys)
    assert cache.storage.batch_get_v2([short]) == {"indexer": [False] * 3}


def test_an_anchor_without_bytes_keeps_marks(open_cache: Opener, tmp_path: Path) -> None:
    """DeepSeek V4: the KV pool is places alone, the bytes are all in sidecars."""
    cache = open_cache(kind="dsa", directory=tmp_path / "other")
    logical = LogicalHostPool(64 * 16, 16)
    storage, _ = make_storage(open_cache.directory, logical, {})
    keys = cache.keys(cache.prompt(1, 3))
    indices = torch.arange(48)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys[:2], indices[:32]) == [True] * 2
    assert storage.batch_exists(keys) == 2
    assert storage.batch_get_v1(keys, indices) == [True, True, False]
    storage.close()
    storage, _ = make_storage(open_cache.directory, logical, {})
    assert storage.batch_exists(keys) == 2
    storage.close()


def test_groups_of_blocks_are_told_and_gate_nothing(open_cache: Opener) -> None:
    cache = open_cache(kind="dsa")
    keys = cache.keys(cache.prompt(1, 8))
    indices = cache.group.alloc(8 * cache.page_tokens)
    width = cache.page_tokens
    cache.storage.batch_set_v1(keys, indices)
    stored = PoolTransfer(PoolName.INDEXER, host_indices=indices[: 3 * width], keys=keys[:3])
    cache.storage.batch_set_v2([stored])
    groups = PoolTransfer(
        PoolName.INDEXER,
        keys=keys[:4],
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=4,
        group_pages=2,
    )
    result = cache.storage.batch_exists_v2(keys, [groups])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (8, {"kv": 8, "indexer": 4})


def test_nothing_is_left_when_the_directory_of_a_pool_is_taken_away(open_cache: Opener) -> None:
    """Whatever happens to the files under a running engine, it loses hits and nothing else."""
    cache = open_cache(kind="dsa")
    cache.backup(cache.prompt(1, 4))
    segments = cache.storage._stores.directory / "indexer" / "segments"
    for name in os.listdir(segments):
        os.unlink(segments / name)
    loaded = cache.prefetch(cache.prompt(1, 4))
    assert (loaded.promised, loaded.pages) == (4, 0)
    assert cache.prefetch(cache.prompt(1, 4)) == Loaded(0, 0)
    assert cache.backup(cache.prompt(1, 4)) in (0, 4)
