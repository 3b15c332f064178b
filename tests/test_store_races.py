"""Several users of one page or one slot at once: who waits for whom, and who may not wait."""

from __future__ import annotations

import threading
from typing import Any

from store_rig import (
    PATIENCE_S,
    Rig,
    assert_holds,
    chain,
    content_of,
    fill_slots,
    flush_hbm,
    flush_host,
    get_pages,
    held_stream,
    index_problems,
    put_on_disk_alone,
    put_pages,
    settle,
    write_slot,
)

from tiered_kv.streams import Event

# -- slots change hands only when nobody writes or reads them any more -----------------------------


def test_slots_of_pages_stored_already_wait_for_their_writer(open_store: Rig) -> None:
    """Two requests compute one prompt; the second put finds its pages stored and its slots spare.

    Its kernel is still writing into them: handed out at once, they would be another page's (row 2).
    """
    store = open_store(hbm=6)
    keys = chain(store, 2)
    put_pages(store, keys)
    slots = store.hbm.allocate(2)
    assert slots is not None
    writer = Event()
    second = store.put(keys, slots, after=writer)
    others = store.hbm.allocate(4)
    assert others is not None
    assert not set(others) & set(slots)
    assert store.hbm.allocate(1) is None
    writer.fire()
    assert second.wait(PATIENCE_S) == 2
    assert store.hbm.allocate(2) is not None


def test_slots_of_pages_without_a_parent_wait_for_their_writer(open_store: Rig) -> None:
    """As above, for pages that hang from nothing that is stored (row 2)."""
    store = open_store(hbm=4)
    slots = store.hbm.allocate(2)
    assert slots is not None
    writer = Event()
    put = store.put(chain(store, 3)[1:], slots, after=writer)
    assert store.hbm.allocate(3) is None
    writer.fire()
    assert put.wait(PATIENCE_S) == 0
    assert store.hbm.allocate(4) is not None


def test_demotion_that_failed_and_is_tried_again_keeps_its_bytes(open_store: Rig) -> None:
    """A full disk, then room again, while the copy that was promised the slot has not begun yet
    (row 38).

    The page goes back into its slot and is demoted from it a second time. The first copy must not
    write into that slot meanwhile: the disk would hold its bytes under the other page's key.
    """
    store = open_store(host=3)
    x, y, z = chain(store, 1, 1), chain(store, 1, 2), chain(store, 1, 3)
    for keys in (x, chain(store, 1, 4), chain(store, 1, 5)):
        put_pages(store, keys)
    store.faulty.fail_write = lambda slots: True
    with held_stream(store._mover.store_stream):
        first = store.put(y, fill_slots(store, y))
        store._mover.write_stream.synchronize()
        store.faulty.fail_write = lambda slots: False
        store.held.write_gate.clear()
        second = store.put(z, fill_slots(store, z))
    store._mover.store_stream.synchronize()
    store.held.write_gate.set()
    assert first.wait(PATIENCE_S) == 0
    assert second.wait(PATIENCE_S) == 1
    flush_hbm(store)
    for keys in (x, z):
        assert get_pages(store, keys) != ()
    assert index_problems(store, idle=True) == []


def test_load_that_joined_a_failed_one_leaves_the_next_owner_alone(open_store: Rig) -> None:
    """A getter joins a load that fails; before it hears of that, the page is put anew in the same
    slot.
    """
    store = open_store(hbm=2)
    keys = chain(store, 1)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    store.faulty.fail_read = lambda slot: True
    fill_stream, writer = store._mover.fill_stream, Event()
    gate, begun = Event(), threading.Event()

    def hold() -> None:
        begun.set()
        gate.wait(PATIENCE_S)

    with held_stream(fill_stream) as let_go:
        first, joined = store.get(keys), store.get(keys)
        store.held.read_gate.set()
        store._mover.load_stream.synchronize()  # the first fill is queued behind the block
        done = fill_stream.submit(hold)
        let_go.fire()
        assert begun.wait(PATIENCE_S)  # the first has failed; the joined one is next
        slots = store.hbm.allocate(1)
        assert slots is not None
        put = store.put(keys, slots, after=writer)
        gate.fire()
        done.wait(PATIENCE_S)
    fill_stream.synchronize()
    assert joined.wait(PATIENCE_S) == 0
    assert first.wait(PATIENCE_S) == 0
    assert store.match(keys).hbm_pages == 1
    others = store.hbm.allocate(1)
    assert others is not None
    assert others != slots
    write_slot(store, slots[0], content_of(keys[0]))
    writer.fire()
    assert put.wait(PATIENCE_S) == 1
    first.release()
    joined.release()
    assert get_pages(store, keys) == ("hbm",)


