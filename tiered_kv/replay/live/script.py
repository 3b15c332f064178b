"""What each conversation will say, and when: the input of a live replay, one object a conversation.

Unlike a `Workload`, whose requests come one after the other, conversations go on side by side, each
as soon as its own last answer is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tiered_kv.replay.conversations import Exchange, Turn
from tiered_kv.replay.live.answer import Answer, Messages, Prompt
from tiered_kv.replay.live.words import words_of
from tiered_kv.replay.messages import Message
from tiered_kv.replay.requests import IdArray, as_ids
from tiered_kv.replay.traces import TraceRequest, spell_blocks


@dataclass(frozen=True, slots=True)
class Step:
    """One turn to come.

    Attributes:
        index: its place in the input, from 0, over all conversations.
        arrival_s: when it is due, counted from the start of the recording.
        turn: position in its conversation, from 0; None in a trace that does not say.
        reply_tokens: how long its answer is to be.
    """

    index: int
    arrival_s: float
    turn: int | None
    reply_tokens: int


class Conversation(Protocol):
    """The steps of one conversation; each prompt contains the engine's own earlier answers."""

    session: int | None
    steps: Sequence[Step]

    def begin(self) -> None:
        """Forget what was said: a round begins."""

    def prompt(self, at: int) -> Prompt:
        """The whole prompt of `steps[at]`. Called once a step, in order."""

    def answered(self, answer: Answer) -> None:
        """Take the answer to the last prompt into the conversation. Not called if it failed."""


def _step(at: int, turn: Turn) -> Step:
    return Step(at, turn.arrival_s, turn.index, turn.reply_tokens)


class IdConversation:
    """A conversation in token ids: an answer enters the next prompt token for token."""

    def __init__(self, numbered: Sequence[tuple[int, Turn]]) -> None:
        self.session: int | None = numbered[0][1].session
        self.steps: Sequence[Step] = [_step(at, turn) for at, turn in numbered]
        self._turns = [turn for _, turn in numbered]
        self._said = as_ids([])

    def begin(self) -> None:
        """Forget what was said."""
        self._said = as_ids([])

    def prompt(self, at: int) -> Prompt:
        """All that was said, and what the turn adds."""
        self._said = np.concatenate([self._said, self._turns[at].added_ids])
        return self._said

    def answered(self, answer: Answer) -> None:
        """Go on with the engine's own answer, token for token."""
        assert answer.ids is not None
        self._said = np.concatenate([self._said, answer.ids])

    @property
    def longest_tokens(self) -> int:
        """Its last prompt and answer, if every answer has its full length."""
        return sum(len(turn.added_ids) + turn.reply_tokens for turn in self._turns)


class TextConversation:
    """A conversation in text; whether its tokens repeat is up to the server's tokenizer."""

    def __init__(self, session: int, steps: Sequence[Step], asked: Sequence[Messages]) -> None:
        self.session: int | None = session
        self.steps = steps
        self._asked = asked
        self._said: Messages = ()

    @classmethod
    def of_turns(cls, numbered: Sequence[tuple[int, Turn]], system_tokens: int) -> TextConversation:
        """Generated turns in words; the leading `system_tokens` become the system message."""
        asked: list[Messages] = []
        for _, turn in numbered:
            system_ids = turn.added_ids[: system_tokens if turn.index == 0 else 0]
            user = Message("user", words_of(turn.added_ids[len(system_ids) :]))
            system = Message("system", words_of(system_ids))
            asked.append((system, user) if len(system_ids) else (user,))
        return cls(numbered[0][1].session, [_step(at, turn) for at, turn in numbered], asked)

    @classmethod
    def of_exchanges(
        cls, numbered: Sequence[tuple[int, Exchange]], reply_tokens: int
    ) -> TextConversation:
        """A recorded dialogue; its recorded answers are left out, the engine gives its own."""
        steps = [Step(at, one.arrival_s, one.index, reply_tokens) for at, one in numbered]
        return cls(numbered[0][1].session, steps, [one.asked for _, one in numbered])

    def begin(self) -> None:
        """Forget what was said."""
        self._said = ()

    def prompt(self, at: int) -> Prompt:
        """All that was said, and what the turn adds."""
        self._said = (*self._said, *self._asked[at])
        return self._said

    def answered(self, answer: Answer) -> None:
        """Go on with the engine's own answer, as it was streamed."""
        self._said = (*self._said, Message("assistant", answer.text))


@dataclass(frozen=True, slots=True)
class BlockSpelling:
    """How a trace's blocks are spelled out.

    Attributes:
        block_tokens: tokens a block.
        vocabulary: ids are drawn below this.
        as_text: in words, where the engine takes no ids.
    """

    block_tokens: int
    vocabulary: int
    as_text: bool

    def prompt(self, request: TraceRequest) -> Prompt:
        """The prompt of one line: equal blocks, equal tokens (or words)."""
        ids: IdArray = spell_blocks(request.block_ids, self.block_tokens, self.vocabulary)
        ids = ids[: request.input_tokens]
        return (Message("user", words_of(ids)),) if self.as_text else ids


class TraceConversation:
    """Requests of a trace that follow each other; a prompt is what was recorded, answers included.

    Prompts are spelled out when they are due: a trace in full would not fit into memory.
    """

    def __init__(
        self,
        numbered: Sequence[tuple[int, TraceRequest]],
        spelling: BlockSpelling,
        reply_tokens: int,
    ) -> None:
        self.session: int | None = numbered[0][1].session
        self.steps: Sequence[Step] = [
            Step(
                at,
                request.timestamp_ms / 1000,
                request.turn,
                max(1, min(request.output_tokens, reply_tokens)),
            )
            for at, request in numbered
        ]
        self._requests = [request for _, request in numbered]
        self._spelling = spelling

    def begin(self) -> None:
        """Nothing is remembered."""

    def prompt(self, at: int) -> Prompt:
        """The line spelled out."""
        return self._spelling.prompt(self._requests[at])

    def answered(self, answer: Answer) -> None:
        """The answer is in the recorded prompts already."""
