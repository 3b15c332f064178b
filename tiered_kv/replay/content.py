"""Page content that follows from the page's key: checked without a second copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiered_kv.keys import KEY_BYTES, PageKey

_Words = np.ndarray[Any, np.dtype[np.uint64]]
_KEY_WORDS = KEY_BYTES // 8


class DerivedContent:
    """The bytes of a page: a fixed random table XOR the key, repeated.

    Word i (8 bytes, little-endian) is ``table[i] ^ key[i % 4]``. Two keys are SHA-256 values, so
    two pages differ in every word; the table differs from word to word, so bytes shifted within a
    page, or one layer's bytes under another's, are seen too. One XOR a page: 64 KiB in 13 us, where
    numpy's Philox seeded by the key takes 115 (one core of a 2-core x86-64 VM, 2026-11).

    Args:
        page_bytes: length of a page; need not be a multiple of 8.
    """

    def __init__(self, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        rows = -(-page_bytes // KEY_BYTES)
        random = np.random.Generator(np.random.Philox(key=0x7469657265646B76))
        self._table: _Words = random.integers(
            0, 2**64, (rows, _KEY_WORDS), dtype=np.uint64, endpoint=False
        )
        self._scratch: _Words = np.empty_like(self._table)

    def of(self, key: PageKey) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The page's bytes, in a buffer that the next call overwrites. Not for several threads."""
        words = np.frombuffer(key, dtype="<u8")
        np.bitwise_xor(self._table, words, out=self._scratch)
        return self._scratch.reshape(-1).view(np.uint8)[: self.page_bytes]