def test_slots_of_the_caller_are_free_only_when_no_late_load_writes_them(open_store: Rig) -> None:
    """A get into the caller's slots comes too late; they are released, and another page is put
    there.
    """
    store = open_store(hbm=3)
    keys, other = chain(store, 1, 1), chain(store, 1, 2)
    put_on_disk_alone(store, keys)
    slots = store.hbm.allocate(1)
    rest = store.hbm.allocate(2)
    assert slots is not None
    assert rest is not None
    tier, begun, gate = store._hbm_tier, threading.Event(), threading.Event()
    copy = tier.write_layers

    def late_copy(*args: Any) -> None:
        begun.set()
        assert gate.wait(PATIENCE_S)
        copy(*args)

    tier.write_layers = late_copy  # type: ignore[method-assign, assignment]
    load = store.get(keys, into=slots)
    assert begun.wait(PATIENCE_S)
    assert load.wait(0.0) == 0
    store.hbm.release(slots)
    assert store.hbm.allocate(1) is None
    tier.write_layers = copy  # type: ignore[method-assign]
    gate.set()
    assert load.settled.wait(PATIENCE_S)
    store._mover.event_stream.synchronize()
    assert put_pages(store, other) == 1
    assert get_pages(store, other) == ("hbm",)


def test_put_of_slots_that_a_late_load_still_writes_waits_for_it(open_store: Rig) -> None:
    """The engine recomputes a page that came too late, in the slot it was to come to."""
    store = open_store(hbm=3)
    keys = chain(store, 1)
    put_on_disk_alone(store, keys)
    slots = fill_slots(store, keys)
    with held_stream(store._mover.fill_stream):
        load = store.get(keys, into=slots)
        put = store.put(keys, slots)
        store._mover.store_stream.synchronize()
        assert not put.is_done
    assert load.wait(PATIENCE_S) == 1
    assert put.wait(PATIENCE_S) == 1


# -- one page, several transfers -------------------------------------------------------------------


def test_put_of_a_page_that_another_put_brings_waits_for_it(open_store: Rig) -> None:
    """The other put fails to store it: the second must not say that it is stored (row 6)."""
    store = open_store(host=1)
    put_pages(store, chain(store, 1, 1))
    store.faulty.fail_write = lambda slots: True
    keys = chain(store, 1, 2)
    with held_stream(store._mover.write_stream):
        first = store.put(keys, fill_slots(store, keys))
        second = store.put(keys, fill_slots(store, keys))
        assert not second.is_done
    assert first.wait(PATIENCE_S) == 0
    assert second.wait(PATIENCE_S) == 0


def test_prefetch_counts_only_what_reached_host(open_store: Rig) -> None:
    """No room on host: the page stays on disk, and nobody is told otherwise."""
    store = open_store(hbm=4, host=2)
    keys, other = chain(store, 3, 1), chain(store, 2, 2)
    put_on_disk_alone(store, keys[:2])
    put_pages(store, other)
    with held_stream(store._mover.fill_stream):
        flush_hbm(store)
        lease = store.get(other)  # keeps both host pages
        assert store.prefetch(keys).wait(PATIENCE_S) == 0
    lease.release()


def test_prefetch_of_a_page_that_is_being_loaded_waits_for_it(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 1)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    first, second = store.prefetch(keys), store.prefetch(keys)
    assert not second.is_done
    store.held.read_gate.set()
    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (1, 1)


def test_getter_that_gives_up_does_not_take_the_page_from_another(open_store: Rig) -> None:
    """Two requests want one page; the first runs out of time. The second has all the time there
    is.
    """
    store = open_store()
    keys = chain(store, 3)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    with store.get(keys, deadline_s=0.0) as hasty, store.get(keys) as patient:
        assert hasty.wait() == 0
        store.held.read_gate.set()
        assert patient.wait(PATIENCE_S) == 3
        assert_holds(store, patient.slots, keys)


