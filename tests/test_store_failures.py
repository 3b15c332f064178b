"""What fails, comes late or ends early: a miss, an error where it is waited for, never junk."""

from __future__ import annotations

import threading
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
    flush_host,
    get_pages,
    held_stream,
    index_problems,
    put_on_disk_alone,
    put_pages,
    settle,
    write_slot,
)

from tiered_kv import (
    StoreClosedError,
    TieredKVError,
)

# -- what fails ------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [8, 1], ids=["through-host", "through-staging"])
def test_failed_load_is_a_miss_for_the_page_and_all_after_it(open_store: Rig, host: int) -> None:
    """A page cannot be read: served as a hit, the request would get junk (row 5)."""
    store = open_store(host=host)
    keys = chain(store, 5)
    for at in range(5):
        put_pages(store, keys[at : at + 1])
    store.flush()
    flush_hbm(store)
    flush_host(store)
    before = store.stats()
    bad = store._planner.index.by_name["disk"].slot[store._planner.index.find(keys[2])]
    store.faulty.fail_read = lambda slot: slot == bad
    with held_stream(store._mover.fill_stream), store.get(keys) as load:
        assert store.stats().hit_pages == before.hit_pages  # nothing counts before it has arrived
    assert load.wait(PATIENCE_S) == 2
    assert load.tiers == ("disk", "disk")
    settle(store)
    stats = store.stats()
    assert stats.hit_pages["disk"] == 2
    assert stats.why_miss == {"failed": 1, "no_parent": 2}
    assert store.match(keys).pages == 2


def test_failed_store_is_never_visible(open_store: Rig) -> None:
    """The copy to host breaks: what stands in the slot is not the page (row 6)."""
    store = open_store()
    keys = chain(store, 2)
    read = store._hbm_tier.read

    def broken(slots: Any, into: Any) -> Any:
        raise RuntimeError("the copy engine is gone")

    store._hbm_tier.read = broken  # type: ignore[method-assign]
    put = store.put(keys, fill_slots(store, keys))
    with pytest.raises(TieredKVError, match="the copy engine is gone"):
        put.wait(PATIENCE_S)
    store._hbm_tier.read = read  # type: ignore[method-assign]
    settle(store)
    assert store.match(keys).host_pages == 0
    assert len(get_pages(store, keys)) == 2  # still in HBM
    flush_hbm(store)
    assert store.match(keys).pages == 0
    assert put_pages(store, keys) == 2
    assert index_problems(store, idle=True) == []


def test_load_that_breaks_raises_and_leaves_nothing_behind(open_store: Rig) -> None:
    """An asynchronous copy error surfaces where the caller waits, and is not swallowed (row 15)."""
    store = open_store()
    keys = chain(store, 2)
    put_pages(store, keys)
    flush_hbm(store)
    copy = store._hbm_tier.write_layers

    def broken(*args: Any) -> None:
        raise RuntimeError("the copy engine is gone")

    store._hbm_tier.write_layers = broken  # type: ignore[method-assign,assignment]
    with store.get(keys) as load, pytest.raises(TieredKVError, match="copy engine"):
        load.wait(PATIENCE_S)
    store._hbm_tier.write_layers = copy  # type: ignore[method-assign]
    assert store.match(keys).hbm_pages == 0
    assert get_pages(store, keys) == ("host", "host")
    assert index_problems(store, idle=True) == []


def test_device_that_fails_after_a_copy_was_queued_fails_the_copy(open_store: Rig) -> None:
    """A copy error that shows only when the device is through must not be a hit (row 15)."""
    store = open_store()
    keys = chain(store, 2)
    put_pages(store, keys)
    flush_hbm(store)
    stream = store._mover.fill_stream

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    stream.drain = broken  # type: ignore[method-assign]
    with store.get(keys) as load, pytest.raises(TieredKVError, match="illegal memory"):
        load.wait(PATIENCE_S)
    del stream.drain
    settle(store)
    assert store.match(keys).hbm_pages == 0
    assert get_pages(store, keys) == ("host", "host")  # and the stream goes on


