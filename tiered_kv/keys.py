"""Page keys: chained SHA-256 over token ids.

A key names a page *and its whole prefix*: ``key_i = SHA-256(key_{i-1} || token bytes || extras)``,
and the first parent is the hash of a `Namespace`. Two pages share a key only if model, layout,
dtype, tenant, adapter and every token before them are the same, in any process and after any
restart: nothing here depends on ``PYTHONHASHSEED``. SHA-256 rather than a faster hash, because a
crafted collision would let one tenant read another's KV; it costs 1.6 us a 64-token page.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType, overload

import numpy as np

PageKey = NewType("PageKey", bytes)
"""32 bytes that name one page and everything before it."""

KEY_BYTES = 32
_MAX_TOKEN = 2**32 - 1


def _field(tag: bytes, value: bytes) -> bytes:
    """One typed, length-prefixed field: no two different field lists share an encoding."""
    return tag + len(value).to_bytes(8, "little") + value


@dataclass(frozen=True, slots=True)
class Namespace:
    """What must be equal before two equal token sequences may share KV.

    Args:
        model: fingerprint of the weights or their name.
        layout: fingerprint of the page geometry and dtype (`KVLayout.fingerprint`).
        salt: tenant salt; two salts never share a page.
        lora: id of the adapter the KV was computed with, "" for none.
    """

    model: str
    layout: str
    salt: str = ""
    lora: str = ""

    def root(self) -> PageKey:
        """The parent of every first page in this namespace."""
        preimage = b"".join(
            (
                _field(b"v", b"tiered-kv/1"),
                _field(b"m", self.model.encode()),
                _field(b"g", self.layout.encode()),
                _field(b"s", self.salt.encode()),
                _field(b"l", self.lora.encode()),
            )
        )
        return PageKey(hashlib.sha256(preimage).digest())


@dataclass(frozen=True, slots=True)
class Multimodal:
    """An image or sound whose placeholder tokens stand at [start, start + length) of the prompt.

    Its content hash enters the key of every page it touches, because placeholder ids are the same
    for every image.
    """

    start: int
    length: int
    content_hash: bytes


class KeyChain(Sequence[PageKey]):
    """Keys of consecutive pages, and the key before the first: what a batch call takes.

    A slice ``chain[a:b]`` is again a chain and knows its parent, so that a store can be given the
    tail of a conversation without being told where it hangs.

    Args:
        keys: keys of consecutive pages, in order.
        parent: key of the page before the first, or None if the first page has no parent.
    """

    __slots__ = ("_keys", "parent")

    def __init__(self, keys: Iterable[PageKey], parent: PageKey | None = None) -> None:
        self._keys = tuple(keys)
        self.parent = parent

    @overload
    def __getitem__(self, index: int) -> PageKey: ...
    @overload
    def __getitem__(self, index: slice) -> KeyChain: ...
    def __getitem__(self, index: int | slice) -> PageKey | KeyChain:
        if isinstance(index, int):
            return self._keys[index]
        start, stop, step = index.indices(len(self._keys))
        if step != 1:
            raise ValueError("a KeyChain is sliced with step 1: its pages are consecutive")
        parent = self._keys[start - 1] if start else self.parent
        return KeyChain(self._keys[start:stop], parent)

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KeyChain):
            return NotImplemented
        return self._keys == other._keys and self.parent == other.parent

    def __hash__(self) -> int:
        return hash((self._keys, self.parent))

    def __repr__(self) -> str:
        first = self._keys[0].hex()[:8] if self._keys else "-"
        return f"KeyChain({len(self._keys)} pages from {first})"


def as_token_array(token_ids: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Token ids as little-endian uint32, from a list, numpy array or torch tensor.

    Raises:
        ValueError: more than one dimension, not integers, or an id outside [0, 2**32).
    """
    if hasattr(token_ids, "detach"):  # a torch tensor, without importing torch
        token_ids = token_ids.detach().cpu().numpy()
    if isinstance(token_ids, list):  # 8 ms a million this way, 70 ms through asarray
        with contextlib.suppress(TypeError, OverflowError):  # what is wrong is said below
            token_ids = np.frombuffer(array("I", token_ids), dtype=np.uint32)
    ids = np.asarray(token_ids)
    if ids.size == 0:
        return np.empty(0, dtype="<u4")
    if ids.ndim != 1:
        raise ValueError(f"token ids must have one dimension, not shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {ids.dtype}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > _MAX_TOKEN:
        raise ValueError(f"token ids must lie in [0, 2**32), found {low if low < 0 else high}")
    return ids.astype("<u4", copy=False)


def page_keys(
    token_ids: Any,
    page_tokens: int,
    namespace: Namespace,
    *,
    multimodal: Sequence[Multimodal] = (),
) -> KeyChain:
    """Keys of the full pages of a prompt; a tail shorter than a page has none.

    Args:
        token_ids: the prompt, as a list, numpy array or torch tensor.
        page_tokens: tokens a page.
        namespace: what else must agree.
        multimodal: images and sounds inside the prompt, hashed into the pages they touch.
    """
    if page_tokens < 1:
        raise ValueError(f"page_tokens must be at least 1, not {page_tokens}")
    tokens = as_token_array(token_ids)
    data = tokens.tobytes()
    width = page_tokens * 4
    sha256 = hashlib.sha256
    extras = _extras_by_page(multimodal, page_tokens) if multimodal else {}
    parent = bytes(namespace.root())
    keys: list[PageKey] = []
    for page, offset in enumerate(range(0, len(data) - width + 1, width)):
        extra = extras.get(page, b"")
        parent = sha256(parent + data[offset : offset + width] + extra).digest()
        keys.append(PageKey(parent))
    return KeyChain(keys)


def _extras_by_page(multimodal: Sequence[Multimodal], page_tokens: int) -> dict[int, bytes]:
    extras: dict[int, bytes] = {}
    for item in sorted(multimodal, key=lambda m: (m.start, m.length, m.content_hash)):
        if item.start < 0 or item.length < 1:
            raise ValueError(f"a multimodal item needs start >= 0 and length >= 1, not {item}")
        first, last = item.start // page_tokens, (item.start + item.length - 1) // page_tokens
        for page in range(first, last + 1):
            where = (item.start - page * page_tokens).to_bytes(8, "little", signed=True)
            field = where + item.length.to_bytes(8, "little") + item.content_hash
            extras[page] = extras.get(page, b"") + _field(b"i", field)
    return extras
