"""What conversations say: exact prefixes in ids, growing text, traces block for block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiered_kv.errors import ConfigError
from tiered_kv.replay.live.answer import Answer
from tiered_kv.replay.live.repeats import RepeatCounter
from tiered_kv.replay.live.script import Conversation
from tiered_kv.replay.live.source import Source
from tiered_kv.replay.live.words import WORDS, words_of
from tiered_kv.replay.messages import Message
from tiered_kv.replay.requests import as_ids
from tiered_kv.replay.settings import ReplaySettings
from tiered_kv.replay.tokenizer import ByteTokenizer, Tokenizer


class Facts:
    """An engine as far as the input asks it: what it takes, and how much."""

    def __init__(
        self,
        *,
        takes_ids: bool = True,
        max_tokens: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.takes_ids = takes_ids
        self.vocabulary = 256
        self.max_tokens = max_tokens
        self.tokenizer = tokenizer


def settings(**more: Any) -> ReplaySettings:
    """Two short conversations, with what a test wants different."""
    values: dict[str, Any] = {
        "engine": "openai",
        "conversations": 2,
        "turns": 3,
        "context_tokens": 300,
        "system_tokens": 32,
        "reply_tokens": 4,
    }
    return ReplaySettings.model_validate({**values, **more})


def conversations(facts: Facts, **more: Any) -> list[Conversation]:
    """The input of these settings, in the form that the engine takes."""
    told = settings(**more)
    engine: Any = facts
    return Source.read(told).conversations(told, engine)


def answer(ids: list[int] | None, text: str = "") -> Answer:
    """An answer with these tokens."""
    given = None if ids is None else as_ids(ids)
    return Answer(0.0, 1.0, 2.0, None, len(ids or text), None, given, text, "length")


def test_a_prompt_is_the_last_one_its_answer_and_what_is_new() -> None:
    for talk in conversations(Facts()):
        talk.begin()
        said: list[int] = []
        for at, step in enumerate(talk.steps):
            prompt = talk.prompt(at)
            assert isinstance(prompt, np.ndarray)
            assert prompt.tolist()[: len(said)] == said
            assert len(prompt) > len(said)
            assert int(prompt.max()) < 256
            reply = [at] * step.reply_tokens
            talk.answered(answer(reply))
            said = [*prompt.tolist(), *reply]


def test_a_round_begins_from_nothing() -> None:
    talk = conversations(Facts())[0]
    talk.begin()
    first = talk.prompt(0)
    talk.answered(answer([1, 2, 3]))
    talk.begin()
    again = talk.prompt(0)
    assert isinstance(first, np.ndarray) and isinstance(again, np.ndarray)
    assert np.array_equal(first, again)


def test_steps_are_numbered_in_order_of_arrival_over_all_conversations() -> None:
    steps = [step for talk in conversations(Facts()) for step in talk.steps]
    by_number = sorted(steps, key=lambda step: step.index)
    assert [step.index for step in by_number] == list(range(6))
    assert by_number == sorted(steps, key=lambda step: step.arrival_s)


def test_limit_keeps_the_requests_that_come_first() -> None:
    every = sorted(step.arrival_s for talk in conversations(Facts()) for step in talk.steps)
    few = conversations(Facts(), limit=4)
    assert sorted(step.arrival_s for talk in few for step in talk.steps) == every[:4]


def test_a_conversation_longer_than_the_context_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"--context-tokens 300: .* the model's context is 200"):
        conversations(Facts(max_tokens=200))
    assert conversations(Facts(max_tokens=400))


def test_generated_conversations_in_text_share_their_system_message() -> None:
    talks = conversations(Facts(takes_ids=False))
    firsts = []
    for talk in talks:
        talk.begin()
        first = talk.prompt(0)
        assert isinstance(first, tuple)
        assert [message.role for message in first] == ["system", "user"]
        assert len(first[0].text.split()) == 32
        talk.answered(answer(None, "so it is"))
        second = talk.prompt(1)
        assert isinstance(second, tuple)
        assert second[:3] == (*first, Message("assistant", "so it is"))
        firsts.append(first)
    assert firsts[0][0] == firsts[1][0] and firsts[0][1] != firsts[1][1]


def dialogue_file(path: Path) -> Path:
    """One dialogue of two questions."""
    said = [("system", "be brief"), ("user", "one"), ("assistant", "1"), ("user", "two")]
    messages = [{"role": role, "content": text} for role, text in said]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def test_a_recorded_dialogue_goes_on_with_the_engines_own_answers(tmp_path: Path) -> None:
    (talk,) = conversations(Facts(takes_ids=False), trace=dialogue_file(tmp_path / "d"))
    talk.begin()
    asked = talk.prompt(0)
    assert asked == (Message("system", "be brief"), Message("user", "one"))
    talk.answered(answer(None, "uno"))
    assert talk.prompt(1) == (*asked, Message("assistant", "uno"), Message("user", "two"))


def test_a_recorded_dialogue_is_tokenised_for_an_engine_without_text(tmp_path: Path) -> None:
    facts = Facts(tokenizer=ByteTokenizer())
    (talk,) = conversations(facts, trace=dialogue_file(tmp_path / "d"))
    talk.begin()
    first = talk.prompt(0)
    assert isinstance(first, np.ndarray)
    assert bytes(first.astype(np.uint8)) == b"<|system|>\nbe brief\n<|user|>\none\n"
    talk.answered(answer([7, 8]))
    second = talk.prompt(1)
    assert isinstance(second, np.ndarray)
    assert second.tolist()[: len(first) + 2] == [*first.tolist(), 7, 8]


def trace_file(path: Path, **more: Any) -> Path:
    """Three requests of two blocks of 8 tokens; the first block is shared."""
    lines = [
        {"timestamp": at * 1000, "input_length": 12, "output_length": 9, "hash_ids": [0, at + 1]}
        for at in range(3)
    ]
    for at, line in enumerate(lines):
        line.update({name: values[at] for name, values in more.items()})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_of_a_trace_without_sessions_wait_for_nobody(tmp_path: Path) -> None:
    talks = conversations(Facts(), trace=trace_file(tmp_path / "t"), trace_block_tokens=8)
    assert [talk.session for talk in talks] == [None, None, None]
    assert [talk.steps[0].arrival_s for talk in talks] == [0.0, 1.0, 2.0]
    prompts = [talk.prompt(0) for talk in talks]
    assert all(isinstance(prompt, np.ndarray) and len(prompt) == 12 for prompt in prompts)
    heads = {bytes(np.asarray(prompt)[:8].tobytes()) for prompt in prompts}
    tails = {bytes(np.asarray(prompt)[8:].tobytes()) for prompt in prompts}
    assert (len(heads), len(tails)) == (1, 3)
    assert all(talk.steps[0].reply_tokens == 4 for talk in talks), "--reply-tokens caps them"


def test_lines_of_one_session_follow_each_other(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t", session=[5, 6, 5], turn=[0, 0, 1])
    talks = conversations(Facts(), trace=path, trace_block_tokens=8)
    assert [(talk.session, [step.turn for step in talk.steps]) for talk in talks] == [
        (5, [0, 1]),
        (6, [0]),
    ]


def test_a_trace_in_text_keeps_equal_prefixes_equal(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t")
    talks = conversations(Facts(takes_ids=False), trace=path, trace_block_tokens=8)
    texts = []
    for talk in talks:
        (message,) = talk.prompt(0)
        assert isinstance(message, Message)
        texts.append(message.text.split())
    assert texts[0][:8] == texts[1][:8] == texts[2][:8]
    assert texts[0] != texts[1]


def test_facts_of_a_file_hold_its_digest(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t")
    told = settings(trace=path, trace_block_tokens=8)
    source = Source.read(told)
    engine: Any = Facts()
    facts = source.facts(told, source.conversations(told, engine))
    assert (facts["kind"], facts["requests"], facts["conversations"]) == ("trace", 3, 3)
    assert len(facts["sha256"]) == 64 and facts["block_tokens"] == 8
    generated = Source().facts(settings(), conversations(Facts()))
    assert generated["kind"] == "sessions" and generated["file"] is None


def test_words_are_different_and_as_many_as_the_ids_of_a_byte() -> None:
    assert len(WORDS) == len(set(WORDS)) == 256
    assert words_of(as_ids([0, 1, 0])) == "the of the"


def test_repeated_tokens_are_whole_pages_of_what_was_said() -> None:
    counter = RepeatCounter(4)
    prompt, reply = as_ids(range(10)), as_ids([50, 51, 52])
    assert counter.repeated_tokens(prompt) == 0
    counter.saw(prompt, reply)
    assert counter.repeated_tokens(prompt) == 8
    longer = as_ids([*range(10), 50, 51, 52, 53])
    assert counter.repeated_tokens(longer) == 12, "the answer's last token has no KV yet"
    assert counter.repeated_tokens(as_ids([99, *range(1, 10)])) == 0
    assert counter.repeated_tokens(as_ids([0, 1, 2, 3, 99, 5, 6, 7])) == 4
