"""Multi-turn conversations: generated ones, fitted to measured use, and recorded dialogues.

What was measured (medians unless said): coding agents make 46 requests a session (p90 160), start
at 25 K tokens and end at 137 K, share 10-15 K tokens of system prompt and tools, and pause 10 s
(p95 446 s); only 19 % of what they append is fresh. Chat users write 19 rounds (p90 45) and pause
43 s (p99 141 s). `Shape` keeps the proportions and lets the sizes be scaled down. Pauses are
lognormal, never Poisson: memoryless pauses erase the tie between how long a conversation is and
when it returns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tiered_kv.replay.messages import Dialogue, Message
from tiered_kv.replay.requests import IdArray, Request, as_ids
from tiered_kv.replay.tokenizer import Tokenizer, spell_message

Kind = Literal["sessions", "chat"]

_Z90, _Z95, _Z99 = 1.2816, 1.6449, 2.3263  # standard normal quantiles


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal distribution: its median, and the standard deviation of its logarithm."""

    median: float
    sigma: float

    @classmethod
    def fitted(cls, median: float, quantile: float, z: float) -> Lognormal:
        """The one with this median whose quantile at `z` standard deviations is `quantile`."""
        return cls(median, math.log(quantile / median) / z)

    def draw(self, random: np.random.Generator) -> float:
        """One value."""
        return float(self.median * math.exp(self.sigma * random.standard_normal()))


@dataclass(frozen=True, slots=True)
class _Fit:
    """What was measured of one kind of use."""

    turns_sigma: float
    pause_s: Lognormal
    first_share: float  # of the last prompt less the system's, how much the first already has
    append_sigma: float
    fresh_share: float  # of appended tokens; the rest was said before in the same conversation


