"""Attached HBM: an engine's own KV tensors, read and written as if they were a pool of ours.

An engine keeps blocks, not pages: layers that share a block table form a *group*, and a page is one
block of every group, so that a slot here is a tuple of block ids packed into one integer. Layers of
a group that lie at a constant distance in memory are copied as one run, whatever the order of
layers and blocks; where all layers of a block are neighbours, a page moves in one copy a group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tiered_kv.errors import TieredKVError
from tiered_kv.kernels.page_copy.api import Run, gather_pages, scatter_pages
from tiered_kv.kernels.page_copy.rows import selected
from tiered_kv.storage.base import PageBuffer, check_batch
from tiered_kv.storage.hbm import layer_steps

NULL_BLOCK = 0
"""The block id that stands for "nothing kept here": never written, never read."""


class AttachedLayer(NamedTuple):
    """One layer of an engine's cache.

    Attributes:
        group: the block table it goes by, from 0.
        tensor: uint8 ``[blocks, layer bytes]``; a block is contiguous, their distance is free. A
            view: the memory stays the engine's.
    """

    group: int
    tensor: torch.Tensor


def pack_blocks(block_ids: Sequence[int], blocks: int) -> int:
    """The slot that stands for one block a group; with one group the block id itself.

    Args:
        block_ids: of every group in turn, `NULL_BLOCK` where a group keeps nothing of the page.
        blocks: how many the engine has.

    Raises:
        ValueError: an id outside 0..blocks-1, or none at all.
    """
    if not block_ids:
        raise ValueError("a slot needs a block id of at least one group")
    slot = 0
    for block in reversed(block_ids):
        if not 0 <= block < blocks:
            raise ValueError(f"block {block} is outside 0..{blocks - 1}")
        slot = slot * blocks + block
    return slot


def unpack_blocks(slot: int, groups: int, blocks: int) -> tuple[int, ...]:
    """The block ids that `pack_blocks` packed, one a group.

    Raises:
        ValueError: no packing of so many ids gives this slot.
    """
    ids = []
    rest = slot
    for _ in range(groups):
        rest, block = divmod(rest, blocks)
        ids.append(block)
    if rest:
        raise ValueError(f"slot {slot} is outside 0..{blocks**groups - 1}")
    return tuple(ids)


class AttachedHbm:
    """An engine's KV tensors as HBM. Owns no memory, reserves no slots: the engine does both.

    A page is group after group, and within a group its layers in execution order; with one group,
    simply the layers in execution order. Layers of different groups may alias the same bytes, as
    engines with several block tables over one pool let them: a block belongs to one group at a
    time.

    Args:
        layers: in execution order; as many blocks in each, all on one device.
        layerwise: whether a page is written in several steps, so that early layers can be used
            while late ones are still arriving; else in one, which costs less.
        groups: how many block tables there are; None: the highest group of a layer, plus one.

    Attributes:
        page_bytes: bytes of a page.
        layers: the layers' tensors, in execution order.
        layer_steps: ranges [first, last) of layers that are written in one go.
        device: where the tensors are.
        blocks: blocks of the engine; the radix of `pack_blocks`.
        groups: block ids in a slot.

    Raises:
        ValueError: layers that do not fit together, or one that is not bytes.
    """

    def __init__(
        self, layers: Sequence[AttachedLayer], *, layerwise: bool, groups: int | None = None
    ) -> None:
        _check(layers)
        self.layers = [layer.tensor for layer in layers]
        self.device = self.layers[0].device
        self.blocks = self.layers[0].shape[0]
        self.groups = 1 + max(layer.group for layer in layers) if groups is None else groups
        self._members = [
            [at for at, layer in enumerate(layers) if layer.group == group]
            for group in range(self.groups)
        ]
        self._runs: list[list[Run]] = []
        self.page_bytes = 0
        for members in self._members:
            tensors = [self.layers[at] for at in members]
            self._runs.append(list(_runs(tensors, self.page_bytes)))
            self.page_bytes += sum(tensor.shape[1] for tensor in tensors)
        sizes = [layer.shape[1] for layer in self.layers]
        self.layer_steps = layer_steps(sizes, self.device) if layerwise else [(0, len(layers))]

    def write_layers(
        self, slots: Sequence[int], pages: Sequence[PageBuffer], first: int, last: int
    ) -> None:
        """Scatter layers [first, last) of host pages into slots; a null block is passed over.

        On a GPU it only enqueues the copies on the current stream: the pages must stay until it is
        through.

        Raises:
            ValueError: not one page a slot, a page too short, or a slot out of range.
        """
        rows = self._unpacked(slots)
        if len(rows) != len(pages):
            raise ValueError(f"{len(rows)} slots and {len(pages)} pages: they must be one to one")
        for group, (members, runs) in enumerate(zip(self._members, self._runs, strict=True)):
            low, high = bisect_left(members, first), bisect_left(members, last)
            there = [at for at, row in enumerate(rows) if row[group] != NULL_BLOCK]
            if low < high and there:
                blocks = [rows[at][group] for at in there]
                kept = pages if len(there) == len(pages) else selected(pages, there)
                scatter_pages(runs, blocks, kept, low, high)

    def read(self, slots: Sequence[int], into: Sequence[PageBuffer]) -> list[TieredKVError | None]:
        """Gather slots into host pages; returns when the bytes are there.

        Raises:
            ValueError: a slot with a null block, out of range, or not one buffer of exactly a page
                for each.
        """
        check_batch(slots, into, self.page_bytes)
        rows = self._unpacked(slots)
        for row in rows:
            if NULL_BLOCK in row:
                raise ValueError(f"blocks {row} cannot be read: {NULL_BLOCK} is the null block")
        for group, runs in enumerate(self._runs):
            if runs:
                gather_pages(runs, [row[group] for row in rows], into)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return [None] * len(slots)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole pages from slot to slot; on a GPU enqueued on the current stream.

        A null block as target is passed over.

        Raises:
            ValueError: a null block as the source of one that is none.
        """
        rows = zip(self._unpacked(sources), self._unpacked(targets), strict=True)
        pairs = [
            (runs, source, target)
            for row in rows
            for runs, source, target in zip(self._runs, *row, strict=True)
            if target != NULL_BLOCK
        ]
        for _, source, target in pairs:
            if source == NULL_BLOCK:
                raise ValueError(f"nothing to copy to block {target}: its source is the null block")
        for runs, source, target in pairs:
            for run in runs:
                run.pool[:, target].copy_(run.pool[:, source], non_blocking=True)

    def _unpacked(self, slots: Sequence[int]) -> list[tuple[int, ...]]:
        return [unpack_blocks(slot, self.groups, self.blocks) for slot in slots]


