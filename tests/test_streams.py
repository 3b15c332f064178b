"""Events and streams: order, and nothing else, on a machine without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from tiered_kv.streams import (
    Ahead,
    Event,
    HalvesStream,
    Stream,
    ThreadStream,
    Work,
    caller_event,
    open_stream,
    when_all,
)

PATIENCE_S = 30.0  # a test that waits so long has found a hang


@pytest.fixture
def stream() -> Iterator[Stream]:
    stream = ThreadStream("under-test")
    yield stream
    stream.close()


def nothing() -> None:
    pass


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(PATIENCE_S)


# -- events ----------------------------------------------------------------------------------------


def test_an_event_has_not_fired_until_it_does() -> None:
    event = Event()
    assert not event.is_fired
    assert not event.wait(0)
    event.fire()
    assert event.is_fired
    assert event.wait(0)


def test_an_event_fires_once_however_often_it_is_fired() -> None:
    event, calls = Event(), []
    event.on_fire(lambda: calls.append("called"))
    event.fire()
    event.fire()
    assert calls == ["called"]


def test_callbacks_come_in_the_order_they_were_left_and_a_late_one_at_once() -> None:
    event, calls = Event(), list[int]()
    for number in range(3):
        event.on_fire(partial(calls.append, number))
    event.fire()
    assert calls == [0, 1, 2]
    event.on_fire(lambda: calls.append(3))
    assert calls == [0, 1, 2, 3]


def test_a_callback_runs_in_the_thread_that_fires() -> None:
    event, where = Event(), list[str]()
    event.on_fire(lambda: where.append(threading.current_thread().name))
    thread = threading.Thread(target=event.fire, name="firing")
    thread.start()
    thread.join()
    assert where == ["firing"]


def test_a_callback_may_leave_another_and_wait_for_the_same_event() -> None:
    """No lock of ours is held while a callback runs."""
    event, calls = Event(), list[str]()

    def first() -> None:
        assert event.wait(0)
        event.on_fire(lambda: calls.append("second"))
        event.fire()
        calls.append("first")

    event.on_fire(first)
    event.fire()
    assert calls == ["second", "first"]


def test_many_threads_may_wait_for_one_event() -> None:
    event, results = Event(), list[bool]()
    threads = [
        threading.Thread(target=lambda: results.append(event.wait(PATIENCE_S))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    event.fire()
    for thread in threads:
        thread.join()
    assert results == [True] * 8


def test_every_callback_is_called_once_when_events_and_callbacks_race() -> None:
    for _ in range(50):
        event, calls = Event(), list[int]()
        firing = threading.Thread(target=event.fire)
        firing.start()
        for number in range(20):
            event.on_fire(partial(calls.append, number))
        firing.join()
        assert sorted(calls) == list(range(20))


# -- when_all --------------------------------------------------------------------------------------


def test_when_all_of_nothing_is_now() -> None:
    calls = list[str]()
    when_all([], lambda: calls.append("now"))
    assert calls == ["now"]


def test_when_all_waits_for_the_last_in_whatever_order_they_fire() -> None:
    events, calls = [Event() for _ in range(3)], list[str]()
    when_all(events, lambda: calls.append("all"))
    for event in (events[2], events[0]):
        event.fire()
        assert calls == []
    events[1].fire()
    assert calls == ["all"]


def test_when_all_does_not_wait_for_what_has_fired() -> None:
    events, calls = [Event(), Event()], list[str]()
    events[0].fire()
    when_all(events, lambda: calls.append("all"))
    assert calls == []
    events[1].fire()
    assert calls == ["all"]


def test_an_event_named_twice_is_waited_for_once() -> None:
    event, calls = Event(), list[str]()
    when_all([event, event], lambda: calls.append("all"))
    event.fire()
    assert calls == ["all"]


def test_when_all_comes_once_when_events_fire_at_the_same_time() -> None:
    for _ in range(30):
        events, calls = [Event() for _ in range(4)], list[str]()
        threads = [threading.Thread(target=event.fire) for event in events]
        for thread in threads[:2]:
            thread.start()
        when_all(events, partial(calls.append, "all"))
        for thread in threads[2:]:
            thread.start()
        for thread in threads:
            thread.join()
        assert calls == ["all"]


# -- streams ---------------------------------------------------------------------------------------


def test_work_is_done_elsewhere_and_in_order(stream: Stream) -> None:
    done, where = list[int](), set[str]()

    def work(number: int) -> None:
        done.append(number)
        where.add(threading.current_thread().name)

    for number in range(20):
        stream.submit(partial(work, number))
    stream.synchronize()
    assert done == list(range(20))
    assert where == {"tiered-kv-under-test"}


def test_submit_returns_before_the_work_is_done(stream: Stream) -> None:
    gate = threading.Event()
    done = stream.submit(lambda: assert_set(gate))
    assert not done.is_fired
    gate.set()
    assert done.wait(PATIENCE_S)


def test_work_waits_for_its_events_and_holds_up_nothing_behind_it(stream: Stream) -> None:
    """Streams whose workers wait for each other hang; here nothing waits in a worker."""
    event, order = Event(), list[str]()
    late = stream.submit(lambda: order.append("late"), [event])
    stream.submit(lambda: order.append("soon")).wait(PATIENCE_S)
    assert order == ["soon"]
    assert not late.is_fired
    event.fire()
    assert late.wait(PATIENCE_S)
    assert order == ["soon", "late"]


def test_work_waits_for_all_of_its_events(stream: Stream) -> None:
    events = [Event(), Event()]
    done = stream.submit(nothing, events)
    events[0].fire()
    stream.synchronize()
    assert not done.is_fired
    events[1].fire()
    assert done.wait(PATIENCE_S)


def test_two_streams_can_wait_for_each_other_in_turn() -> None:
    ours, theirs = ThreadStream("ours"), ThreadStream("theirs")
    order = list[str]()
    first = ours.submit(lambda: order.append("ours"))
    second = theirs.submit(lambda: order.append("theirs"), [first])
    third = ours.submit(lambda: order.append("ours again"), [second])
    assert third.wait(PATIENCE_S)
    assert order == ["ours", "theirs", "ours again"]
    ours.close()
    theirs.close()


def test_two_streams_really_run_at_the_same_time() -> None:
    ours, theirs = ThreadStream("ours"), ThreadStream("theirs")
    here, there = threading.Event(), threading.Event()

    def meet(mine: threading.Event, other: threading.Event) -> None:
        mine.set()
        assert other.wait(PATIENCE_S)

    met = [ours.submit(lambda: meet(here, there)), theirs.submit(lambda: meet(there, here))]
    assert all(event.wait(PATIENCE_S) for event in met)
    ours.close()
    theirs.close()


def test_a_record_fires_when_what_was_queued_before_it_is_done(stream: Stream) -> None:
    gate, done = threading.Event(), list[str]()

    def work() -> None:
        gate.wait(PATIENCE_S)
        done.append("done")

    stream.submit(work)
    mark = stream.record()
    assert not mark.is_fired
    gate.set()
    assert mark.wait(PATIENCE_S)
    assert done == ["done"]


# -- work in halves --------------------------------------------------------------------------------


@pytest.fixture
def halves() -> Iterator[HalvesStream]:
    stream = HalvesStream("under-test")
    yield stream
    stream.close()


class Diary:
    """Work in halves that notes when each half is done."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def halves(self, number: int) -> Callable[[], Work]:
        def begin() -> Work:
            self.events.append(f"begin {number}")
            return lambda: self.events.append(f"end {number}")

        return begin


