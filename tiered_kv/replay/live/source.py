"""What a live replay says, read once and then put into the form its engine takes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tiered_kv.errors import ConfigError
from tiered_kv.replay.conversations import Exchange, Shape, Turn, exchanges, generate
from tiered_kv.replay.engines.base import LiveEngine
from tiered_kv.replay.live.script import (
    BlockSpelling,
    Conversation,
    IdConversation,
    TextConversation,
    TraceConversation,
)
from tiered_kv.replay.live.words import WORDS
from tiered_kv.replay.messages import Dialogue, is_dialogue_file, read_dialogues
from tiered_kv.replay.settings import ReplaySettings
from tiered_kv.replay.tokenizer import Tokenizer, spell_message
from tiered_kv.replay.traces import TraceRequest, read_trace

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Source:
    """The input: a trace's lines, recorded dialogues, or neither, for generated conversations."""

    trace: Sequence[TraceRequest] = ()
    dialogues: Sequence[Dialogue] = ()

    @classmethod
    def read(cls, settings: ReplaySettings) -> Source:
        """Read the file that `--trace` names, if any.

        Raises:
            ConfigError: it cannot be read, or is of no known form.
        """
        if settings.trace is None:
            return cls()
        if is_dialogue_file(settings.trace):
            return cls(dialogues=read_dialogues(settings.trace, limit=settings.limit))
        block_tokens = settings.trace_block_tokens
        return cls(
            trace=read_trace(settings.trace, block_tokens=block_tokens, limit=settings.limit)
        )

    @property
    def has_dialogues(self) -> bool:
        """Whether it is text that somebody wrote."""
        return bool(self.dialogues)

    def facts(
        self, settings: ReplaySettings, conversations: Sequence[Conversation]
    ) -> dict[str, Any]:
        """What the report says of the input."""
        kind = "dialogues" if self.dialogues else "trace" if self.trace else settings.kind
        return {
            "kind": kind,
            "file": None if settings.trace is None else str(settings.trace),
            "sha256": None if settings.trace is None else _sha256(settings.trace),
            "block_tokens": settings.trace_block_tokens if self.trace else None,
            "conversations": len(conversations),
            "requests": sum(len(one.steps) for one in conversations),
        }

    def conversations(self, settings: ReplaySettings, engine: LiveEngine) -> list[Conversation]:
        """The conversations in the form the engine takes, `--limit` requests at most.

        Args:
            settings: of the replay.
            engine: open.

        Raises:
            ConfigError: a generated conversation is longer than the model's context.
        """
        if self.trace:
            return self._of_trace(settings, engine)
        if self.dialogues:
            return self._of_dialogues(settings, engine.tokenizer)
        return _generated(settings, engine)

    def _of_trace(self, settings: ReplaySettings, engine: LiveEngine) -> list[Conversation]:
        vocabulary = engine.vocabulary if engine.takes_ids else len(WORDS)
        spelling = BlockSpelling(settings.trace_block_tokens, vocabulary, not engine.takes_ids)
        groups: dict[Any, list[tuple[int, TraceRequest]]] = {}
        for at, request in enumerate(self.trace):
            talk = ("line", at) if request.session is None else request.session
            groups.setdefault(talk, []).append((at, request))
        return [
            TraceConversation(found, spelling, settings.reply_tokens) for found in groups.values()
        ]

    def _of_dialogues(
        self, settings: ReplaySettings, tokenizer: Tokenizer | None
    ) -> list[Conversation]:
        found = exchanges(self.dialogues, seed=settings.seed)[: settings.limit]
        if tokenizer is None:
            return [
                TextConversation.of_exchanges(numbered, settings.reply_tokens)
                for numbered in _by_session(found, lambda one: one.session)
            ]
        turns = [_spelled(one, tokenizer, settings.reply_tokens) for one in found]
        return [IdConversation(numbered) for numbered in _by_session(turns, lambda t: t.session)]


def _generated(settings: ReplaySettings, engine: LiveEngine) -> list[Conversation]:
    shape = Shape(
        kind=settings.kind,
        conversations=settings.conversations,
        turns=settings.turns,
        is_turns_drawn=settings.draw_turns,
        context_tokens=settings.context_tokens,
        system_tokens=settings.system_tokens,
        reply_tokens=settings.reply_tokens,
        vocabulary=engine.vocabulary if engine.takes_ids else len(WORDS),
        seed=settings.seed,
    )
    groups = _by_session(generate(shape)[: settings.limit], lambda turn: turn.session)
    if not engine.takes_ids:
        return [TextConversation.of_turns(group, shape.system_tokens) for group in groups]
    found = [IdConversation(group) for group in groups]
    longest = max(one.longest_tokens for one in found)
    if engine.max_tokens is not None and longest > engine.max_tokens:
        raise ConfigError(
            f"--context-tokens {settings.context_tokens}: the longest conversation comes to "
            f"{longest} tokens, but the model's context is {engine.max_tokens}; give fewer"
        )
    return [*found]


def _spelled(one: Exchange, tokenizer: Tokenizer, reply_tokens: int) -> Turn:
    ids = np.concatenate([spell_message(message, tokenizer) for message in one.asked])
    return Turn(one.arrival_s, one.session, one.index, ids, reply_tokens)


def _by_session(
    items: Iterable[_Item], session: Callable[[_Item], int]
) -> list[list[tuple[int, _Item]]]:
    """Numbered items by conversation, each in order."""
    groups: dict[int, list[tuple[int, _Item]]] = {}
    for at, item in enumerate(items):
        groups.setdefault(session(item), []).append((at, item))
    return list(groups.values())


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()