def _check(layers: Sequence[AttachedLayer]) -> None:
    if not layers:
        raise ValueError("an engine without layers keeps no KV")
    blocks, device = layers[0].tensor.shape[0], layers[0].tensor.device
    for at, (group, tensor) in enumerate(layers):
        if tensor.dtype != torch.uint8 or tensor.ndim != 2 or tensor.stride(1) != 1:
            raise ValueError(f"layer {at} must be uint8 [blocks, bytes] with contiguous blocks")
        if tensor.shape[0] != blocks or tensor.device != device or group < 0:
            raise ValueError(
                f"layer {at} has {tensor.shape[0]} blocks on {tensor.device}, group {group}: "
                f"all must have {blocks} on {device}, group 0 or above"
            )


def _runs(tensors: Sequence[torch.Tensor], page_offset: int) -> Iterable[Run]:
    """The layers of one group as few runs: equal size, one storage, a constant distance."""
    first = 0
    while first < len(tensors):
        count = 1
        while first + count < len(tensors) and _goes_on(tensors[first : first + count + 1]):
            count += 1
        pool = _pool(tensors[first : first + count])
        yield Run(first, page_offset, pool)
        first, page_offset = first + count, page_offset + count * pool.shape[2]


def _goes_on(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the last of these tensors lies as far behind the one before as the others do."""
    *_, before, last = tensors
    distance = last.data_ptr() - before.data_ptr()
    return (
        last.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and (last.shape, last.stride()) == (before.shape, before.stride())
        and distance > 0
        and (len(tensors) == 2 or distance == tensors[1].data_ptr() - tensors[0].data_ptr())
    )


def _pool(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One view ``[layers, blocks, bytes]`` of them all."""
    head = tensors[0]
    distance = tensors[1].data_ptr() - head.data_ptr() if len(tensors) > 1 else head.shape[1]
    return head.as_strided(
        (len(tensors), *head.shape), (distance, *head.stride()), head.storage_offset()
    )