def test_the_next_halves_begin_before_the_first_has_ended(halves: HalvesStream) -> None:
    diary, gate = Diary(), threading.Event()
    halves.submit(lambda: assert_set(gate))
    done = [halves.submit_halves(diary.halves(number), Ahead(1)) for number in range(4)]
    gate.set()
    assert all(event.wait(PATIENCE_S) for event in done)
    wanted = "begin 0, begin 1, end 0, begin 2, end 1, begin 3, end 2, end 3"
    assert ", ".join(diary.events) == wanted


def test_no_more_bytes_are_begun_ahead_than_the_work_says(halves: HalvesStream) -> None:
    """Loads wait for the room that demotions leave: a small one does not wait for large ones."""
    diary, gate = Diary(), threading.Event()
    halves.submit(lambda: assert_set(gate))
    done = [
        halves.submit_halves(diary.halves(n_bytes), Ahead(8, 10 - n_bytes), n_bytes=n_bytes)
        for n_bytes in (1, 2, 3, 7, 12, 4)
    ]
    gate.set()
    assert all(event.wait(PATIENCE_S) for event in done)
    wanted = "begin 1, begin 2, begin 3, end 1, end 2, begin 7, end 3, end 7, begin 12, end 12"
    assert ", ".join(diary.events) == f"{wanted}, begin 4, end 4"


