"""Gather and scatter of pages in plain torch: the truth, and what runs on any device.

A pool is ``[layers, pages, layer bytes]``; a page in host memory is its layers one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def gather_run(pool: torch.Tensor, slot: int, page: torch.Tensor) -> None:
    """page[l * B : (l + 1) * B] = pool[l, slot] for every layer l of one run."""
    layers, _, layer_bytes = pool.shape
    if pool.stride(0) == layer_bytes:  # a slot's layers are neighbours in memory: one copy
        page.view(layers, layer_bytes).copy_(pool[:, slot], non_blocking=True)
        return
    for layer in range(layers):
        at = layer * layer_bytes
        page[at : at + layer_bytes].copy_(pool[layer, slot], non_blocking=True)


def scatter_run(pool: torch.Tensor, slots: Sequence[int], pages: Sequence[torch.Tensor]) -> None:
    """pool[l, slot] = page[l * B : (l + 1) * B] for every page, layer by layer."""
    layers, _, layer_bytes = pool.shape
    if pool.stride(0) == layer_bytes:
        for slot, page in zip(slots, pages, strict=True):
            pool[:, slot].copy_(page.view(layers, layer_bytes), non_blocking=True)
        return
    for layer in range(layers):
        at = layer * layer_bytes
        for slot, page in zip(slots, pages, strict=True):
            pool[layer, slot].copy_(page[at : at + layer_bytes], non_blocking=True)
