"""Pages that do not lie in one piece: an engine keeps K apart from V, or every layer by itself.

They are gathered and scattered by the system call, without a copy, where every part is aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page, PageBuffer

PageParts: TypeAlias = "PageBuffer | Sequence[PageBuffer]"
"""A page in one piece, or in pieces, each uint8, one dimension, contiguous; together a page."""
_BYTE_BY_BYTE = (1,)


@dataclass(frozen=True, slots=True)
class PartedPage:
    """A `Page` in pieces, which follow one another on the medium. They are the caller's, as its."""

    key: PageKey
    parent: PageKey | None
    parts: Sequence[PageBuffer]


def parts_of(page: Page | PartedPage) -> Sequence[PageBuffer]:
    """The pieces of a page to be written, in order."""
    return page.parts if isinstance(page, PartedPage) else (page.data,)


def pieces(buffer: PageParts) -> Sequence[PageBuffer]:
    """The pieces of a buffer to be filled, in order."""
    return (buffer,) if isinstance(buffer, np.ndarray) else buffer


def gather(parts: Sequence[PageBuffer], into: PageBuffer) -> int:
    """Copy pieces one after the other to the start of `into`; returns their bytes."""
    at = 0
    for part in parts:
        into[at : at + part.nbytes] = part
        at += part.nbytes
    return at


def scatter(source: PageBuffer, parts: Sequence[PageBuffer]) -> None:
    """Copy the start of `source` to pieces, in order."""
    at = 0
    for part in parts:
        part[:] = source[at : at + part.nbytes]
        at += part.nbytes


def require_pages(buffers: Iterable[PageParts], page_bytes: int) -> None:
    """Refuse what is not a page, in one piece or in several.

    Raises:
        ValueError: a piece is not one contiguous row, or they are not a page together.
    """
    row = (page_bytes,)
    for buffer in buffers:
        if not (
            isinstance(buffer, np.ndarray)
            and buffer.shape == row
            and buffer.strides == _BYTE_BY_BYTE
        ):
            _require_pieces(pieces(buffer), page_bytes)


def _require_pieces(parts: Sequence[PageBuffer], page_bytes: int) -> None:
    n_bytes = 0
    for part in parts:
        if part.ndim != 1 or not part.flags.c_contiguous:
            n_bytes = -1
            break
        n_bytes += part.nbytes
    if n_bytes != page_bytes:
        shapes = ", ".join(str(part.shape) for part in parts)
        raise ValueError(
            f"a page is one contiguous row of {page_bytes} bytes, or rows that are so many "
            f"together, not of shape {shapes}"
        )
