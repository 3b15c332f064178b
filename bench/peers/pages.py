"""Pages for all peers alike: the same random bytes, in a caller's own memory, known by digest."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import xxhash

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

LOOKUP_KEYS = 1000
DISK_SETS = 3
"""Rounds that a store's disk, the raw file and a peer of a fixed size have room for.

They are overwritten in turn. On a disk that is told of deleted space (`discard`), as the virtual
one of a cloud is, the first write to a place takes half as long again as later ones.
"""
WARM_UP_ROUNDS = DISK_SETS + 1  # by then every store writes where it has written before
_SEED = 20


def buffer(n_bytes: int) -> Bytes:
    """Zeroed memory on a page boundary, touched, in huge pages where the system gives them."""
    mapped = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    made: Bytes = np.frombuffer(mapped, dtype=np.uint8)
    made[:] = 0
    return made


def rows(memory: Bytes, page_bytes: int) -> list[Bytes]:
    """Consecutive pages of a buffer."""
    return list(memory.reshape(-1, page_bytes))


class Content:
    """What the pages of a round hold: random bytes, other ones in every round.

    A round's bytes are those of the first, each eight xored with a word of the round: no page
    equals one of another round anywhere, and making them costs one pass.
    """

    def __init__(self, n_bytes: int) -> None:
        words = np.random.default_rng(_SEED).integers(0, 1 << 64, n_bytes // 8, dtype=np.uint64)
        self._words = words

    def fill(self, pages: Sequence[Bytes], number: int) -> list[bytes]:
        """Write the pages of a round; their digests."""
        word = np.uint64(int.from_bytes(_digest("round", number)[:8], "little"))
        at = 0
        for page in pages:
            count = page.nbytes // 8
            np.bitwise_xor(self._words[at : at + count], word, out=page.view(np.uint64))
            at += count
        return digests(pages)


def digests(pages: Sequence[Bytes]) -> list[bytes]:
    """xxh3 of each page, 128 bits."""
    return [xxhash.xxh3_128_digest(page.data) for page in pages]


def key(number: int, page: int) -> bytes:
    """32 bytes that name a page of a round, for peers that take a hash."""
    return _digest("page", number, page)


def absent_key(number: int, page: int) -> bytes:
    """32 bytes that name no page."""
    return _digest("absent", number, page)


def _digest(*words: object) -> bytes:
    return hashlib.sha256("/".join(map(str, words)).encode()).digest()
