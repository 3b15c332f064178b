"""A signal at every step of a verb: nothing is half done or lost, and the store goes on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
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
from tiered_kv.disk_store import DiskStore
from tiered_kv.interrupts import BooksLock, held_back
from tiered_kv.keys import KEY_BYTES, PageKey
from tiered_kv.plan import HBM

PAGES = 3
Act = Callable[[], Any]


def interrupted(act: Act, step: int, number: signal.Signals = signal.SIGINT) -> bool:
    """Do it, with a signal when this package has gone so many steps; whether it got as far."""
    left = step

    def count(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if "tiered_kv" not in frame.f_code.co_filename:
            return None
        left -= 1
        if left == 0:
            sys.settrace(None)
            signal.raise_signal(number)
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    except (KeyboardInterrupt, SystemExit):
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


def at_every_step(
    store: TieredStore, act: Act, tidy: Act, number: signal.Signals = signal.SIGINT
) -> None:
    """Interrupt it ever later, until it ends before that."""
    step = 1
    while interrupted(act, step, number):
        tidy()
        assert_in_order(store)
        step += 1 + step // 12
    tidy()
    assert step > 10, "it was interrupted so often"
    assert_in_order(store)


def released(store: TieredStore) -> None:
    store.hbm.release(list(store.hbm._owned))


@pytest.fixture(params=["SIGINT", "SIGTERM"])
def stopping(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal whose handler raises SystemExit, as servers have it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit

    number = signal.Signals[request.param]
    before = signal.signal(number, stop)
    yield number
    signal.signal(number, before)


@pytest.mark.parametrize("verb", ["get", "allocate", "put", "match"])
def test_whatever_a_handler_raises(store: TieredStore, stopping: signal.Signals, verb: str) -> None:
    keys = [put(store, prompt) for prompt in range(6)]
    turns = iter(range(10_000))

    def act() -> Any:
        turn = next(turns)
        if verb == "put":
            fresh = store.keys(range(4 * PAGES), salt=str(turn))
            return store.put(fresh, store.hbm.allocate(PAGES) or ())
        return (
            store.hbm.allocate(PAGES)
            if verb == "allocate"
            else getattr(store, verb)(keys[turn % 6])
        )

    loads: list[Any] = []

    def kept() -> None:
        loads.append(act())

    def tidy() -> None:
        for load in loads:
            if verb == "get":
                load.release()
        loads.clear()
        released(store)

    at_every_step(store, kept, tidy, stopping)


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


@pytest.mark.parametrize("verb", ["put", "get", "remove", "close"])
def test_disk_store(tmp_path: Path, verb: str) -> None:
    keys = [PageKey(bytes([number]) * KEY_BYTES) for number in range(8)]
    pages = [np.full(PAGE_BYTES, number, np.uint8) for number in range(8)]
    step, is_on = 1, True
    while is_on:
        store = DiskStore.open(tmp_path / str(step), 4 << 20, PAGE_BYTES, "layout")
        assert all(store.put(keys[:4], pages[:4]))
        verbs: dict[str, Act] = {
            "put": partial(store.put, keys[4:], pages[4:]),
            "get": partial(store.get, keys[:4], [np.empty_like(page) for page in pages[:4]]),
            "remove": partial(store.remove, keys[:4]),
            "close": store.close,
        }
        is_on = interrupted(verbs[verb], step)
        assert store._under_way == 0
        if verb != "close":
            assert all(store.put(keys, pages))
        store.close()
        DiskStore.open(tmp_path / str(step), 4 << 20, PAGE_BYTES, "layout").close()
        step += 1 + step // 6
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


def test_a_handler_that_is_installed_meanwhile_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None:
        """Does nothing."""

    before = signal.getsignal(signal.SIGINT)
    try:
        with BooksLock():
            signal.signal(signal.SIGINT, other)
        assert signal.getsignal(signal.SIGINT) is other
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_asked_for_meanwhile_and_put_back_later_is_the_one_before() -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        with BooksLock():
            asked = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, asked)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), BooksLock():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)


def test_every_signal_that_came_is_dealt_with(stopping: signal.Signals) -> None:
    seen: list[int] = []

    def other(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    def act() -> None:
        with BooksLock():
            signal.raise_signal(stopping)
            signal.raise_signal(second)

    second = signal.SIGTERM if stopping == signal.SIGINT else signal.SIGINT
    before = signal.signal(second, other)
    try:
        with pytest.raises((SystemExit, KeyboardInterrupt)) as told:
            act()
        assert seen == [second]
        raised = {type(told.value), type(told.value.__context__)}
        assert raised == {SystemExit, KeyboardInterrupt}
    finally:
        signal.signal(second, before)


def test_a_signal_that_breaks_off_waiting_for_the_lock_leaves_nothing_held_back() -> None:
    class Broken(BooksLock):  # type: ignore[misc]  # see there
        def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
            raise SystemExit

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit), Broken():
        pass
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_child_of_another_thread_than_the_one_that_holds_it_back_can_be_interrupted() -> None:
    ended: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(1)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with BooksLock():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert ended == [7]
