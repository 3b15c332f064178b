"""The store's contract in scenarios; a test that is a field fault names its row."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_rig import (
    PAGE_BYTES,
    PATIENCE_S,
    Rig,
    assert_holds,
    chain,
    content_of,
    fill_slots,
    flush_hbm,
    get_pages,
    held_stream,
    index_problems,
    put_on_disk_alone,
    put_pages,
    settle,
    write_slot,
)

from tiered_kv import (
    ConfigError,
    KeyChain,
    KVLayout,
    LayoutMismatchError,
    PageState,
    StoreClosedError,
)
from tiered_kv.storage.base import CheckReport
from tiered_kv.streams import Event, ThreadStream

# -- what comes back -------------------------------------------------------------------------------


def test_page_comes_back_from_each_tier(open_store: Rig) -> None:
    store = open_store(hbm=8, host=4)
    keys = chain(store, 6)
    assert put_pages(store, keys[:3]) == 3
    flush_hbm(store)
    assert put_pages(store, keys[3:]) == 3  # two of the first three went to disk
    assert store.match(keys).pages == 6
    with store.get(keys) as load:
        assert load.wait(PATIENCE_S) == 6
        assert load.tiers[-3:] == ("hbm",) * 3
        assert set(load.tiers[:3]) == {"host", "disk"}
        assert_holds(store, load.slots, keys)
    assert index_problems(store, idle=True) == []


def test_match_moves_and_changes_nothing(open_store: Rig) -> None:
    """Lookups that promote wear the disk and push out what is used (row 45)."""
    store = open_store()
    keys = chain(store, 4)
    put_on_disk_alone(store, keys)
    index = store._planner.index
    before = (store.stats(), [index.last_use_of[page] for page in index])
    for _ in range(3):
        match = store.match(keys)
        assert (match.pages, match.tokens, match.disk_pages) == (4, 16, 4)
        assert match.state is PageState.HIT
    assert store.match(chain(store, 1, 9)).state is PageState.MISS
    assert (store.stats(), [index.last_use_of[page] for page in index]) == before
    assert store.counting.counts["read"] == 0


def test_match_says_pending_while_pages_arrive(open_store: Rig) -> None:
    store = open_store()
    keys, writer = chain(store, 2), Event()
    put = store.put(keys, fill_slots(store, keys), after=writer)
    assert store.match(keys).state is PageState.PENDING
    writer.fire()
    put.wait(PATIENCE_S)
    assert store.match(keys).state is PageState.HIT


def test_a_put_whose_own_page_makes_room_for_the_others_stores_them_all(open_store: Rig) -> None:
    store = open_store(hbm=16, host=4)
    keys = chain(store, 5)
    put_pages(store, keys[:1])
    flush_hbm(store)
    put_pages(store, chain(store, 3, 100))
    assert put_pages(store, keys) == 5
    assert store.stats().not_stored_pages == 0
    settle(store)
    assert index_problems(store, idle=True) == []


def test_hit_longer_than_host_streams_through_it(open_store: Rig) -> None:
    """A long hit on disk must not be cut to what host holds (row 40)."""
    store = open_store(hbm=24, host=3)
    keys = chain(store, 20)
    for at in range(0, 20, 2):
        put_pages(store, keys[at : at + 2])
    store.flush()
    flush_hbm(store)
    tiers = get_pages(store, keys)
    assert len(tiers) == 20
    assert tiers.count("disk") >= 17


def test_hit_longer_than_hbm_comes_in_pieces(open_store: Rig) -> None:
    store = open_store(hbm=5, host=32)
    keys = chain(store, 12)
    for at in range(0, 12, 4):
        put_pages(store, keys[at : at + 4])
    flush_hbm(store)
    at, pieces = 0, []
    while at < len(keys):
        pieces.append(len(get_pages(store, keys[at:])))
        at += pieces[-1]
    assert pieces == [5, 5, 2]
    assert store.stats().why_miss["no_room"] == 7 + 2


def test_pages_come_into_the_callers_own_slots(open_store: Rig) -> None:
    """From HBM, host and disk at once; the slots remain the caller's, nothing is leased."""
    store = open_store(hbm=8, host=4)
    keys = chain(store, 4)
    put_on_disk_alone(store, keys)
    store.prefetch(keys[:3]).wait(PATIENCE_S)
    get_pages(store, keys[:2])
    slots = store.hbm.allocate(5)
    assert slots is not None
    load = store.get(keys, into=slots)
    assert load.wait(PATIENCE_S) == 4
    assert load.slots == slots[:4]
    assert load.tiers == ("hbm", "hbm", "host", "disk")
    assert_holds(store, slots[:4], keys)
    with pytest.raises(ValueError, match="for 6 keys"):
        store.get(chain(store, 6), into=slots)
    store.hbm.release(slots)
    with pytest.raises(ValueError, match="was not allocated"):
        store.get(keys, into=slots)
    settle(store)
    assert index_problems(store, idle=True) == []


