"""Recorded traces in Mooncake's schema: one JSON object a line, a prompt as a chain of block ids.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [int, ...]}``,
optionally with ``session`` and ``turn``. A block holds `block_tokens` tokens, the last one may hold
fewer; equal id means equal prefix, so the number of ids is ``ceil(input_length / block_tokens)``. A
line that says otherwise was made with another block size and would give wrong hit rates: it is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.errors import ConfigError
from tiered_kv.replay.requests import IdArray, Request, as_ids

MOONCAKE_BLOCK_TOKENS = 512
_MAX_ID = 2**32 - 1


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    block_ids: IdArray
    session: int | None = None
    turn: int | None = None


def read_trace(
    path: Path, *, block_tokens: int = MOONCAKE_BLOCK_TOKENS, limit: int | None = None
) -> list[TraceRequest]:
    """The requests of a Mooncake-schema JSONL file, in file order; blank lines are skipped.

    Args:
        path: the file.
        block_tokens: tokens a full block.
        limit: stop after so many requests; the lines behind them are not looked at.

    Raises:
        ConfigError: the file is missing or empty, or a line is cut short, lacks a field, or
            contradicts `block_tokens`; the message names the line.
    """
    requests: list[TraceRequest] = []
    for number, line in numbered_lines(path):
        if limit is not None and len(requests) >= limit:
            break
        requests.append(_parse_line(line, f"{path} line {number}", block_tokens))
    if not requests:
        raise ConfigError(f"--trace {path}: holds no request; expected one JSON object a line")
    return requests


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file that are not blank, numbered from 1.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8 text.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise ConfigError(f"--trace {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--trace {path}: is not UTF-8 text: {error.reason}") from error


def parse_object(text: str, where: str) -> dict[str, Any]:
    """One JSON object; anything else raises `ConfigError` that names the place."""
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        detail = error.msg if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise ConfigError(f"--trace {where}: not a complete JSON object ({detail})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--trace {where}: expected a JSON object, found {type(value).__name__}")
    return value


def _parse_line(line: str, where: str, block_tokens: int) -> TraceRequest:
    fields = parse_object(line, where)
    input_tokens = _count(fields, "input_length", where, least=1)
    output_tokens = _count(fields, "output_length", where)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_id(value) for value in ids):
        raise ConfigError(
            f"--trace {where}: hash_ids must be a list of integers in [0, 2**32), one a block"
        )
    expected = -(-input_tokens // block_tokens)
    if len(ids) != expected:
        raise ConfigError(
            f"--trace {where}: input_length {input_tokens} needs {expected} blocks of "
            f"{block_tokens} tokens but hash_ids holds {len(ids)}: "
            "give the trace's own --trace-block-tokens"
        )
    timestamp = fields.get("timestamp", 0)
    if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)) or timestamp < 0:
        raise ConfigError(
            f"--trace {where}: timestamp must be milliseconds from 0, not {timestamp!r}"
        )
    session = _count(fields, "session", where) if "session" in fields else None
    turn = _count(fields, "turn", where) if "turn" in fields else None
    return TraceRequest(timestamp, input_tokens, output_tokens, as_ids(ids), session, turn)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID


def _count(fields: dict[str, Any], name: str, where: str, least: int = 0) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        found = "is missing" if name not in fields else f"is {value!r}"
        raise ConfigError(f"--trace {where}: {name} {found}; expected an integer from {least}")
    return value


class BlockWorkload:
    """A trace as it is: a page is a block, and its key comes from the chain of block ids."""

    def __init__(
        self, trace: list[TraceRequest], block_tokens: int = MOONCAKE_BLOCK_TOKENS
    ) -> None:
        self.ids_a_page = 1
        self.page_tokens = block_tokens
        self._trace = trace

    def __len__(self) -> int:
        return len(self._trace)

    def __iter__(self) -> Iterator[Request]:
        for line in self._trace:
            yield Request(
                session=line.session,
                turn=line.turn,
                arrival_s=line.timestamp_ms / 1000,
                ids=line.block_ids,
                prompt_tokens=line.input_tokens,
                reply_tokens=line.output_tokens,
            )

    def answered(self, request: Request, reply_ids: IdArray) -> None:
        """A trace's prompts are fixed: the answer is in the next one already."""


class SpelledWorkload:
    """A trace spelled out in tokens, for an engine with a model: a block's id seeds its tokens.

    A partial last block and the full block it becomes have different ids, hence different tokens
    here, so this reuses a little less than the recorded conversation would.
    """

    def __init__(
        self,
        trace: list[TraceRequest],
        *,
        block_tokens: int,
        page_tokens: int,
        vocabulary: int,
        reply_tokens: int,
    ) -> None:
        self.ids_a_page = page_tokens
        self.page_tokens = page_tokens
        self._blocks = BlockWorkload(trace, block_tokens)
        self._vocabulary = vocabulary
        self._reply_tokens = reply_tokens

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Request]:
        for request in self._blocks:
            spelled = spell_blocks(request.ids, self._blocks.page_tokens, self._vocabulary)
            yield Request(
                session=request.session,
                turn=request.turn,
                arrival_s=request.arrival_s,
                ids=spelled[: request.prompt_tokens],
                prompt_tokens=request.prompt_tokens,
                reply_tokens=max(1, min(request.reply_tokens, self._reply_tokens)),
            )

    def answered(self, request: Request, reply_ids: IdArray) -> None:
        """A trace's prompts are fixed: the answer is in the next one already."""


def spell_blocks(block_ids: IdArray, block_tokens: int, vocabulary: int) -> IdArray:
    """Tokens of full blocks, one after the other; each block's follow from its id alone."""
    spelled = [
        np.random.Generator(np.random.Philox(key=int(block))).integers(
            0, vocabulary, block_tokens, dtype=np.uint32
        )
        for block in block_ids
    ]
    return np.concatenate(spelled)
