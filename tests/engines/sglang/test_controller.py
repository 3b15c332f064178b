"""Our storage under SGLang's HiCacheController: what was backed up comes back, or is a miss."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from disk_rig import flip
from sglang_rig import Cache, Loaded, Opener, holds, make_storage, write_page

LAYOUTS = [
    ("mha", "layer_first"),
    ("mha", "page_first"),
    ("mha", "page_first_direct"),
    ("mha", "page_head"),
    ("asymmetric", "page_first"),
    ("asymmetric", "page_first_direct"),
    ("mla", "layer_first"),
    ("mla", "page_first"),
    ("mla", "page_first_direct"),
]


def disk_usage_bytes(directory: Path) -> int:
    return int(subprocess.check_output(["du", "-s", "-B1", str(directory)]).split()[0])


def stats_of(cache: Cache) -> Any:
    return cache.storage.stats()["kv"]


def store_of(cache: Cache) -> Any:
    return cache.storage._stores["kv"][1]


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS)
def test_pages_come_back_after_a_restart(open_cache: Opener, kind: str, layout: str) -> None:
    """More pages than SGLang moves in one batch (128), over all host pool layouts."""
    cache = open_cache(kind=kind, layout=layout)
    prompt = cache.prompt(1, 150)
    assert cache.backup(prompt) == 150
    assert cache.prefetch(prompt) == Loaded(150, 150)
    open_cache.close()
    cache = open_cache(kind=kind, layout=layout)
    assert cache.prefetch(prompt) == Loaded(150, 150)
    assert cache.prefetch(cache.prompt(1, 160)) == Loaded(150, 150)
    assert cache.prefetch(cache.prompt(1, 40)) == Loaded(40, 40)
    assert cache.prefetch(cache.prompt(2, 3)) == Loaded(0, 0)
    assert stats_of(cache).bytes_written["disk"] == 0


@pytest.mark.parametrize(("kind", "layout"), [pair for pair in LAYOUTS if pair[0] != "asymmetric"])
def test_without_interface_v1_pages_pass_through_sglangs_flat_form(
    open_cache: Opener, caplog: pytest.LogCaptureFixture, kind: str, layout: str
) -> None:
    with caplog.at_level(logging.WARNING):
        cache = open_cache(kind=kind, layout=layout, interface_v1=None)
    assert 'without "interface_v1": 1' in caplog.text
    prompt = cache.prompt(1, 20)
    assert cache.backup(prompt) == 20
    assert cache.prefetch(prompt) == Loaded(20, 20)
    assert cache.prefetch(cache.prompt(1, 30)) == Loaded(20, 20)


@pytest.mark.parametrize(("kind", "layout"), [pair for pair in LAYOUTS if pair[0] != "asymmetric"])
def test_the_two_interfaces_never_take_each_others_bytes_for_their_own(
    open_cache: Opener, kind: str, layout: str
) -> None:
    """Layer-first, one keeps K of all layers before V, the other K and V of each layer."""
    cache = open_cache(kind=kind, layout=layout)
    prompt = cache.prompt(1, 12)
    assert cache.backup(prompt) == 12
    open_cache.close()
    cache = open_cache(kind=kind, layout=layout, interface_v1=None)
    is_one_order = layout != "layer_first"
    assert cache.prefetch(prompt) == (Loaded(12, 12) if is_one_order else Loaded(0, 0))
    assert cache.backup(prompt) == 12
    assert cache.prefetch(prompt) == Loaded(12, 12)
    open_cache.close()
    cache = open_cache(kind=kind, layout=layout)
    assert cache.prefetch(prompt) == Loaded(12, 12)


def test_pages_lie_on_disk_straight_from_sglangs_memory(open_cache: Opener) -> None:
    """Zero-copy: what the tier is given are views of the host pool's own buffer."""
    cache = open_cache()
    pages = cache.storage._stores["kv"][0]
    indices = torch.arange(3 * cache.page_tokens)
    memory = cache.pool.kv_buffer
    first, upto = memory.data_ptr(), memory.data_ptr() + memory.numel() * memory.element_size()
    for parts in pages.sources(indices) + pages.targets(indices):
        assert len(parts) == 2
        for part in parts:
            address = part.__array_interface__["data"][0]
            assert first <= address and address + part.nbytes <= upto