def test_layers_come_one_after_another(open_store: Rig) -> None:
    """`wait_layer` returns as soon as its layer is there, while later ones are on their way."""
    layout = KVLayout.uniform(16 << 20, 4, layers=4)
    store = open_store(hbm=4, host=4, disk="384MiB", layout=layout)
    keys = chain(store, 2)
    put_pages(store, keys)
    flush_hbm(store)
    tier, copy = store._hbm_tier, store._hbm_tier.write_layers
    gates = [threading.Event() for _ in range(4)]

    def copy_when_told(slots: Any, pages: Any, first: int, last: int) -> None:
        assert gates[first].wait(PATIENCE_S)
        copy(slots, pages, first, last)

    tier.write_layers = copy_when_told  # type: ignore[method-assign]
    with store.get(keys) as load:
        at = 0
        for layer in range(4):
            gates[layer].set()
            assert load.wait_layer(layer) == 2
            size = layout.layer_page_bytes[layer]
            for slot, key in zip(load.slots, keys, strict=True):
                expected = content_of(key, layout.page_bytes)[at : at + size]
                assert np.array_equal(store.hbm.layers[layer][slot].numpy(), expected)
            at += size
            assert layer == 3 or not load.is_done
        assert load.wait(PATIENCE_S) == 2
        with pytest.raises(IndexError):
            load.wait_layer(4)


def test_layer_of_a_load_that_comes_too_late_is_a_miss(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 2)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    with store.get(keys, deadline_s=0.0) as load:
        assert load.wait_layer(0) == 0
        assert load.wait() == 0
        assert load.slots == []


# -- copies wait for those who write and read (rows 1 and 2) ---------------------------------------


def test_put_waits_for_the_writer_of_its_pages(open_store: Rig) -> None:
    """The engine's stream is still writing a page when it is put: host must not get half of it."""
    store, engine = open_store(), ThreadStream("engine")
    keys, half = chain(store, 2), threading.Event()
    slots = store.hbm.allocate(2)
    assert slots is not None

    def write_slowly() -> None:
        write_slot(store, slots[0], content_of(keys[0]))
        assert half.wait(PATIENCE_S)
        write_slot(store, slots[1], content_of(keys[1]))

    put = store.put(keys, slots, after=engine.submit(write_slowly))
    waiting = store.get(keys)
    store._mover.store_stream.synchronize()
    assert not put.is_done
    half.set()
    assert put.wait(PATIENCE_S) == 2
    assert waiting.wait(PATIENCE_S) == 2
    assert_holds(store, waiting.slots, keys)
    waiting.release()
    flush_hbm(store)
    assert get_pages(store, keys) == ("host", "host")
    engine.close()


