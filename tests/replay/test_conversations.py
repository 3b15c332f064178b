"""Generated conversations: their shape, their seeds, and how turns become prompts."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.replay.conversations import (
    ConversationWorkload,
    Kind,
    Lognormal,
    Shape,
    Turn,
    generate,
    recorded_turns,
)
from tiered_kv.replay.messages import Message
from tiered_kv.replay.requests import Request, as_ids
from tiered_kv.replay.tokenizer import ByteTokenizer

GOLDEN_IDS = [555, 57, 3840, 1055, 1582, 1931]
SHAPE = Shape(conversations=4, turns=5, context_tokens=2000, system_tokens=100, reply_tokens=10)


def fingerprint(turns: list[Turn]) -> list[tuple[float, int, int, bytes]]:
    """All that a turn is, comparable."""
    return [(turn.arrival_s, turn.session, turn.index, turn.added_ids.tobytes()) for turn in turns]


def served(shape: Shape, page_tokens: int = 64) -> list[Request]:
    """Every request of a generated workload, answered with zeros."""
    workload = ConversationWorkload(generate(shape), page_tokens)
    requests = []
    for request in workload:
        requests.append(request)
        workload.answered(request, as_ids([0] * request.reply_tokens))
    return requests


def test_equal_seeds_give_equal_conversations_and_others_do_not() -> None:
    assert fingerprint(generate(SHAPE)) == fingerprint(generate(SHAPE))
    assert fingerprint(generate(SHAPE)) != fingerprint(generate(replace(SHAPE, seed=1)))


def test_generated_ids_do_not_change_from_release_to_release() -> None:
    """A store found again after an upgrade hits only if a seed still gives the same tokens."""
    turn = generate(SHAPE)[0]
    assert turn.added_ids[:6].tolist() == GOLDEN_IDS


def test_one_more_conversation_leaves_the_others_as_they_were() -> None:
    more = generate(replace(SHAPE, conversations=5))
    kept = [turn for turn in more if turn.session < 4]
    assert fingerprint(kept) == fingerprint(generate(SHAPE))


@pytest.mark.parametrize("kind", ["sessions", "chat"])
def test_the_last_prompt_has_the_length_asked_for(kind: Kind) -> None:
    last = {r.session: r.prompt_tokens for r in served(replace(SHAPE, kind=kind))}
    assert len(last) == 4
    assert all(abs(tokens - 2000) <= 5 for tokens in last.values())


@given(
    st.sampled_from(["sessions", "chat"]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(2, 3000),
    st.integers(0, 300),
    st.integers(1, 60),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_prompts_grow_share_the_system_block_and_contain_the_answers(
    kind: Kind,
    conversations: int,
    turns: int,
    context: int,
    system: int,
    reply: int,
    draw: bool,
) -> None:
    shape = Shape(
        kind=kind,
        conversations=conversations,
        turns=turns,
        is_turns_drawn=draw,
        context_tokens=context,
        system_tokens=min(system, context - 1),
        reply_tokens=reply,
        vocabulary=500,
    )
    before: dict[int | None, Request] = {}
    system_ids = None
    for request in served(shape):
        ids = request.ids
        if system_ids is None:
            system_ids = ids[: shape.system_tokens]
        assert np.array_equal(ids[: shape.system_tokens], system_ids)
        assert request.prompt_tokens == len(ids) and int(ids.max()) < 500
        previous = before.get(request.session)
        if previous is not None:
            expected = np.concatenate([previous.ids, np.zeros(reply, np.uint32)])
            assert np.array_equal(ids[: len(expected)], expected)
            assert len(ids) > len(expected)
            assert request.arrival_s >= previous.arrival_s
        before[request.session] = request
    if not draw:
        assert len(before) == conversations


def test_turns_of_all_conversations_arrive_in_order() -> None:
    arrivals = [turn.arrival_s for turn in generate(SHAPE)]
    assert arrivals == sorted(arrivals)
    sessions = [turn.session for turn in generate(replace(SHAPE, kind="chat"))]
    assert sessions != sorted(sessions), "conversations must interleave"


def test_pauses_follow_the_measured_distribution() -> None:
    random = np.random.default_rng(5)
    pause_s = Lognormal.fitted(43, 141, 2.3263)
    drawn = sorted(pause_s.draw(random) for _ in range(4000))
    assert median(drawn) == pytest.approx(43, rel=0.05)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(141, rel=0.15)


def test_drawn_turns_have_the_median_asked_for() -> None:
    shape = Shape(
        conversations=400, turns=10, is_turns_drawn=True, context_tokens=200, system_tokens=0
    )
    counts: dict[int, int] = {}
    for turn in generate(shape):
        counts[turn.session] = counts.get(turn.session, 0) + 1
    assert median(counts.values()) == pytest.approx(10, abs=2)
    assert max(counts.values()) > 25


def test_recorded_dialogues_go_on_with_the_recorded_answer() -> None:
    dialogue = (
        Message("system", "s"),
        Message("user", "a"),
        Message("user", "b"),
        Message("assistant", "c"),
        Message("user", "d"),
    )
    turns = recorded_turns([dialogue], ByteTokenizer(), reply_tokens=4)
    workload = ConversationWorkload(turns, 16)
    requests = []
    for request in workload:
        requests.append(request)
        assert request.reply_ids is not None
        workload.answered(request, request.reply_ids)
    texts = [bytes(request.ids.astype(np.uint8)).decode() for request in requests]
    assert texts[0] == "<|system|>\ns\n<|user|>\na\n<|user|>\nb\n"
    assert texts[1] == texts[0] + "<|assistant|>\nc\n<|user|>\nd\n"
    assert [request.turn for request in requests] == [0, 1]


def test_a_dialogue_that_opens_with_an_answer_keeps_it_as_context() -> None:
    dialogue = (Message("assistant", "welcome"), Message("user", "a"), Message("assistant", "c"))
    (turn,) = recorded_turns([dialogue], ByteTokenizer(), reply_tokens=4)
    assert bytes(turn.added_ids.astype(np.uint8)) == b"<|assistant|>\nwelcome\n<|user|>\na\n"


def test_a_workload_can_be_replayed_again() -> None:
    workload = ConversationWorkload(generate(SHAPE), 64)
    lengths = []
    for _ in range(2):
        tokens = []
        for request in workload:
            tokens.append(request.prompt_tokens)
            workload.answered(request, as_ids([1, 2]))
        lengths.append(tokens)
    assert lengths[0] == lengths[1]
