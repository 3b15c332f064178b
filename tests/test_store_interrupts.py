"""Ctrl-C at every step of a verb: nothing is half done, no slot is lost, and the store goes on."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from store_rig import (
    LAYOUT,
    PAGE_BYTES,
    assert_holds,
    content_of,
    index_problems,
    settle,
    write_slot,
)

from tiered_kv import StoreConfig, TieredStore
from tiered_kv.interrupts import BooksLock, held_back
from tiered_kv.plan import HBM

PAGES = 3
Act = Callable[[], Any]


def interrupted(act: Act, step: int) -> bool:
    """Do it, with Ctrl-C when this package has gone so many steps; whether it got as far."""
    left = step

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if "tiered_kv" not in frame.f_code.co_filename:
            return None
        left -= 1
        if left == 0:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    sizes: dict[str, Any] = {"hbm": 12 * PAGE_BYTES, "host": 7 * PAGE_BYTES, "disk_size": 1 << 20}
    store = TieredStore(LAYOUT, StoreConfig.parse(disk=tmp_path / "s", **sizes))
    yield store
    store.close()


def put(store: TieredStore, prompt: int) -> Any:
    """Pages of a prompt, in the store and at rest."""
    keys = store.keys(range(1000 * prompt, 1000 * prompt + 4 * PAGES))
    slots = store.hbm.allocate(PAGES)
    assert slots is not None
    for slot, key in zip(slots, keys, strict=True):
        write_slot(store, slot, content_of(key))
    store.put(keys, slots).wait()
    settle(store)
    return keys


def assert_in_order(store: TieredStore, *, owned: int = 0) -> None:
    """Nothing moves, nothing is pinned, and every slot is a page's, a caller's or free."""
    settle(store)
    assert index_problems(store, idle=True) == []
    room = store._planner.room
    for tier in store._planner.index.tiers:
        taken = room.capacity[tier.name] - room.free_pages[tier.name]
        assert taken == tier.resident + (owned if tier.name == HBM else 0)


def at_every_step(store: TieredStore, act: Act, tidy: Act) -> None:
    """Interrupt it ever later, until it ends before that."""
    step = 1
    while interrupted(act, step):
        tidy()
        assert_in_order(store)
        step += 1 + step // 12
    tidy()
    assert step > 10, "it was interrupted so often"
    assert_in_order(store)


def released(store: TieredStore) -> None:
    store.hbm.release(list(store.hbm._owned))


def test_put(store: TieredStore) -> None:
    prompts = iter(range(1000))

    def act() -> None:
        keys = store.keys(range(4 * PAGES), salt=str(next(prompts)))
        slots = store.hbm.allocate(PAGES)
        assert slots is not None
        store.put(keys, slots)

    at_every_step(store, act, lambda: released(store))


def test_get_and_release(store: TieredStore) -> None:
    keys = [put(store, prompt) for prompt in range(6)]  # most of them on disk alone
    turns = iter(range(10_000))
    loads: list[Any] = []

    def act() -> None:
        loads.append(store.get(keys[next(turns) % 6]))

    def tidy() -> None:
        for load in loads:
            load.release()
        loads.clear()

    at_every_step(store, act, tidy)
    with store.get(keys[0]) as load:
        assert load.wait() == PAGES
        assert_holds(store, load.slots, keys[0])
    at_every_step(store, lambda: store.get(keys[next(turns) % 6]).release(), lambda: None)


def test_get_into_slots_and_give_them_back(store: TieredStore) -> None:
    keys = [put(store, prompt) for prompt in range(6)]
    turns = iter(range(10_000))

    def act() -> None:
        slots = store.hbm.allocate(PAGES)
        assert slots is not None
        store.get(keys[next(turns) % 6], into=slots)
        store.hbm.release(slots)

    at_every_step(store, act, lambda: released(store))


@pytest.mark.parametrize("verb", ["prefetch", "match", "flush", "check"])
def test_other_verbs(store: TieredStore, verb: str) -> None:
    keys = [put(store, prompt) for prompt in range(6)]
    turns = iter(range(10_000))

    def act() -> None:
        turn = next(turns)
        if verb in ("prefetch", "match"):
            getattr(store, verb)(keys[turn % 6])
        else:
            getattr(store, verb)()

    at_every_step(store, act, lambda: None)


def test_close_gives_everything_back(tmp_path: Path) -> None:
    config = StoreConfig.parse(
        hbm=12 * PAGE_BYTES, host=7 * PAGE_BYTES, disk=tmp_path / "s", disk_size=1 << 20
    )
    step, is_on = 1, True
    while is_on:
        store = TieredStore(LAYOUT, config)
        put(store, step)
        is_on = interrupted(store.close, step)
        store.close()  # or the next opening finds it in use
        step += 1 + step // 4
    assert step > 10


def test_an_interrupt_is_raised_when_the_outermost_lock_is_left() -> None:
    lock, done = BooksLock(), []

    def act() -> None:
        with lock:
            with lock, held_back:
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("after")

    with pytest.raises(KeyboardInterrupt):
        act()
    assert done == ["inner", "outer"]
    with lock:
        pass  # and once alone
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # at once again


def test_other_threads_hold_nothing_back() -> None:
    lock, handlers = BooksLock(), []

    def work() -> None:
        with lock:
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


def test_where_the_signal_ends_the_process_it_still_does() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with BooksLock():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
