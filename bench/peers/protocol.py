"""What the driver and a worker say to each other: one JSON object a line, over stdin and stdout.

A request names what to do and gives its arguments; a reply brings seconds, facts or an error. The
worker times the operation alone: neither the pipe nor the check of what came back is in a figure.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

OPERATIONS = ("put", "get_host", "put_durable", "get_cold", "lookup_present", "lookup_absent")
"""What is timed, in the order in which a round does it."""

CHORES = ("setup", "begin", "verify", "empty_host", "clear", "close")
"""What is not timed: open a peer at a page size, make a round's pages and keys, check what was
read, empty the memory tier, forget the round, close the peer."""


class ProtocolError(Exception):
    """A line that is no message."""


@dataclass(frozen=True, slots=True)
class Request:
    """One thing to do."""

    do: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of it.

    Attributes:
        seconds: wall time of each repeat of the operation; none for a chore.
        cpu_seconds: CPU time of the worker's process meanwhile, all its threads.
        facts: what else there is to say, such as versions and configuration.
        error: why it failed, in one line; None if it did not.
    """

    seconds: tuple[float, ...] = ()
    cpu_seconds: tuple[float, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def encode(message: Request | Reply) -> str:
    """One line, its end included."""
    return json.dumps(asdict(message)) + "\n"


def decode_request(line: str) -> Request:
    """Raises ProtocolError."""
    found = _object(line)
    do = found.get("do")
    if do not in OPERATIONS + CHORES:
        raise ProtocolError(f"no such operation: {do!r}")
    arguments = found.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ProtocolError(f"arguments are no object: {arguments!r}")
    return Request(do, arguments)


def decode_reply(line: str) -> Reply:
    """Raises ProtocolError."""
    found = _object(line)
    unknown = set(found) - set(Reply.__slots__)
    if unknown:
        raise ProtocolError(f"unknown field in a reply: {min(unknown)}")
    try:
        return Reply(
            tuple(float(value) for value in found.get("seconds", ())),
            tuple(float(value) for value in found.get("cpu_seconds", ())),
            dict(found.get("facts", {})),
            found.get("error"),
        )
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"not a reply: {line.strip()[:200]}") from error


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ProtocolError(f"not JSON: {line.strip()[:200]}") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"not an object: {line.strip()[:200]}")
    return found