def test_leased_pages_stay_until_their_reader_is_through(open_store: Rig) -> None:
    """Attention still reads the pages when the lease is given back; a load must not reuse them."""
    store, engine = open_store(hbm=2), ThreadStream("engine")
    keys, others = chain(store, 2, 1), chain(store, 2, 2)
    put_pages(store, others)
    flush_hbm(store)
    put_pages(store, keys)
    load, may_end, seen = store.get(keys), threading.Event(), []
    assert load.wait(PATIENCE_S) == 2

    def read_slowly() -> None:
        assert may_end.wait(PATIENCE_S)
        assert_holds(store, load.slots, keys)
        seen.append(True)

    load.release(after=engine.submit(read_slowly))
    assert store.hbm.allocate(1) is None
    with store.get(others) as too_early:
        assert too_early.wait(PATIENCE_S) == 0
    may_end.set()
    engine.synchronize()
    settle(store)
    assert seen == [True]
    assert len(get_pages(store, others)) == 2
    engine.close()


def test_get_into_slots_waits_for_their_last_user(open_store: Rig) -> None:
    store, engine = open_store(), ThreadStream("engine")
    keys, may_end, seen = chain(store, 1), threading.Event(), []
    put_pages(store, keys)
    slots = store.hbm.allocate(1)
    assert slots is not None
    old = content_of(chain(store, 1, 7)[0])
    write_slot(store, slots[0], old)

    def read_slowly() -> None:
        assert may_end.wait(PATIENCE_S)
        assert_holds(store, slots, chain(store, 1, 7))
        seen.append(True)

    load = store.get(keys, into=slots, after=engine.submit(read_slowly))
    store._mover.fill_stream.synchronize()
    assert not load.is_done
    may_end.set()
    assert load.wait(PATIENCE_S) == 1
    assert seen == [True]
    assert_holds(store, slots, keys)
    engine.close()


def test_released_slots_are_not_handed_out_before_their_event(open_store: Rig) -> None:
    store, reader = open_store(hbm=2), Event()
    slots = store.hbm.allocate(2)
    assert slots is not None
    store.hbm.release(slots, after=reader)
    assert store.hbm.allocate(1) is None
    with pytest.raises(ValueError, match="was not allocated"):
        store.hbm.release(slots)
    reader.fire()
    settle(store)
    assert store.hbm.allocate(2) is not None


# -- several getters -------------------------------------------------------------------------------


def test_two_getters_of_one_arriving_page_share_one_load(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 3)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    loads = [store.get(keys) for _ in range(3)]
    slots = store.hbm.allocate(3)
    own = store.get(keys, into=slots)
    store.held.read_gate.set()
    assert [load.wait(PATIENCE_S) for load in loads] == [3, 3, 3]
    assert own.wait(PATIENCE_S) == 3
    assert store.counting.counts["pages_read"] == 3
    assert loads[0].slots == loads[1].slots == loads[2].slots
    assert_holds(store, own.slots, keys)
    for load in loads:
        load.release()
    settle(store)
    assert index_problems(store, idle=True) == []


def test_lease_given_back_twice_counts_once(open_store: Rig) -> None:
    store = open_store(hbm=1)
    keys = chain(store, 1)
    put_pages(store, keys)
    first, second = store.get(keys), store.get(keys)
    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (1, 1)
    first.release()
    first.release()
    assert store.hbm.allocate(1) is None
    second.release()
    assert store.hbm.allocate(1) is not None


def test_prefetch_brings_pages_to_host(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 4)
    put_on_disk_alone(store, keys)
    assert store.prefetch(keys).wait(PATIENCE_S) == 4
    assert store.match(keys).host_pages == 4
    assert get_pages(store, keys) == ("host",) * 4


class _SeenSet(set[Any]):
    """A set that says when somebody has looked through it."""

    def __init__(self, items: Any, seen: threading.Event) -> None:
        super().__init__(items)
        self.seen = seen

    def __iter__(self) -> Iterator[Any]:
        self.seen.set()
        return super().__iter__()


