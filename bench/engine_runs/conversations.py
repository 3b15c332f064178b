"""The conversations that every variant plays, and what a turn of one gave.

Some conversations are long from their first prompt on, the others short. No two have a token of
their beginnings in common, so that nothing but a conversation's own past can be reused.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

LONG_TOKENS = 2000
"""From this many tokens of history on, a returning turn counts as long."""

VOCABULARY = 8192
_FIRST_TOKEN = 8  # below stand the special ones

Phase = Literal["start", "restarted"]


@dataclass(frozen=True, slots=True)
class Workload:
    """How many conversations, and how long.

    Attributes:
        long_tokens: first prompt of conversations 0, 3, 6, ...
        short_tokens: first prompts of the others, spread evenly from the first to the second.
        question_tokens: what the user adds with each further turn.
        answer_tokens: what the engine generates in each turn.
    """

    conversations: int = 8
    turns: int = 6
    long_tokens: int = 2048
    short_tokens: tuple[int, int] = (128, 640)
    question_tokens: int = 48
    answer_tokens: int = 3
    seed: int = 0

    @property
    def longest_tokens(self) -> int:
        """Of any conversation at its end."""
        first = max(self.long_tokens, *self.short_tokens)
        return first + self.turns * (self.question_tokens + self.answer_tokens)

    @property
    def total_tokens(self) -> int:
        """Of all conversations at their ends: what a cache must hold to lose none."""
        added = (self.turns - 1) * self.question_tokens + self.turns * self.answer_tokens
        return sum(len(talk[0]) + added for talk in questions(self))


def questions(workload: Workload) -> list[list[list[int]]]:
    """Token ids that the user sends: [conversation][turn]."""
    shorts = [at for at in range(workload.conversations) if at % 3]
    low, high = workload.short_tokens
    step = (high - low) / max(1, len(shorts) - 1)
    first = {at: round(low + step * rank) for rank, at in enumerate(shorts)}
    talks = []
    for at in range(workload.conversations):
        source = random.Random(f"{workload.seed}/{at}")
        sizes = [first.get(at, workload.long_tokens)]
        sizes += [workload.question_tokens] * (workload.turns - 1)
        talks.append([random_tokens(source, size) for size in sizes])
    return talks


def random_tokens(source: random.Random, count: int) -> list[int]:
    """Token ids that are no special ones."""
    return [source.randrange(_FIRST_TOKEN, VOCABULARY) for _ in range(count)]


def prompt(asked: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[int]:
    """The prompt of turn `len(answers)`: all that was said before, and the next question."""
    said = [token for pair in zip(asked, answers, strict=False) for part in pair for token in part]
    return [*said, *asked[len(answers)]]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn as one variant played it.

    Attributes:
        turn: from 1; the first is cold.
        phase: whether the engine had been restarted in the conversation's midst.
        history_tokens: the last prompt and its answer: what could be reused.
        reused_tokens: prompt tokens that the engine says it did not compute.
        ttft_cpu_s: CPU time of the engine's process, all threads, up to the first token.
        settle_s: how long the engine still had steps to take after the answer was complete.
    """

    variant: str
    round: int
    conversation: int
    turn: int
    phase: Phase
    prompt_tokens: int
    history_tokens: int
    reused_tokens: int
    ttft_s: float
    ttft_cpu_s: float
    settle_s: float
    answer: tuple[int, ...]

    @property
    def is_cold(self) -> bool:
        """Nothing of this conversation was ever computed."""
        return self.history_tokens == 0

    @property
    def is_long(self) -> bool:
        """Whether at least LONG_TOKENS tokens could be reused."""
        return self.history_tokens >= LONG_TOKENS