def test_what_is_there_is_not_written_again(open_cache: Opener) -> None:
    cache = open_cache()
    assert cache.backup(cache.prompt(1, 30)) == 30
    written = stats_of(cache).bytes_written["disk"]
    assert cache.backup(cache.prompt(1, 30)) == 30
    assert stats_of(cache).bytes_written["disk"] == written
    assert cache.backup(cache.prompt(1, 40)) == 40
    assert stats_of(cache).bytes_written["disk"] == written * 4 // 3


def test_the_middle_of_a_prompt_alone_does_not_hit(open_cache: Opener) -> None:
    """sgl-project/sglang#26886: the head was missing under write_back, and nothing ever hit."""
    cache = open_cache()
    prompt = cache.prompt(1, 20)
    assert cache.backup(prompt, start=5) == 15
    assert cache.prefetch(prompt) == Loaded(0, 0)
    assert cache.storage._traffic.meter.questions()["never_stored"] == 1
    assert cache.backup(cache.prompt(1, 5)) == 5
    assert cache.prefetch(prompt) == Loaded(20, 20)


def test_with_prefix_keys_the_head_of_a_prompt_outlives_its_tail(open_cache: Opener) -> None:
    """What SGLang's host tier holds it never reads from disk: by use alone it would leave first."""
    cache = open_cache(size="4MiB")
    prompt = cache.prompt(1, 60)
    assert cache.backup(cache.prompt(1, 30), prefix_keys=True) == 30
    assert cache.backup(prompt, start=30, prefix_keys=True) == 30
    room = store_of(cache).capacity_pages - 60
    for other in range(2, 5):
        assert cache.backup(cache.prompt(other, (room + 24) // 3)) == (room + 24) // 3
    came = cache.prefetch(prompt)
    assert came.pages == came.promised
    assert 30 <= came.pages < 60


def test_a_full_store_gives_way_and_stays_within_its_size(open_cache: Opener) -> None:
    """LMCache/LMCache#1454: a cap that was not kept."""
    cache = open_cache(size="4MiB")
    for conversation in range(12):
        assert cache.backup(cache.prompt(conversation, 25)) == 25
        assert disk_usage_bytes(open_cache.directory) <= 4 << 20
    assert cache.prefetch(cache.prompt(11, 25)) == Loaded(25, 25)
    assert cache.prefetch(cache.prompt(0, 25)) == Loaded(0, 0)
    assert cache.storage._traffic.meter.questions()["evicted"] == 1


def test_a_prompt_larger_than_the_store_is_kept_from_its_head(open_cache: Opener) -> None:
    cache = open_cache(size="4MiB")
    room = store_of(cache).capacity_pages
    assert room < 160
    stored = cache.backup(cache.prompt(1, 200))
    assert stored in (0, 128)  # SGLang counts whole batches
    assert cache.prefetch(cache.prompt(1, 200)).pages == room


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_to_write_leaves_the_engine_running(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """vllm-project/vllm#26329: running out of room killed the engine."""

    def fail(*arguments: Any) -> int:
        raise OSError(error, os.strerror(error))

    cache = open_cache()
    assert cache.backup(cache.prompt(1, 10)) == 10
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert cache.backup(cache.prompt(2, 10)) == 0
        assert cache.backup(cache.prompt(1, 20)) == 0
        assert cache.prefetch(cache.prompt(2, 10)) == Loaded(0, 0)
        assert cache.prefetch(cache.prompt(1, 20)) == Loaded(10, 10)
    assert stats_of(cache).failed_writes == 20
    assert cache.backup(cache.prompt(2, 10)) == 10
    assert cache.prefetch(cache.prompt(2, 10)) == Loaded(10, 10)


def test_a_disk_that_fails_to_read_is_a_miss(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ai-dynamo/dynamo#15079: a failed load was served as a hit."""

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    cache = open_cache()
    prompt = cache.prompt(1, 10)
    cache.backup(prompt)
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        assert cache.prefetch(prompt) == Loaded(10, 0)
    assert cache.prefetch(prompt) == Loaded(0, 0), "what could not be read is not promised again"
    assert cache.backup(prompt) == 10
    assert cache.prefetch(prompt) == Loaded(10, 10)


def test_a_damaged_page_ends_the_hit_before_it_and_heals(open_cache: Opener) -> None:
    cache = open_cache()
    prompt = cache.prompt(1, 20)
    cache.backup(prompt)
    store = store_of(cache)
    slot = store._disk.slot[store._index.find(bytes.fromhex(cache.keys(prompt)[7]))]
    flip(store._tier, slot, cache.storage._stores.directory / "kv")
    assert cache.prefetch(prompt) == Loaded(20, 7)
    assert cache.prefetch(prompt) == Loaded(7, 7)
    assert stats_of(cache).checksums_failed == 1
    assert cache.backup(prompt) == 20
    assert cache.prefetch(prompt) == Loaded(20, 20)


def test_a_file_cut_short_is_a_miss(open_cache: Opener) -> None:
    """SGLang's own file backend raises on a short file."""
    cache = open_cache()
    prompt = cache.prompt(1, 20)
    cache.backup(prompt)
    (segment,) = (cache.storage._stores.directory / "kv" / "segments").iterdir()
    os.truncate(segment, 4096 + 5 * 32768 + 100)
    assert cache.prefetch(prompt) == Loaded(20, 5)
    assert cache.prefetch(prompt) == Loaded(5, 5)


def test_sglangs_fault_injector_costs_hits_and_never_bytes(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.004")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    cache = open_cache()
    assert type(cache.storage).__name__ == "HiCacheStorageFailureInjector"
    came = promised = 0
    for round_ in range(30):
        prompt = cache.prompt(round_ % 6, 12)
        assert cache.backup(prompt) in (0, 12)
        loaded = cache.prefetch(prompt)
        assert loaded.pages in (0, 12)
        came, promised = came + loaded.pages, promised + loaded.promised
    assert 0 < came < promised < 30 * 12


def test_backups_and_prefetches_at_once(open_cache: Opener) -> None:
    """vllm-project/vllm#31210: right alone, wrong in company. Small enough to evict all along."""
    cache = open_cache(size="8MiB", io_threads=3)
    came = 0
    for round_ in range(10):
        prompts = [cache.prompt((round_ * 3 + at) % 12, 20 + at) for at in range(6)]
        begun = []
        for prompt in prompts:
            begun.append(cache.begin_backup(prompt))
            cache.begin_prefetch(prompt)
        came += sum(cache.end_prefetch().pages for _ in prompts)
        for backup in begun:
            cache.end_backup(backup)
    assert came > 200
    assert store_of(cache)._index.check(lambda: True) == []
    assert disk_usage_bytes(open_cache.directory) <= 8 << 20


def test_many_threads_on_one_storage(open_cache: Opener) -> None:
    """SGLang brings one thread each way today; a storage must not depend on that."""
    from concurrent.futures import ThreadPoolExecutor

    cache = open_cache(size="8MiB")
    tokens, pool, storage = cache.page_tokens, cache.pool, cache.storage

    def work(worker: int) -> int:
        hits = 0
        indices = cache.group.alloc(8 * tokens)
        for round_ in range(25):
            keys = [f"{(worker + round_) % 5:02x}{at:062x}" for at in range(8)]
            for at, key in enumerate(keys):
                write_page(pool, int(indices[at * tokens]), key)
            storage.batch_set_v1(keys, indices)
            storage.batch_exists(keys)
            for at in range(8):
                write_page(pool, int(indices[at * tokens]), "something else")
            for at, came in enumerate(storage.batch_get_v1(keys, indices)):
                assert not came or holds(pool, int(indices[at * tokens]), keys[at])
                hits += came
        return hits

    with ThreadPoolExecutor(6) as threads:
        assert all(hits > 100 for hits in threads.map(work, range(6)))


def test_detached_and_attached_again_at_runtime(open_cache: Opener) -> None:
    cache = open_cache()
    prompt = cache.prompt(1, 10)
    cache.backup(prompt)
    given = dict(cache.controller.storage_config.extra_config)
    cache.controller.detach_storage_backend()
    assert cache.storage is None
    cache.controller.attach_storage_backend("dynamic", cache.page_tokens, "models/tiny", given)
    assert cache.prefetch(prompt) == Loaded(10, 10)


def test_clear_empties_the_store(open_cache: Opener) -> None:
    cache = open_cache()
    prompt = cache.prompt(1, 10)
    cache.backup(prompt)
    cache.storage.clear()
    assert cache.prefetch(prompt) == Loaded(0, 0)
    assert cache.backup(prompt) == 10
    open_cache.close()
    assert open_cache().prefetch(prompt) == Loaded(10, 10)


def test_sglangs_metrics_are_those_of_a_scripted_run(open_cache: Opener) -> None:
    """LMCache/LMCache#1741: the counter of hits stayed at 0."""
    cache = open_cache(metrics=True)
    cache.backup(cache.prompt(1, 150))
    cache.prefetch(cache.prompt(1, 140))
    cache.prefetch(cache.prompt(2, 5))
    metrics = cache.storage.get_stats()
    assert metrics.backup_pgs == [128, 22]
    assert metrics.prefetch_pgs == [128, 12]
    assert len(metrics.backup_bandwidth) == len(metrics.prefetch_bandwidth) == 2
    assert all(rate > 0 for rate in metrics.backup_bandwidth + metrics.prefetch_bandwidth)
    assert cache.storage.get_stats().backup_pgs == [], "each batch is told once"
    assert open_cache(directory=open_cache.directory / "other").storage.get_stats() is None


def test_a_storage_nobody_attached_or_that_is_closed_misses_and_says_so_once(
    open_cache: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    cache = open_cache()
    cache.backup(cache.prompt(1, 3))
    storage, indices = cache.storage, torch.arange(3 * cache.page_tokens)
    keys = cache.keys(cache.prompt(1, 3))
    storage.close()
    with caplog.at_level(logging.WARNING):
        assert storage.batch_get_v1(keys, indices) == [False] * 3
        assert storage.batch_set_v1(keys, host_indices=indices) == [False] * 3
        assert storage.batch_exists(keys) == 0
        assert storage.exists(keys[0]) is False
        assert storage.get(keys[0]) is None
        assert storage.set(keys[0], torch.zeros(32768, dtype=torch.uint8)) is False
        assert storage.batch_get(keys) == [None] * 3
        assert storage.batch_set(keys, [torch.zeros(1)] * 3) is False
        assert storage.batch_exists_v2(keys).kv_hit_pages == 0
    assert len(caplog.records) == 1


def test_indices_that_are_no_pages_are_misses(open_cache: Opener) -> None:
    cache = open_cache()
    keys = cache.keys(cache.prompt(1, 3))
    for indices in (torch.arange(3 * cache.page_tokens - 1), torch.arange(0), None):
        assert cache.storage.batch_set_v1(keys, indices) == [False] * 3
        assert cache.storage.batch_get_v1(keys, indices) == [False] * 3
    assert cache.storage.batch_exists(keys) == 0


def test_the_generic_interface_by_itself(open_cache: Opener) -> None:
    cache = open_cache(layout="layer_first")
    storage = cache.storage
    page = torch.arange(16384, dtype=torch.int16).view(torch.bfloat16)
    assert storage.exists("any text") is False
    assert storage.get("any text") is None
    assert storage.set("any text", page) is True
    assert storage.exists("any text") is True
    came = storage.get("any text")
    assert torch.equal(came, page.view(torch.uint8))
    into = torch.zeros_like(page)
    assert storage.get("any text", into) is into
    assert torch.equal(into.view(torch.int16), page.view(torch.int16))
    assert storage.get("any text", torch.zeros(16383, dtype=torch.bfloat16)) is None, "short"
    assert storage.get("any text", torch.zeros(16385, dtype=torch.bfloat16)) is None, "long"
    assert storage.get("any text", torch.zeros(32768, dtype=torch.bfloat16)[::2]) is None
    assert storage.set("short", page[:-1]) is False
    assert storage.set("nothing") is False
    assert storage.batch_set(["a", "b"], [page, page]) is True
    assert storage.set("c", target_location=page) is True
    assert [p is not None for p in storage.batch_get(["b", "x", "a", "c"])] == [1, 0, 1, 1]
    assert storage.batch_get(["b"], [into])[0] is into


def test_a_rank_that_only_reads_elsewhere_keeps_replicated_kv_for_itself(
    open_cache: Opener, tmp_path: Path
) -> None:
    """SGLang lets the first rank alone write KV that is the same on all; each has its own disk."""
    from sglang.srt.runtime_context import get_parallel

    cache = open_cache(kind="mla", directory=tmp_path / "other")
    ranks = []
    with get_parallel().override(tp_size=2, attn_tp_size=2):
        for rank in range(2):
            storage, config = make_storage(
                open_cache.directory,
                cache.pool,
                {"tp_rank": rank, "tp_size": 2, "is_mla_model": True},
            )
            assert config.is_storage_writer
            ranks.append(storage)
    keys = cache.keys(cache.prompt(1, 4))
    indices = cache.group.alloc(4 * cache.page_tokens)
    for storage in ranks:
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, indices) == [True] * 4
        assert storage.batch_exists(keys) == 4
        storage.close()