def test_check_waits_for_no_transfer_that_began_after_it(open_store: Rig) -> None:
    """A busy store always has one in flight: a check that waits for a quiet moment never ends."""
    store = open_store()
    keys, first, second, seen = chain(store, 2), Event(), Event(), threading.Event()
    store.put(keys[:1], fill_slots(store, keys[:1]), after=first)
    store._mover.in_flight = _SeenSet(store._mover.in_flight, seen)
    seen.clear()
    reports: list[CheckReport] = []
    checking = threading.Thread(target=lambda: reports.append(store.check()))
    checking.start()
    assert seen.wait(PATIENCE_S)
    later = store.put(keys[1:], fill_slots(store, keys[1:]), after=second)
    first.fire()
    checking.join(PATIENCE_S)
    assert not checking.is_alive()
    assert reports[0].is_clean
    assert not later.is_done
    second.fire()
    assert later.wait(PATIENCE_S) == 1


# -- what is refused -------------------------------------------------------------------------------


def test_foreign_directories_and_layouts_are_refused(open_store: Rig, tmp_path: Path) -> None:
    """One clear error, nothing touched: pages of another layout are junk (row 12)."""
    store = open_store()
    put_pages(store, chain(store, 2))
    with pytest.raises(ConfigError, match="in use"):
        open_store()
    store.close()
    with pytest.raises(LayoutMismatchError):
        open_store(layout=KVLayout.uniform(PAGE_BYTES, 8))
    other = Rig(tmp_path / "other")
    foreign = tmp_path / "other" / "store"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError):
        other()
    assert (foreign / "thesis.tex").read_text() == "mine"
    assert [path.name for path in foreign.iterdir()] == ["thesis.tex"]
    assert open_store().match(chain(store, 2)).pages == 2


def test_closed_store_refuses_every_call(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 1)
    slots = fill_slots(store, keys)
    store.close()
    store.close()
    for call in (
        lambda: store.get(keys),
        lambda: store.put(keys, slots),
        lambda: store.prefetch(keys),
        lambda: store.match(keys),
        lambda: store.hbm.allocate(1),
        store.flush,
        store.check,
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_keys_named_twice_are_refused(open_store: Rig) -> None:
    """Slots would be lost: two pages of one request would claim one place."""
    store = open_store()
    key = chain(store, 1)[0]
    twice = KeyChain([key, key])
    slots = store.hbm.allocate(2)
    assert slots is not None
    with pytest.raises(ValueError, match="twice"):
        store.put(twice, slots)
    store.put(twice[:1], slots[:1]).wait(PATIENCE_S)
    with pytest.raises(ValueError, match="twice"):
        store.get(twice)
    with pytest.raises(ValueError, match="twice"):
        store.prefetch(twice)
    store.hbm.release(slots[1:])
    assert index_problems(store, idle=True) == []


def test_allocating_less_than_nothing_is_refused(open_store: Rig) -> None:
    store = open_store()
    assert store.hbm.allocate(0) == []
    with pytest.raises(ValueError, match="-1"):
        store.hbm.allocate(-1)


def test_pages_that_came_too_late_are_counted_as_in_flight(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 3)
    put_on_disk_alone(store, keys)
    before = store.stats().missed_pages
    with held_stream(store._mover.fill_stream):
        load = store.get(keys, deadline_s=0.0)
        load.wait()
    load.release()
    settle(store)
    stats = store.stats()
    assert stats.missed_pages - before == 3
    assert stats.why_miss["in_flight"] == 3


def test_hint_keeps_a_prompt_that_would_have_gone_first(open_store: Rig) -> None:
    store = open_store(hbm=4, host=6)
    kept, others = chain(store, 2, 1), [chain(store, 2, seed) for seed in (2, 3, 4)]
    put_pages(store, kept)
    for keys in others[:2]:
        put_pages(store, keys)
    assert store.hint(kept, 100) == 2
    put_pages(store, others[2])
    assert store.match(kept).disk_pages == 0
    assert store.match(others[0]).disk_pages == 2


def test_hint_outside_its_range_is_refused(open_store: Rig) -> None:
    store = open_store()
    with pytest.raises(ValueError, match="priority=101"):
        store.hint(chain(store, 1), 101)
