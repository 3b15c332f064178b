"""Copy pages between a layer-first pool and contiguous host pages.

On a CPU pages that are `Rows` of one matrix go in few calls a batch (`cpu.py`), others one by one;
on a GPU every layer of a page is one asynchronous copy on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tiered_kv.kernels.page_copy import cpu, reference
from tiered_kv.kernels.page_copy.rows import Bytes, check_numbers, shapes_of


class Run(NamedTuple):
    """Consecutive layers of equal size.

    Attributes:
        first_layer: the first of them.
        page_offset: where they begin in a page, in bytes.
        pool: uint8 ``[layers, pages, layer bytes]``.
    """

    first_layer: int
    page_offset: int
    pool: torch.Tensor


def gather_pages(runs: Sequence[Run], slots: Sequence[int], into: Sequence[Bytes]) -> None:
    """Fill one host page a slot. On a GPU it only enqueues: synchronize before the pages are read.

    Raises:
        ValueError: a page shorter than the runs, or not one a slot.
        IndexError: a slot that the pool does not have.
    """
    _validate(runs, slots, into)
    for run in runs:
        layers, _, layer_bytes = run.pool.shape
        end = run.page_offset + layers * layer_bytes
        if run.pool.device.type == "cpu":
            pool = run.pool.numpy()
            if cpu.pays(into, pool):
                cpu.gather(pool, slots, into, run.page_offset)
                continue
            for slot, page in zip(slots, into, strict=True):
                target = page[run.page_offset : end].reshape(layers, layer_bytes)
                np.copyto(target, pool[:, slot])
        else:
            for slot, page in zip(slots, into, strict=True):
                reference.gather_run(run.pool, slot, torch.from_numpy(page[run.page_offset : end]))


def scatter_pages(
    runs: Sequence[Run], slots: Sequence[int], pages: Sequence[Bytes], first: int, last: int
) -> None:
    """Write layers [first, last) of one host page a slot into the pool; on a GPU it only enqueues.

    Raises:
        ValueError: a page shorter than the runs, or not one a slot.
        IndexError: a slot that the pool does not have.
    """
    _validate(runs, slots, pages)
    for run in runs:
        layers, _, layer_bytes = run.pool.shape
        low = max(first - run.first_layer, 0)
        high = min(last - run.first_layer, layers)
        if low >= high:
            continue
        start = run.page_offset + low * layer_bytes
        end = run.page_offset + high * layer_bytes
        if run.pool.device.type == "cpu":
            pool = run.pool.numpy()[low:high]
            if cpu.pays(pages, pool):
                cpu.scatter(pool, slots, pages, start)
                continue
            for slot, page in zip(slots, pages, strict=True):
                np.copyto(pool[:, slot], page[start:end].reshape(high - low, layer_bytes))
        else:
            tensors = [torch.from_numpy(page[start:end]) for page in pages]
            reference.scatter_run(run.pool[low:high], slots, tensors)


def _validate(runs: Sequence[Run], slots: Sequence[int], pages: Sequence[Bytes]) -> None:
    if len(slots) != len(pages):
        raise ValueError(f"{len(slots)} slots and {len(pages)} pages: they must be one to one")
    check_numbers(slots, runs[0].pool.shape[1])
    last = runs[-1]
    page_bytes = last.page_offset + last.pool.shape[0] * last.pool.shape[2]
    for *_, length in shapes_of(pages):
        if length < page_bytes:
            raise ValueError(f"a page of {length} bytes where {page_bytes} are needed")
