"""The driver: who is sent when, how many at once, and what a failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tiered_kv.replay.conversations import Turn
from tiered_kv.replay.live.answer import Answer, LiveRequest, RequestFailedError
from tiered_kv.replay.live.drive import Driven, Driver, Pace
from tiered_kv.replay.live.record import LiveRecord
from tiered_kv.replay.live.script import Conversation, IdConversation
from tiered_kv.replay.requests import as_ids

FAST = 1e9


class FakeEngine:
    """Answers each request with its prompt's length, when `act` lets it."""

    def __init__(self, act: Callable[[int, LiveRequest], Any] | None = None) -> None:
        self.requests: list[LiveRequest] = []
        self.in_flight = self.in_flight_max = 0
        self._act = act

    async def answer(self, request: LiveRequest) -> Answer:
        number = len(self.requests)
        self.requests.append(request)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            await asyncio.sleep(0)
            if self._act is not None:
                found = self._act(number, request)
                if found is not None:
                    await found
            prompt = request.prompt
            assert not isinstance(prompt, tuple)
            ids = as_ids([len(prompt) % 256] * request.reply_tokens)
            return Answer(0.0, 0.5, 1.0, len(prompt), len(ids), 0, ids, "", "length")
        finally:
            self.in_flight -= 1


def talks(count: int = 3, turns: int = 3, pause_s: float = 0.0) -> list[Conversation]:
    """Conversations of short turns, all beginning at 100 s."""
    return [
        IdConversation(
            [
                (
                    session * turns + at,
                    Turn(100.0 + at * pause_s, session, at, as_ids([session, at] * 4), 2),
                )
                for at in range(turns)
            ]
        )
        for session in range(count)
    ]


def drive(engine: Any, conversations: list[Conversation], **pace: Any) -> Driven:
    """One round, to its end."""

    async def run() -> Driven:
        return await driver(engine, conversations, **pace).run(asyncio.Event())

    return asyncio.run(run())


def driver(
    engine: Any,
    conversations: list[Conversation],
    watch: Callable[[LiveRecord, int], None] = lambda record, in_flight: None,
    **pace: Any,
) -> Driver:
    """A driver of the first round."""
    return Driver(
        engine,
        conversations,
        Pace(**{"speed_up": FAST, **pace}),
        run_id="run",
        number=0,
        page_tokens=4,
        watch=watch,
    )


def test_conversations_run_side_by_side_and_each_in_order() -> None:
    engine = FakeEngine()
    done = drive(engine, talks(3, 3))
    assert len(done.records) == 9 and all(record.is_done for record in done.records)
    assert done.in_flight_max == engine.in_flight_max == 3
    for session in range(3):
        turns = [record.turn for record in done.records if record.session == session]
        assert turns == [0, 1, 2]
    assert sorted(record.position for record in done.records) == list(range(9))
    ids = {request.request_id for request in engine.requests}
    assert ids == {f"run-0-{index}" for index in range(9)}


@pytest.mark.parametrize("clients", [1, 2])
def test_no_more_requests_are_in_flight_than_clients(clients: int) -> None:
    engine = FakeEngine()
    done = drive(engine, talks(5, 2), clients=clients)
    assert done.in_flight_max == engine.in_flight_max == clients
    assert len(done.records) == 10


def test_a_turn_is_never_sent_before_it_is_due() -> None:
    done = drive(FakeEngine(), talks(2, 3, pause_s=0.02), speed_up=1.0)
    for record in done.records:
        assert record.turn is not None
        assert record.sent_s >= record.due_s >= 0.02 * record.turn - 1e-9


def test_pauses_are_divided_by_the_speed_up() -> None:
    done = drive(FakeEngine(), talks(1, 3, pause_s=1.0), speed_up=50.0)
    assert [record.due_s for record in done.records] == pytest.approx([0.0, 0.02, 0.04], abs=0.015)


def test_repeated_tokens_are_counted_against_what_was_said_in_the_round() -> None:
    done = drive(FakeEngine(), talks(1, 2))
    first, second = done.records
    assert (first.prompt_tokens, first.repeated_tokens) == (8, 0)
    assert (second.prompt_tokens, second.repeated_tokens) == (18, 8)


def test_a_failed_turn_leaves_its_question_and_the_next_is_sent() -> None:
    def act(number: int, request: LiveRequest) -> None:
        if number == 1:
            raise RequestFailedError("server_error", "HTTP 500: oh")

    engine = FakeEngine(act)
    done = drive(engine, talks(1, 3))
    assert [record.failure for record in done.records] == [None, "server_error", None]
    failed = done.records[1]
    assert failed.message == "HTTP 500: oh" and failed.ttft_s is None
    lengths = [len(request.prompt) for request in engine.requests]
    assert lengths == [8, 18, 26], "8 new each, and the one answer of 2"


def test_a_request_that_takes_too_long_is_given_up_in_the_engine_too() -> None:
    engine = FakeEngine(lambda number, request: asyncio.Event().wait() if number == 0 else None)
    done = drive(engine, talks(1, 2), timeout_s=0.05)
    assert [record.failure for record in done.records] == ["timeout", None]
    assert done.records[0].message == "not answered in full within 0.05 s"
    assert engine.in_flight == 0


def test_an_engine_that_has_gone_ends_the_round() -> None:
    def act(number: int, request: LiveRequest) -> None:
        if number >= 2:
            raise RequestFailedError("unreachable", "connection refused")

    done = drive(FakeEngine(act), talks(1, 50))
    assert done.is_gone and not done.interrupted
    assert len(done.records) == 2 + 8


def test_an_engine_that_comes_back_is_not_gone() -> None:
    def act(number: int, request: LiveRequest) -> None:
        if number % 8:
            raise RequestFailedError("unreachable", "connection refused")

    done = drive(FakeEngine(act), talks(1, 30))
    assert not done.is_gone and len(done.records) == 30


def test_stop_gives_up_what_is_in_flight_and_counts_it_neither_way() -> None:
    stop: asyncio.Event

    def act(number: int, request: LiveRequest) -> Any:
        if number == 3:
            stop.set()
            return asyncio.Event().wait()
        return None

    engine = FakeEngine(act)

    async def run() -> Driven:
        nonlocal stop
        stop = asyncio.Event()
        return await driver(engine, talks(1, 9)).run(stop)

    done = asyncio.run(run())
    assert done.interrupted and len(done.records) == 3
    assert engine.in_flight == 0


def test_stop_after_the_last_answer_interrupts_nothing() -> None:
    async def run() -> Driven:
        stop = asyncio.Event()
        seen = 0

        def watch(record: LiveRecord, in_flight: int) -> None:
            nonlocal seen
            seen += 1

        found = driver(FakeEngine(), talks(1, 2), watch)
        done = await found.run(stop)
        stop.set()
        assert seen == 2
        return done

    assert not asyncio.run(run()).interrupted


def test_a_fault_of_our_own_is_not_taken_for_a_failed_request() -> None:
    def act(number: int, request: LiveRequest) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive(FakeEngine(act), talks(2, 2))


def test_equal_answers_have_equal_digests() -> None:
    one, two = drive(FakeEngine(), talks(2, 2)), drive(FakeEngine(), talks(2, 2))
    first = {record.index: record.reply_digest for record in one.records}
    assert first == {record.index: record.reply_digest for record in two.records}
    assert all(len(digest or "") == 16 for digest in first.values())
