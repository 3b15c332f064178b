"""One peer as the driver knows it: what it can do, on pages in the caller's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.pages import LOOKUP_KEYS, Bytes, absent_key, buffer, key, rows


@dataclass(frozen=True, slots=True)
class Setup:
    """What every peer is given alike.

    Attributes:
        folder: for its files, its own, on the disk that is measured.
        options: what tells one form of a peer from another.
    """

    page_bytes: int
    pages: int
    folder: Path
    options: Mapping[str, Any]

    @property
    def set_bytes(self) -> int:
        """All pages of a round."""
        return self.page_bytes * self.pages


class Adapter(ABC):
    """A peer, opened at one page size. It need not have every operation: `operations` says which.

    A round: `begin`, `put`, `get_host`, `put_durable`, `empty_host`, `get_cold`, lookups, `clear`.
    Each call blocks until what it does is done, by the peer's own account. What a call gets and
    gives lies in `sources` and `targets`, the caller's memory: pages that are contiguous.

    Raises:
        RuntimeError: from any operation that did not do all of it.
    """

    operations: tuple[str, ...] = ()

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.number = -1
        self.keys: list[Any] = []
        self.present: Sequence[Any] = ()
        self.absent: Sequence[Any] = ()

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """What it was opened with, in full."""

    @abstractmethod
    def versions(self) -> dict[str, str]:
        """Of the packages that matter."""

    def sources(self) -> list[Bytes]:
        """Where the caller writes the pages of the round, before `put` or `put_durable`."""
        return self._own("_sources")

    def targets(self) -> list[Bytes]:
        """Where the next get will have put its pages, in order."""
        return self._own("_targets")

    def _own(self, name: str) -> list[Bytes]:
        made: list[Bytes] | None = self.__dict__.get(name)
        if made is None:
            made = rows(buffer(self.setup.set_bytes), self.setup.page_bytes)
            self.__dict__[name] = made
        return made

    def begin(self, number: int) -> None:
        """Make the keys of a round, in the peer's own form."""
        self.number = number
        self.rename([self.name(key(number, page)) for page in range(self.setup.pages)])
        self.absent = [self.name(absent_key(number, at)) for at in range(LOOKUP_KEYS)]

    def rename(self, keys: list[Any]) -> None:
        """Take these as the keys of the round, and look up those."""
        self.keys = keys
        self.present = [keys[at % len(keys)] for at in range(LOOKUP_KEYS)]

    def name(self, digest: bytes) -> Any:
        """A page's key as the peer takes it."""
        return digest

    def put(self) -> None:
        """Have the memory tier accept all pages."""
        raise NotImplementedError

    def get_host(self) -> None:
        """Bring all pages from the memory tier to the caller."""
        raise NotImplementedError

    def put_durable(self) -> None:
        """Bring all pages from host memory to disk, by the strongest means the peer has."""
        raise NotImplementedError

    def prepare(self, operation: str) -> None:  # noqa: B027
        """Do what must come before an operation and is no part of it. Not timed."""

    def empty_host(self) -> None:  # noqa: B027
        """Keep no page in memory, so that the next get must read the disk. Not timed."""

    def get_cold(self) -> None:
        """Bring all pages from disk to the caller."""
        raise NotImplementedError

    def lookup(self, keys: Sequence[Any]) -> int:
        """How many of these keys it has."""
        raise NotImplementedError

    @abstractmethod
    def clear(self) -> None:
        """Forget all pages; the next round begins with none."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def require(done: int, wanted: int, what: str) -> None:
    """Raises RuntimeError unless all of it was done."""
    if done != wanted:
        raise RuntimeError(f"{what}: {done} of {wanted} pages")