def test_halves_end_when_nothing_else_is_queued(halves: HalvesStream) -> None:
    diary = Diary()
    assert halves.submit_halves(diary.halves(0), Ahead(8)).wait(PATIENCE_S)
    assert diary.events == ["begin 0", "end 0"]


def test_work_in_one_piece_comes_when_all_that_was_begun_has_ended(halves: HalvesStream) -> None:
    diary, gate = Diary(), threading.Event()
    halves.submit(lambda: assert_set(gate))
    for number in range(2):
        halves.submit_halves(diary.halves(number), Ahead(8))
    seen: list[list[str]] = []
    done = halves.submit(lambda: seen.append(list(diary.events)))
    gate.set()
    assert done.wait(PATIENCE_S)
    assert seen == [["begin 0", "begin 1", "end 0", "end 1"]]


def test_halves_wait_for_their_events(halves: HalvesStream) -> None:
    diary, event = Diary(), Event()
    late = halves.submit_halves(diary.halves(0), Ahead(1), [event])
    assert halves.submit_halves(diary.halves(1), Ahead(1)).wait(PATIENCE_S)
    assert not late.is_fired
    event.fire()
    assert late.wait(PATIENCE_S)
    assert diary.events == ["begin 1", "end 1", "begin 0", "end 0"]


def test_a_half_that_breaks_ends_neither_the_stream_nor_those_who_wait(
    halves: HalvesStream, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> Work:
        raise RuntimeError("the first half")

    def breaks() -> None:
        raise RuntimeError("the second half")

    assert halves.submit_halves(broken, Ahead(1)).wait(PATIENCE_S)
    assert halves.submit_halves(lambda: breaks, Ahead(1)).wait(PATIENCE_S)
    halves.synchronize()
    said = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert said == ["the first half", "the second half"]


def test_close_ends_all_that_was_begun() -> None:
    diary, gate = Diary(), threading.Event()
    halves = HalvesStream("under-test")
    halves.submit(lambda: assert_set(gate))
    for number in range(3):
        halves.submit_halves(diary.halves(number), Ahead(8))
    gate.set()
    halves.close()
    assert diary.events[3:] == ["end 0", "end 1", "end 2"]


def test_close_finishes_what_is_queued() -> None:
    stream, done = ThreadStream("closing"), list[int]()
    for number in range(10):
        stream.submit(partial(done.append, number))
    stream.close()
    assert done == list(range(10))


def test_a_stream_can_be_closed_by_its_own_work() -> None:
    stream = ThreadStream("closing")
    assert stream.submit(stream.close).wait(PATIENCE_S)


def test_a_thread_stream_has_no_device_marks(stream: Stream) -> None:
    marks = list[object]()
    stream.submit(lambda: marks.append(stream.mark())).wait(PATIENCE_S)
    assert marks == [None]


def test_a_cpu_gets_a_thread_stream() -> None:
    stream = open_stream("h2d", torch.device("cpu"))
    assert isinstance(stream, ThreadStream)
    assert stream.name == "h2d"
    stream.close()


# -- what a caller's copy waits for ----------------------------------------------------------------


def test_on_a_cpu_the_callers_work_is_done_when_it_calls() -> None:
    assert caller_event(torch.device("cpu"), None) == ([], None)


def test_an_event_of_ours_is_waited_for_as_it_is() -> None:
    event = Event()
    assert caller_event(torch.device("cpu"), event) == ([event], None)


def test_anything_else_is_taken_for_an_event_of_the_device() -> None:
    device_event = object()
    assert caller_event(torch.device("cpu"), device_event) == ([], device_event)


def test_a_wait_that_timed_out_leaves_nothing_behind_and_may_be_repeated() -> None:
    """A carrier asks again in every step: who has gone must not be kept, nor woken."""
    event = Event()
    for _ in range(5):
        assert not event.wait(0)
        assert not event.wait(-1.0)
        assert not event.wait(0.001)
    assert event._waiters == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(event.wait, PATIENCE_S)
        event.fire()
        assert waiting.result()


def test_callback_that_breaks_takes_nothing_from_the_others() -> None:
    """What waits for an event hangs for ever if a callback before its own has raised."""
    event, ran = Event(), []

    def broken() -> None:
        raise RuntimeError("mine")

    event.on_fire(lambda: ran.append(1))
    event.on_fire(broken)
    event.on_fire(lambda: ran.append(2))
    with pytest.raises(RuntimeError, match="mine"):
        event.fire()
    assert ran == [1, 2]
    assert event.is_fired