_FITS: dict[Kind, _Fit] = {
    "sessions": _Fit(
        turns_sigma=Lognormal.fitted(46, 160, _Z90).sigma,
        pause_s=Lognormal.fitted(10, 446, _Z95),
        first_share=(24_775 - 12_500) / (137_529 - 12_500),
        append_sigma=0.8,
        fresh_share=0.19,
    ),
    "chat": _Fit(
        turns_sigma=Lognormal.fitted(19, 45, _Z90).sigma,
        pause_s=Lognormal.fitted(43, 141, _Z99),
        first_share=0.05,
        append_sigma=0.5,
        fresh_share=1.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """How generated conversations look.

    Attributes:
        kind: which measurements to follow.
        conversations: how many run interleaved.
        turns: requests of each conversation; with `is_turns_drawn`, their median.
        is_turns_drawn: draw the number of turns with the measured spread.
        context_tokens: length of the last prompt of a conversation of `turns` turns.
        system_tokens: leading tokens that all conversations share.
        reply_tokens: length of every answer.
        vocabulary: token ids are drawn below this.
        seed: equal seeds give equal conversations, in every process.
    """

    kind: Kind = "sessions"
    conversations: int = 6
    turns: int = 6
    is_turns_drawn: bool = False
    context_tokens: int = 3200
    system_tokens: int = 256
    reply_tokens: int = 16
    vocabulary: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn adds to its conversation, and when."""

    arrival_s: float
    session: int
    index: int
    added_ids: IdArray
    reply_tokens: int
    reply_ids: IdArray | None = None


def generate(shape: Shape) -> list[Turn]:
    """Interleaved conversations in order of arrival.

    Each conversation has its own random stream, so that adding one does not change the others.
    """
    fit = _FITS[shape.kind]
    system = _stream(shape.seed, 0).integers(
        0, shape.vocabulary, shape.system_tokens, dtype=np.uint32
    )
    turns: list[Turn] = []
    for session in range(shape.conversations):
        random = _stream(shape.seed, session + 1)
        arrival_s = float(random.uniform(0, fit.pause_s.median))
        context = system
        for index, added in enumerate(_added_tokens(shape, fit, random)):
            if index:
                arrival_s += fit.pause_s.draw(random)
            ids = _append(shape, fit, random, context, added)
            context = np.concatenate([context, ids])
            first = np.concatenate([system, ids]) if index == 0 else ids
            turns.append(Turn(arrival_s, session, index, first, shape.reply_tokens))
    return in_order_of_arrival(turns)


def _stream(seed: int, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, number))))


def _added_tokens(shape: Shape, fit: _Fit, random: np.random.Generator) -> list[int]:
    """Tokens each turn adds beside the system prompt, so that the last prompt has its length."""
    turns = shape.turns
    if shape.is_turns_drawn:
        turns = max(1, round(Lognormal(shape.turns, fit.turns_sigma).draw(random)))
    own = max(1, shape.context_tokens - shape.system_tokens)
    first = own if shape.turns == 1 else max(1, round(own * fit.first_share))
    replies = shape.reply_tokens * (shape.turns - 1)
    left = own - first - replies
    mean = max(1.0, left / max(1, shape.turns - 1))
    weights = np.exp(fit.append_sigma * random.standard_normal(turns - 1))
    total = max(turns - 1, round(mean * (turns - 1)))
    edges = np.rint(np.cumsum(weights) / max(float(weights.sum()), 1e-9) * total).astype(int)
    return [first, *(max(1, int(added)) for added in np.diff(edges, prepend=0))]


def _append(
    shape: Shape, fit: _Fit, random: np.random.Generator, context: IdArray, tokens: int
) -> IdArray:
    """New tokens for a turn: a fresh part, and a part quoted from what was said before."""
    quoted = min(round(tokens * (1 - fit.fresh_share)), len(context) - 1) if len(context) else 0
    fresh = random.integers(0, shape.vocabulary, tokens - max(0, quoted), dtype=np.uint32)
    if quoted <= 0:
        return fresh
    start = int(random.integers(0, len(context) - quoted))
    return np.concatenate([fresh, context[start : start + quoted]])


@dataclass(frozen=True, slots=True)
class Exchange:
    """What is said before an answer of a recorded dialogue, the answer, and when it is asked."""

    arrival_s: float
    session: int
    index: int
    asked: tuple[Message, ...]
    answer: tuple[Message, ...]


def exchanges(dialogues: Sequence[Dialogue], *, seed: int = 0) -> list[Exchange]:
    """The exchanges of recorded dialogues in order of arrival.

    Dialogues have no times: pauses are drawn as for `chat`. A request is made at every user message
    (several in a row count as one).
    """
    pause_s = _FITS["chat"].pause_s
    found: list[Exchange] = []
    for session, dialogue in enumerate(dialogues):
        random = _stream(seed, session + 1)
        arrival_s = float(random.uniform(0, pause_s.median))
        for index, (asked, answer) in enumerate(_asked_and_answered(dialogue)):
            if index:
                arrival_s += pause_s.draw(random)
            found.append(Exchange(arrival_s, session, index, asked, answer))
    return sorted(found, key=lambda one: (one.arrival_s, one.session, one.index))


def _asked_and_answered(dialogue: Dialogue) -> Iterator[tuple[Dialogue, Dialogue]]:
    asked: list[Message] = []
    answer: list[Message] = []
    has_user = False
    for message in dialogue:
        is_reply = message.role == "assistant" and has_user
        if answer and not is_reply:
            yield tuple(asked), tuple(answer)
            asked, answer, has_user = [], [], False
        has_user = has_user or message.role == "user"
        (answer if is_reply else asked).append(message)
    if has_user:
        yield tuple(asked), tuple(answer)


def recorded_turns(
    dialogues: Sequence[Dialogue], tokenizer: Tokenizer, *, reply_tokens: int, seed: int = 0
) -> list[Turn]:
    """The exchanges of recorded dialogues in tokens, in order of arrival.

    A conversation goes on with the recorded answer (`Turn.reply_ids`), whatever the engine says.
    """

    def spell(messages: Dialogue) -> IdArray:
        spelled = [spell_message(message, tokenizer) for message in messages]
        return np.concatenate(spelled) if spelled else as_ids([])

    return [
        Turn(
            one.arrival_s,
            one.session,
            one.index,
            spell(one.asked),
            reply_tokens,
            spell(one.answer),
        )
        for one in exchanges(dialogues, seed=seed)
    ]


def in_order_of_arrival(turns: list[Turn]) -> list[Turn]:
    """Turns of all conversations as they arrive; ties go to the lower session."""
    return sorted(turns, key=lambda turn: (turn.arrival_s, turn.session, turn.index))


class ConversationWorkload:
    """Turns as requests: a prompt is all that its conversation has said, answers included."""

    def __init__(self, turns: Sequence[Turn], page_tokens: int) -> None:
        self.ids_a_page = page_tokens
        self.page_tokens = page_tokens
        self._turns = turns
        self._context: dict[int, IdArray] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Request]:
        self._context.clear()
        for turn in self._turns:
            said = self._context.get(turn.session)
            ids = turn.added_ids if said is None else np.concatenate([said, turn.added_ids])
            yield Request(
                session=turn.session,
                turn=turn.index,
                arrival_s=turn.arrival_s,
                ids=ids,
                prompt_tokens=len(ids),
                reply_tokens=turn.reply_tokens,
                reply_ids=turn.reply_ids,
            )

    def answered(self, request: Request, reply_ids: IdArray) -> None:
        """Add the answer to the conversation, so that its next prompt contains it."""
        assert request.session is not None
        self._context[request.session] = np.concatenate([request.ids, reply_ids])
