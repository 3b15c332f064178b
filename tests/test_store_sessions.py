"""store.session: conversations by id, engine-neutral."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from store_rig import Rig, chain, put_on_disk_alone, put_pages

from tiered_kv import KVLayout, StoreConfig, TieredStore
from tiered_kv.errors import StoreClosedError
from tiered_kv.storage.disk.geometry import plan_geometry

LAYOUT = KVLayout.uniform(4096, page_tokens=4)


def small_store(disk: Path | None = None, model: str = "") -> TieredStore:
    config = StoreConfig.parse(
        hbm="64KiB",
        host="128KiB",
        disk=disk,
        disk_size="8MiB" if disk else None,
        model_name=model,
        device="cpu",
    )
    return TieredStore.open(LAYOUT, config)


def test_a_session_begins_empty_and_knows_what_was_kept() -> None:
    with small_store() as store:
        session = store.session("user-42")
        assert session.tokens.tolist() == []
        assert session.prompt([1, 2, 3]).tolist() == [1, 2, 3]
        session.keep(np.arange(10))
        assert session.prompt([77]).tolist() == [*range(10), 77]
        assert session.tokens.tolist() == list(range(10))
        assert list(session.keys()) == list(store.keys(range(10)))
        assert store.session("user-42").tokens.tolist() == list(range(10))
        assert store.session("user-43").tokens.tolist() == []


def test_tokens_cannot_be_changed_behind_the_sessions_back() -> None:
    with small_store() as store:
        session = store.session("user-42")
        said = np.arange(10, dtype=np.uint32)
        session.keep(said)
        said[3] = 99
        assert session.tokens.tolist() == list(range(10))
        with pytest.raises(ValueError, match="read-only"):
            session.tokens[0] = 5


def test_a_session_survives_a_restart_with_its_disk(tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        store.session("user-42").keep(range(1000))
        store.session("user-43").keep(range(7))
    with small_store(tmp_path) as store:
        assert store.session("user-42").tokens.tolist() == list(range(1000))
        store.session("user-42").forget()
        assert store.session("user-42").tokens.tolist() == []
    with small_store(tmp_path) as store:
        assert store.session("user-42").tokens.tolist() == []
        assert store.session("user-43").tokens.tolist() == list(range(7))


def test_one_id_under_another_salt_adapter_or_model_is_another_session(tmp_path: Path) -> None:
    """Two tenants may both have a user 1; neither sees what the other's has said."""
    with small_store(tmp_path, model="base") as store:
        store.session("1", salt="a").keep([1, 2, 3])
        assert store.session("1", salt="b").tokens.tolist() == []
        assert store.session("1").tokens.tolist() == []
        assert store.session("1", salt="a", lora="x").tokens.tolist() == []
        assert store.session("1", salt="a").tokens.tolist() == [1, 2, 3]
    with small_store(tmp_path, model="tuned") as store:
        assert store.session("1", salt="a").tokens.tolist() == []


def test_sessions_that_begin_alike_share_pages_unless_salts_differ(open_store: Rig) -> None:
    store = open_store()
    put_pages(store, chain(store, 5))
    shared = [store.session(name) for name in ("one", "two")]
    for session, tail in zip(shared, (7, 8), strict=True):
        session.keep([*range(20), tail])
        assert store.match(session.keys()).pages == 5
    other = store.session("one", salt="tenant")
    other.keep(range(20))
    assert store.match(other.keys()).pages == 0


def test_keys_of_a_session_serve_to_prefetch_and_to_hint(open_store: Rig) -> None:
    store = open_store()
    put_on_disk_alone(store, chain(store, 5))
    session = store.session("user-42")
    session.keep(range(20))
    assert store.match(session.keys()).disk_pages == 5
    assert store.prefetch(session.keys()).wait() == 5
    assert store.match(session.keys()).host_pages == 5
    assert store.hint(session.keys(), priority=90) == 5


def test_sessions_count_within_disk_size(tmp_path: Path) -> None:
    """Full of pages and full of sessions, the directory stays below what it may take."""
    with small_store(tmp_path) as store:
        capacity = store.capacity_pages()["disk"]
        for n in range(capacity // 8 + 1):
            keys = store.keys(range(n * 1000, n * 1000 + 32))
            slots = store.hbm.allocate(8)
            assert slots is not None
            store.put(keys, slots).wait()
            store.session(f"user-{n}").keep(range(n * 20))
            store.flush()
        out = subprocess.run(["du", "-s", "-B1", tmp_path], capture_output=True, check=True)
        assert int(out.stdout.split()[0]) <= 8 << 20
        assert len(list((tmp_path / "sessions").iterdir())) > 1
        assert store.check().problems == []


def test_room_for_sessions_is_left_over_by_the_pages() -> None:
    for capacity in (4 << 20, 1 << 30, 1 << 40):
        geometry = plan_geometry(64 << 10, capacity)
        assert geometry.session_bytes == min(capacity // 256, 256 << 20)


def test_without_a_disk_sessions_last_as_long_as_the_store() -> None:
    with small_store() as store:
        store.session("user-42").keep(range(100))
        assert len(store.session("user-42").tokens) == 100
    with small_store() as store:
        assert len(store.session("user-42").tokens) == 0


def test_a_conversation_may_be_edited_and_the_last_to_keep_it_counts() -> None:
    with small_store() as store:
        one, two = store.session("user-42"), store.session("user-42")
        one.keep(range(10))
        two.keep([5, 6])
        assert one.tokens.tolist() == list(range(10))
        assert store.session("user-42").tokens.tolist() == [5, 6]


def test_a_session_of_a_closed_store_says_so() -> None:
    with small_store() as store:
        session = store.session("user-42")
        session.keep([1])
    assert session.tokens.tolist() == [1]
    with pytest.raises(StoreClosedError, match="the store is closed"):
        session.keep([1, 2])
    with pytest.raises(StoreClosedError, match="the store is closed"):
        store.session("user-42")


@pytest.mark.parametrize("tokens", [[-1], [1.5], [[1, 2]], ["a"]])
def test_what_is_not_tokens_is_refused_and_nothing_is_changed(tokens: list[object]) -> None:
    with small_store() as store:
        session = store.session("user-42")
        session.keep([1, 2])
        with pytest.raises(ValueError, match="token ids must"):
            session.keep(tokens)
        assert store.session("user-42").tokens.tolist() == [1, 2]
