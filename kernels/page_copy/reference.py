"""Gather and scatter of pages in plain torch: the truth, and what runs on any device.

A pool is ``[layers, pages, layer bytes]``; a page in host memory is its layers one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_run(pool: torch.Tensor, slot: int, page: torch.Tensor) -> None:
    """page[l * B : (l + 1) * B] = pool[l, slot] for every layer l of one run."""
    layer_bytes = pool.shape[2]
    for layer in range(pool.shape[0]):
        at = layer * layer_bytes
        page[at : at + layer_bytes].copy_(pool[layer, slot], non_blocking=True)


def scatter_run(pool: torch.Tensor, slots: Sequence[int], pages: Sequence[torch.Tensor]) -> None:
    """pool[l, slot] = page[l * B : (l + 1) * B] for every page, layer by layer."""
    layer_bytes = pool.shape[2]
    for layer in range(pool.shape[0]):
        at = layer * layer_bytes
        for slot, page in zip(slots, pages, strict=True):
            pool[layer, slot].copy_(page[at : at + layer_bytes], non_blocking=True)