def test_corrupt_page_is_written_again_while_its_old_copy_is_still_held(open_store: Rig) -> None:
    """A getter finds the copy corrupt and has not ended; the engine puts the page again.

    The put waits for nothing of the getter's, and the getter may still take the page from it.
    """
    store = open_store(write_policy="through")
    keys = chain(store, 2)
    put_on_disk_alone(store, keys)
    store.faulty.flip = lambda slot: slot == 0
    with held_stream(store._mover.fill_stream):
        load = store.get(keys)
        store._mover.load_stream.synchronize()
        store.faulty.flip = lambda slot: False
        put = store.put(keys[:1], fill_slots(store, keys[:1]))
        assert put.wait(PATIENCE_S) == 1
        assert not load.is_done
    assert_holds(store, load.slots, keys[: load.wait(PATIENCE_S)])
    load.release()
    settle(store)
    store.flush()
    assert index_problems(store, idle=True) == []
    assert store.stats().resident_pages["disk"] == 2
    flush_hbm(store)
    assert len(get_pages(store, keys)) == 2


def test_check_and_get_that_find_the_same_page_corrupt_drop_it_once(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 2)
    put_on_disk_alone(store, keys)
    store.faulty.flip = lambda slot: slot == 0
    gate = store.held.read_gate
    gate.clear()
    store.held.is_reading.clear()
    checking = threading.Thread(target=store.check, args=(True,))
    checking.start()
    assert store.held.is_reading.wait(PATIENCE_S)
    store.held.read_gate = (
        threading.Event()
    )  # the getter overtakes the check, which waits at `gate`
    store.held.read_gate.set()
    with store.get(keys) as load:
        assert load.wait(PATIENCE_S) == 0
    settle(store)
    gate.set()
    checking.join(PATIENCE_S)
    assert index_problems(store, idle=True) == []
    assert store.stats().resident_pages["disk"] == 1


def test_write_waits_for_the_write_of_its_parent_by_another_put(open_store: Rig) -> None:
    """A prompt is put in two pieces; the first piece's writer is slower. Both reach disk (row
    41).
    """
    store = open_store(write_policy="through")
    keys, writer = chain(store, 2), Event()
    first = store.put(keys[:1], fill_slots(store, keys[:1]), after=writer)
    second = store.put(keys[1:], fill_slots(store, keys[1:]))
    store._mover.store_stream.synchronize()
    store._mover.write_stream.synchronize()
    writer.fire()
    assert (first.wait(PATIENCE_S), second.wait(PATIENCE_S)) == (1, 1)
    assert store.stats().resident_pages["disk"] == 2


def test_a_page_that_cannot_be_made_durable_does_not_hold_up_the_others(open_store: Rig) -> None:
    """A parent's disk copy goes bad while it stands in HBM alone: its child has no way to disk.

    Every other page still goes there, at flush, at close and when host gives it up.
    """
    store = open_store(host=3)
    parent, child = chain(store, 2)[:1], chain(store, 2)[1:]
    put_on_disk_alone(store, parent)
    load = store.get(parent)
    assert load.wait(PATIENCE_S) == 1
    flush_host(store)
    put_pages(store, child)
    store.faulty.flip = lambda slot: True
    assert store.check(fix=True).fixed == 1
    store.faulty.flip = lambda slot: False
    others = [chain(store, 1, first) for first in range(2, 5)]
    put_pages(store, others[0])
    assert store.flush() == 1
    assert store.match(others[0]).state.value == "hit"
    for other in others[1:]:
        put_pages(store, other)
    flush_hbm(store)
    assert all(store.match(other).pages == 1 for other in others)
    load.release()


def test_flush_ends_where_disk_is_smaller_than_host(open_store: Rig) -> None:
    """Written one after the other, pages took each other's place on disk and flush never
    returned.
    """
    store = open_store(hbm=16, host=14, disk="700KiB")
    for first in range(1, 13):
        put_pages(store, chain(store, 1, first))
    capacity = store._disk.capacity_pages if store._disk else 0
    assert capacity < 12
    assert store.flush() == capacity
    assert store.flush() == 0
