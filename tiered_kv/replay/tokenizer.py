"""From text to token ids: a model's own tokenizer, or bytes where there is none."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tiered_kv.replay.messages import Message
from tiered_kv.replay.requests import IdArray, as_ids


class Tokenizer(Protocol):
    """Turns text into ids below `vocabulary`."""

    vocabulary: int

    def encode(self, text: str) -> IdArray:
        """The ids of a text, in order."""


class ByteTokenizer:
    """Every UTF-8 byte is a token: what a model without a tokenizer is fed.

    About four times as many tokens as a trained tokenizer makes of English text.
    """

    def __init__(self, vocabulary: int = 256) -> None:
        if vocabulary < 256:
            raise ValueError(f"a vocabulary of {vocabulary} cannot hold 256 bytes")
        self.vocabulary = vocabulary

    def encode(self, text: str) -> IdArray:
        """One id a byte, 0 to 255."""
        data = text.encode("utf-8", errors="surrogatepass")
        return np.frombuffer(data, dtype=np.uint8).astype(np.uint32)


class ModelTokenizer:
    """A transformers tokenizer, without special tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = len(tokenizer)

    def encode(self, text: str) -> IdArray:
        """The tokenizer's ids for this text alone."""
        return as_ids(self._tokenizer.encode(text, add_special_tokens=False))


def message_text(message: Message) -> str:
    """A message spelled out: ``<|role|>``, a line break, the text, a line break.

    One plain form for every model, because many chat templates rewrite earlier turns (they drop the
    reasoning), and then no prefix would ever come back.
    """
    return f"<|{message.role}|>\n{message.text}\n"


def spell_message(message: Message, tokenizer: Tokenizer) -> IdArray:
    """The tokens of `message_text`."""
    return tokenizer.encode(message_text(message))
