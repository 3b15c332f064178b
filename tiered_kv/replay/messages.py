"""Recorded dialogues with their text: ShareGPT and OpenAI-messages files, JSON or JSONL.

ShareGPT: ``{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value":
"..."}]}``. OpenAI: ``{"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]}``; content may be a list of ``{"type": "text", "text": "..."}`` parts. A file is
one JSON array of such objects, or one object a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tiered_kv.errors import ConfigError
from tiered_kv.replay.traces import numbered_lines, parse_object

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "tool": "user",
    "function": "user",
    "observation": "user",
    "gpt": "assistant",
    "bing": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "function_call": "assistant",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One utterance; a tool's result counts as the user's."""

    role: Role
    text: str


Dialogue = tuple[Message, ...]


def is_dialogue_file(path: Path) -> bool:
    """Whether a file holds dialogues rather than a trace of block ids, by its first line.

    Raises:
        ConfigError: the file cannot be read.
    """
    for _, line in numbered_lines(path):
        if line.lstrip().startswith("["):
            return True
        return '"conversations"' in line or '"messages"' in line
    return False


def read_dialogues(path: Path, *, limit: int | None = None) -> list[Dialogue]:
    """The dialogues of a ShareGPT or OpenAI-messages file that hold at least one user message.

    Args:
        path: the file.
        limit: stop after so many dialogues.

    Raises:
        ConfigError: missing, empty, cut short or of another form; the message names the line or
            entry.
    """
    dialogues: list[Dialogue] = []
    for where, entry in _entries(path):
        if limit is not None and len(dialogues) >= limit:
            break
        dialogue = tuple(_messages(entry, where))
        if any(message.role == "user" for message in dialogue):
            dialogues.append(dialogue)
    if not dialogues:
        raise ConfigError(f"--trace {path}: holds no dialogue with a user message")
    return dialogues


def _entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = numbered_lines(path)
    first = next(lines, None)
    if first is not None and first[1].lstrip().startswith("["):
        lines.close()  # type: ignore[attr-defined]
        yield from _array_entries(path)
        return
    lines = numbered_lines(path)
    for number, line in lines:
        where = f"{path} line {number}"
        yield where, parse_object(line, where)


def _array_entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    text = "".join(line for _, line in numbered_lines(path))
    try:
        array = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--trace {path} line {error.lineno}: not a complete JSON array ({error.msg})"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"--trace {path}: nested too deeply") from error
    for position, entry in enumerate(array):
        where = f"{path} entry {position}"
        if not isinstance(entry, dict):
            raise ConfigError(f"--trace {where}: expected a JSON object")
        yield where, entry


def _messages(entry: dict[str, Any], where: str) -> Iterator[Message]:
    messages = entry.get("messages", entry.get("conversations"))
    if not isinstance(messages, list):
        raise ConfigError(f'--trace {where}: expected a list under "messages" or "conversations"')
    for message in messages:
        if not isinstance(message, dict):
            raise ConfigError(f"--trace {where}: a message must be a JSON object")
        name = message.get("role", message.get("from"))
        role = _ROLES.get(name.lower()) if isinstance(name, str) else None
        if role is None:
            raise ConfigError(
                f"--trace {where}: role {name!r} is not known; expected one of {', '.join(_ROLES)}"
            )
        yield Message(role, _text(message.get("content", message.get("value")), where))


def _text(content: object, where: str) -> str:
    if content is None:  # an assistant's message that only calls a tool
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise ConfigError(f"--trace {where}: a message's content must be text or a list of text parts")
