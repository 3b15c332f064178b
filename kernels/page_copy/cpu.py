"""Batches of pages between a layer-first pool in host memory and the rows of a matrix.

One call of numpy moves many pieces and holds no interpreter lock meanwhile. A loop of one copy a
page is as fast on an idle machine and starves on a busy one: it asks for the lock after every page,
and beside a thread that runs Python it waits 5 ms for it each time. Pages of 64 KiB, 32 layers:
3.5 GB/s alone and 0.11 beside such a thread, as batches 4.1 and 2.1 (2 x Xeon 2.8 GHz, numpy 2.4,
2026-11).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np

from tiered_kv.kernels.page_copy.rows import Bytes, Numbers, Rows

Chunks = np.ndarray[Any, np.dtype[np.void]]
"""Pieces of equal length as opaque items: numpy moves each by one memcpy."""

# One call for a stretch of rows that follow one another; shorter ones are not worth it.
_STRETCH_BYTES = 256 << 10
# Rows apart pass through a buffer that stays in the cache: 2.8 GB/s at 64 KiB, 2.6 with 1 MiB.
_BUFFER_BYTES = 256 << 10
# From here on a copy a page is as long as a call need be.
_LONG_BYTES = 1 << 20


def pays(pages: Sequence[Bytes], pool: Bytes) -> TypeGuard[Rows]:
    """Whether a batch is better moved here than page by page."""
    return isinstance(pages, Rows) and len(pages) > 1 and 0 < _part_bytes(pool) < _LONG_BYTES


def gather(pool: Bytes, slots: Sequence[int], rows: Rows, offset: int) -> None:
    """rows[i][offset + l * B : offset + (l + 1) * B] = pool[l, slots[i]] for all layers l.

    Args:
        pool: uint8 ``[layers, pages, B]``.
        slots: which page of the pool goes to which row, one to one.
        rows: their rows; none twice.
        offset: where the first layer begins in a row.
    """
    source, target = _chunks(pool), _pieces(rows, offset, pool)
    is_block = _is_block(rows.numbers)
    if is_block and _is_block(slots):
        target[_block(rows.numbers)] = source[:, _block(slots)].T
        return
    wanted = np.array(slots, dtype=np.intp)
    if is_block and len(rows) * _part_bytes(pool) <= _BUFFER_BYTES:  # 64 of 2 KiB: 0.44 of the time
        target[_block(rows.numbers)] = source[:, wanted].T
        return
    layers = np.arange(len(source))
    is_whole = source.flags.c_contiguous and target.flags.c_contiguous
    stretches, apart = rows.stretches(_least(rows, pool) if is_whole else len(rows) + 1)
    for start, at in stretches:
        which = wanted[at, None] + layers * source.shape[1]
        np.take(source.reshape(-1), which, out=target[start : start + len(which)], mode="clip")
    for some in _buffers(apart, pool):
        numbers = [rows.numbers[at] for at in some]
        if len(some) == 1:
            target[numbers[0]] = source[:, wanted[some[0]]]
        else:
            target[numbers] = source[:, wanted[some]].T


def scatter(pool: Bytes, slots: Sequence[int], rows: Rows, offset: int) -> None:
    """pool[l, slots[i]] = rows[i][offset + l * B : offset + (l + 1) * B] for all layers l.

    The arguments are those of `gather`; no slot twice.
    """
    target, source = _chunks(pool), _pieces(rows, offset, pool)
    if _is_block(slots) and _is_block(rows.numbers):
        target[:, _block(slots)] = source[_block(rows.numbers)].T
        return
    wanted = np.array(slots, dtype=np.intp)
    stretches, apart = rows.stretches(_least(rows, pool))
    for start, at in stretches:
        which = wanted[at]
        target[:, which] = source[start : start + len(which)].T
    for some in _buffers(apart, pool):
        numbers = [rows.numbers[at] for at in some]
        if len(some) == 1:
            target[:, wanted[some[0]]] = source[numbers[0]]
        else:
            target[:, wanted[some]] = source[numbers].T


def _chunks(pool: Bytes) -> Chunks:
    """The pool as ``[layers, pages]`` pieces."""
    pieces: Chunks = pool.view(np.dtype((np.void, pool.shape[2])))[..., 0]
    return pieces


def _pieces(rows: Rows, offset: int, pool: Bytes) -> Chunks:
    """Of every row of the matrix what belongs to the pool, as ``[rows, layers]`` pieces."""
    layers, _, layer_bytes = pool.shape
    part = rows.matrix[:, offset : offset + layers * layer_bytes]
    pieces: Chunks = part.view(np.dtype((np.void, layer_bytes)))
    return pieces


def _is_block(numbers: Sequence[int]) -> bool:
    """Whether they follow one another: a slice takes a fifth of the time where pieces are tiny."""
    return list(numbers) == list(range(numbers[0], numbers[0] + len(numbers)))


def _block(numbers: Sequence[int]) -> slice:
    return slice(numbers[0], numbers[0] + len(numbers))


def _least(rows: Rows, pool: Bytes) -> int:
    """So many rows that follow one another are worth a call of their own, or all there are."""
    return min(len(rows), -(-_STRETCH_BYTES // _part_bytes(pool)))


def _part_bytes(pool: Bytes) -> int:
    """What one page has in the pool."""
    return int(pool.shape[0] * pool.shape[2])


def _buffers(apart: Numbers, pool: Bytes) -> Iterator[Numbers]:
    """Rows in groups of about a buffer, or one by one where each fills one."""
    step = max(1, _BUFFER_BYTES // _part_bytes(pool))
    return (apart[at : at + step] for at in range(0, len(apart), step))