def test_corrupt_page_is_a_miss_and_heals_when_it_is_put_again(
    open_store: Rig, tmp_path: Path
) -> None:
    """A bit flips in the middle of a segment file. The pages after it hit again once it is back."""
    store = open_store()
    keys = chain(store, 4)
    put_on_disk_alone(store, keys)
    _flip_on_disk(tmp_path / "store", content_of(keys[1]))
    assert get_pages(store, keys) == ("disk",)
    stats = store.stats()
    assert (stats.checksums_failed, stats.why_miss["corrupt"]) == (1, 1)
    assert store.match(keys).pages == 1
    assert put_pages(store, keys[1:2]) == 1
    flush_hbm(store)
    assert len(get_pages(store, keys)) == 4
    assert index_problems(store, idle=True) == []


def _flip_on_disk(folder: Path, content: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            at = path.read_bytes().find(content.tobytes())
            if at >= 0:
                with path.open("r+b") as file:
                    file.seek(at + content.nbytes // 2)
                    file.write(bytes([content[content.nbytes // 2] ^ 1]))
                return
    raise AssertionError("the page is in no file")


def test_demotion_that_fails_keeps_the_page_on_host(open_store: Rig) -> None:
    """ENOSPC under the disk tier: the page is still on host, the new one is not stored."""
    store = open_store(host=1)
    old, new = chain(store, 1, 1), chain(store, 1, 2)
    put_pages(store, old)
    flush_hbm(store)
    store.faulty.fail_write = lambda slots: True
    assert put_pages(store, new) == 0
    assert store.match(old).host_pages == 1
    assert get_pages(store, old) == ("host",)
    store.faulty.fail_write = lambda slots: False
    assert put_pages(store, new) == 1
    assert store.match(old).disk_pages + store.match(old).hbm_pages == 1
    settle(store)
    assert index_problems(store, idle=True) == []


def test_page_leaves_host_only_when_its_disk_copy_has_committed(open_store: Rig) -> None:
    """While the write is under way, the new page is not in the slot, and a get of the old waits."""
    store = open_store(host=1)
    old, new = chain(store, 1, 1), chain(store, 1, 2)
    put_pages(store, old)
    flush_hbm(store)
    slot = store._planner.index.by_name["host"].slot[store._planner.index.find(old[0])]
    store.held.write_gate.clear()
    put = store.put(new, fill_slots(store, new))
    load = store.get(old)
    store._mover.store_stream.synchronize()
    assert np.array_equal(store._host.view(slot), content_of(old[0]))
    assert not put.is_done
    assert not load.is_done
    store.held.write_gate.set()
    assert put.wait(PATIENCE_S) == 1
    assert load.wait(PATIENCE_S) == 1
    assert_holds(store, load.slots, old)
    load.release()


def test_put_under_pressure_is_not_stored_and_never_raises(open_store: Rig) -> None:
    """Every host page is being demoted: running out of blocks killed other engines (row 34)."""
    store = open_store(hbm=12, host=2)
    put_pages(store, chain(store, 2, 1))
    store.held.write_gate.clear()
    first = store.put(chain(store, 2, 2), fill_slots(store, chain(store, 2, 2)))
    second = store.put(chain(store, 3, 3), fill_slots(store, chain(store, 3, 3)))
    assert second.wait(PATIENCE_S) == 0
    store.held.write_gate.set()
    assert first.wait(PATIENCE_S) == 2
    stats = store.stats()
    assert (stats.put_pages, stats.not_stored_pages) == (7, 3)
    assert store.match(chain(store, 3, 3)).hbm_pages == 3
    assert index_problems(store, idle=True) == []


def test_slow_load_is_a_miss_and_its_late_bytes_touch_nobody(open_store: Rig) -> None:
    """The deadline passes; the slots are given back and filled by others; then the bytes come."""
    store = open_store(hbm=3)
    keys, others = chain(store, 2, 1), chain(store, 3, 2)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    load = store.get(keys, deadline_s=0.0)
    assert load.wait() == 0
    load.release()
    mine = store.hbm.allocate(1)
    assert mine is not None
    assert store.hbm.allocate(1) is None  # the late load's own slots are not to be had yet
    write_slot(store, mine[0], content_of(others[0]))
    store.held.read_gate.set()
    settle(store)
    assert_holds(store, mine, others[:1])
    rest = store.hbm.allocate(2)
    assert rest is not None
    for slot, key in zip(rest, others[1:], strict=True):
        write_slot(store, slot, content_of(key))
    assert store.put(others, mine + rest).wait(PATIENCE_S) == 3
    assert len(get_pages(store, others)) == 3
    assert load.wait() == 0


def test_cancelled_load_settles_without_its_pages(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 2)
    put_on_disk_alone(store, keys)
    with held_stream(store._mover.load_stream):
        load = store.get(keys)
        load.cancel()
    assert load.wait(PATIENCE_S) == 0
    load.release()
    settle(store)
    assert store.counting.counts["read"] == 0
    assert len(get_pages(store, keys)) == 2


# -- the end ---------------------------------------------------------------------------------------


def test_close_writes_what_is_not_on_disk_and_reopening_hits(open_store: Rig) -> None:
    """After a restart the index was lost while the files stayed (row 24)."""
    store = open_store(policy="fifo")
    keys = chain(store, 5)
    put_pages(store, keys)
    store.close()
    again = open_store(hbm=4, host=2)
    assert again.match(keys).disk_pages == 5
    assert get_pages(again, keys) == ("disk",) * 4
    assert again.check().is_clean


def test_close_finishes_what_is_in_flight(open_store: Rig) -> None:
    store = open_store()
    keys, more = chain(store, 3, 1), chain(store, 2, 2)
    put_on_disk_alone(store, keys)
    store.held.read_gate.clear()
    load, ahead = store.get(keys), store.prefetch(keys)
    put = store.put(more, fill_slots(store, more))
    closing = threading.Thread(target=store.close)
    closing.start()
    store.held.read_gate.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert (load.wait(), ahead.wait(), put.wait()) == (3, 3, 2)
    load.release()
    assert open_store().match(more).pages == 2


def test_error_inside_with_closes_the_store(open_store: Rig) -> None:
    """Ctrl-C in the middle of a load: nothing hangs, what was put is kept, the error goes on."""
    store = open_store()
    keys, more = chain(store, 3, 1), chain(store, 2, 2)
    put_on_disk_alone(store, keys)
    loads = []

    def work() -> None:
        with store:
            store.put(more, fill_slots(store, more))
            loads.append(store.get(keys))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert loads[0].settled.is_fired
    with pytest.raises(StoreClosedError):
        store.match(keys)
    again = open_store()
    assert again.match(keys).pages == 3
    assert again.match(more).pages == 2


def test_check_and_usage_tell_what_is_there(open_store: Rig) -> None:
    store = open_store()
    keys = chain(store, 3)
    put_pages(store, keys)
    store.flush()
    assert {tier: used for tier, (used, _) in store.usage().items()} == {
        "hbm": 3 * PAGE_BYTES,
        "host": 3 * PAGE_BYTES,
        "disk": 3 * PAGE_BYTES,
    }
    store.faulty.flip = lambda slot: slot == 1
    report = store.check()
    assert (report.pages, len(report.problems), report.is_clean) == (3, 1, False)
    report = store.check(fix=True)
    assert report.fixed == 1
    assert report.is_clean
    store.faulty.flip = lambda slot: False
    assert store.check().is_clean
    assert store.match(keys).pages == 3  # still on host: it goes to disk again
    assert store.flush() == 1
    assert store.stats().resident_pages["disk"] == 3


def test_stats_of_a_scripted_run(open_store: Rig) -> None:
    """Counters that stay at 0, or count what was never used, hide all other faults (row 43)."""
    store = open_store(hbm=4, host=4)
    keys = chain(store, 4)
    put_pages(store, keys)
    get_pages(store, keys)  # 4 from hbm
    flush_hbm(store)
    get_pages(store, keys[:3])  # 3 from host
    get_pages(store, chain(store, 2, 5))  # 2 never stored
    store.flush()
    flush_hbm(store)
    flush_host(store)
    assert store.prefetch(keys[:1]).wait(PATIENCE_S) == 1
    get_pages(store, keys)  # 1 from host, 3 from disk
    stats = store.stats()
    assert stats.hit_pages == {"hbm": 4, "host": 4, "disk": 3}
    assert stats.why_miss == {"never_stored": 2}
    assert stats.missed_pages == 2
    assert (stats.put_pages, stats.not_stored_pages) == (4, 0)
    assert (stats.checksums_verified, stats.checksums_failed) == (4, 0)
    assert stats.bytes_read == {
        "hbm": 4 * PAGE_BYTES,  # put
        "host": (4 + 3 + 4) * PAGE_BYTES,  # flush, gets
        "disk": 4 * PAGE_BYTES,
    }
    assert stats.bytes_written == {
        "hbm": 7 * PAGE_BYTES,
        "host": (4 + 4) * PAGE_BYTES,
        "disk": 4 * PAGE_BYTES,
    }
    assert stats.resident_pages == {"hbm": 4, "host": 4, "disk": 4}
