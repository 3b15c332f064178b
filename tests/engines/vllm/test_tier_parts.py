"""The disk tier's parts that speak vLLM's language: chunks of a request, events, geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from tiered_kv.errors import ConfigError
from tiered_kv.plugins.vllm.tier import _geometry, _root
from tiered_kv.plugins.vllm.tier_chunks import RequestChunks, place_of
from tiered_kv.plugins.vllm.tier_events import Announcements
from tiered_kv.plugins.vllm.tier_settings import TierSettings
from tiered_kv.plugins.vllm.versions import check_version

SETTINGS = {"disk": "kv", "disk_size": "1GiB"}


def key(number: int, group: int = 0) -> OffloadKey:
    return make_offload_key(number.to_bytes(32, "little"), group)


def told(request: ReqContext, keys: Sequence[OffloadKey], chunk_tokens: int) -> None:
    for at, one in enumerate(keys, start=1):
        request.set_offload_key_position(one, at * chunk_tokens)


def test_the_parent_of_a_chunk_is_the_one_before_it_in_its_group() -> None:
    request = ReqContext("r")
    told(request, [key(1), key(2)], 64)
    told(request, [key(n, 1) for n in (3, 4, 5)], 32)
    chunks = RequestChunks.of(request)
    assert chunks.parent(key(1), request, 64) is None
    assert chunks.parent(key(2), request, 64) == key(1)
    assert chunks.parent(key(5, 1), request, 32) == key(4, 1)
    assert chunks.parent(key(9), request, 64) is None  # not of this request


def test_a_request_that_grows_has_its_new_chunks_too() -> None:
    request = ReqContext("r")
    told(request, [key(1)], 32)
    assert RequestChunks.of(request).by_group() == [[key(1)]]
    told(request, [key(1), key(2), key(3)], 32)
    chunks = RequestChunks.of(request)
    assert chunks.by_group() == [[key(1), key(2), key(3)]]
    assert chunks.parent(key(3), request, 32) == key(2)


def test_chunks_sort_into_prompt_order_group_by_group() -> None:
    request = ReqContext("r")
    told(request, [key(n) for n in (7, 3, 5)], 32)
    told(request, [key(n, 1) for n in (2, 1)], 32)
    given = [key(1, 1), key(5), key(2, 1), key(7), key(3)]
    wanted = [key(7), key(3), key(5), key(2, 1), key(1, 1)]
    assert sorted(given, key=lambda one: place_of(one, request)) == wanted


class Disk:
    """Pages that are there until they are not."""

    def __init__(self) -> None:
        self.held: set[OffloadKey] = set()
        self.announcements = Announcements(self.holds)

    def holds(self, keys: Sequence[OffloadKey]) -> list[bool]:
        return [key in self.held for key in keys]

    def store(self, *keys: OffloadKey) -> None:
        self.held |= set(keys)
        self.announcements.stored(keys)

    def said(self) -> list[tuple[bool, list[OffloadKey]]]:
        return [(event.removed, event.keys) for event in self.announcements.take()]


def test_what_is_stored_is_told_once() -> None:
    disk = Disk()
    disk.store(key(1), key(2))
    assert disk.said() == [(False, [key(1), key(2)])]
    assert disk.said() == []


def test_what_left_for_new_pages_is_told_with_them() -> None:
    disk = Disk()
    disk.store(key(1), key(2), key(3))
    disk.said()
    disk.held -= {key(2)}
    disk.store(key(4))
    assert disk.said() == [(False, [key(4)]), (True, [key(2)])]
    disk.store(key(5))
    assert disk.said() == [(False, [key(5)])]


def test_every_page_that_left_is_told_of_after_a_bounded_number_of_stores() -> None:
    disk = Disk()
    disk.store(*[key(n) for n in range(1000)])
    disk.held -= {key(n) for n in range(0, 1000, 3)}
    disk.said()
    for n in range(1000, 1000 + 1000 // 64 + 1):
        disk.store(key(n))
    removed = {one for is_removed, keys in disk.said() if is_removed for one in keys}
    assert removed == {key(n) for n in range(0, 1000, 3)}


def test_a_page_that_could_not_be_loaded_is_told_of_if_it_was_announced() -> None:
    disk = Disk()
    disk.store(key(1), key(2))
    disk.said()
    disk.held.clear()
    disk.announcements.gone([key(1), key(8)])
    assert disk.said() == [(True, [key(1)])]


def config(**changes: Any) -> OffloadingConfig:
    whole = OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=8192,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("some/model", "bfloat16"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=OffloadingParallelConfig(0, 2, 2, 1, 1, 1, 0, 1, None, False),
        kv_cache_layout="LBNHC",
    )
    return replace(whole, **changes)


def geometry(row_bytes: int = 16384, **changes: Any) -> str:
    return _geometry(SimpleNamespace(config=config(**changes)), row_bytes)


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": (OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),)},
        {"groups": (OffloadingGroupConfig(32, ("layer.0", "layer.2"), 0),)},
        {"model": OffloadingModelConfig("some/model", "float16")},
        {"cache": OffloadingCacheConfig(32, 2)},
        {"parallel": OffloadingParallelConfig(0, 2, 1, 2, 1, 1, 0, 1, None, False)},
        {"kv_cache_layout": "LBHNC"},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"row_bytes": 8192},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_changes_the_bytes_of_a_page_changes_its_geometry(changes: dict[str, Any]) -> None:
    """Row 12: metadata that differ after a restore; row 13: a dtype that is not in the key."""
    assert geometry(**changes) != geometry()
    assert geometry() == geometry(engine_id="another", extra_config={"cpu_bytes_to_use": 1})


def root(model: Path | str, **settings: str) -> bytes:
    chosen = TierSettings.parse(SETTINGS | settings)
    model_config = OffloadingModelConfig(str(model), "bfloat16")
    return _root(SimpleNamespace(config=config(model=model_config)), chosen, "g")


def test_keys_follow_the_weights_of_a_local_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"weights")
    before = root(tmp_path)
    assert root(tmp_path) == before
    assert root(tmp_path, model_name="tuned") != before
    weights.write_bytes(b"other weights")
    assert root(tmp_path) != before


def test_a_model_that_is_not_here_needs_a_name() -> None:
    with pytest.raises(ConfigError, match="give TieredKVTier a model_name"):
        root("some/model")
    assert root("some/model", model_name="v1") != root("some/model", model_name="v2")


def test_another_vllm_is_refused_with_one_line() -> None:
    check_version("0.32.0")
    check_version("0.32.1+cpu")
    for version in ("0.31.9", "0.33.0", "0.320.0"):
        with pytest.raises(ConfigError, match=rf"works with vLLM 0\.32\.x, and this is {version}"):
            check_version(version)
