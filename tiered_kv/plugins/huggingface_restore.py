"""Pages between a store's hbm tier and the rows of a `TieredCache`.

A restore asks for the pages of every row and waits until it is known how many come. What fits into
the hbm tier at once is then copied layer by layer on a stream of its own, while the model computes:
a layer waits for its own pages alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiered_kv.errors import StoreClosedError, TieredKVError
from tiered_kv.keys import KeyChain
from tiered_kv.plugins.huggingface_layer import TieredLayer
from tiered_kv.plugins.huggingface_model import layer_shapes
from tiered_kv.plugins.huggingface_rows import Row
from tiered_kv.streams import Event, Stream, caller_event, open_stream
from tiered_kv.transfer import Transfer

if TYPE_CHECKING:
    from tiered_kv.store import TieredStore


class Pool:
    """The store's hbm tier as K and V of each layer: what pages are copied out of and into.

    Holds views of it, which stay valid though the store be closed.
    """

    def __init__(self, store: TieredStore) -> None:
        self.page_tokens = store.layout.page_tokens
        if not store.hbm.layers:
            raise StoreClosedError("the store is closed: nothing can be restored or saved")
        self._layers: list[tuple[Tensor, Tensor]] = []
        for shape, layer in zip(layer_shapes(store.layout), store.hbm.layers, strict=True):
            pool = layer.view(shape.dtype)
            cut = shape.heads * self.page_tokens * shape.key_dim
            keys, values = (
                side.view(-1, shape.heads, self.page_tokens, dim)
                for side, dim in ((pool[:, :cut], shape.key_dim), (pool[:, cut:], shape.value_dim))
            )
            self._layers.append((keys, values))

    def read(
        self, index: int, slots: Sequence[int], layer: TieredLayer, row: Row, page: int
    ) -> None:
        """Copy one layer of these slots into pages `page`, `page` + 1, ... of a row."""
        for ours, theirs in self._pairs(index, slots, layer, row, page):
            ours.copy_(theirs)

    def write(
        self, index: int, slots: Sequence[int], layer: TieredLayer, row: Row, page: int
    ) -> None:
        """Copy one layer of pages `page`, `page` + 1, ... of a row into these slots."""
        for ours, theirs in self._pairs(index, slots, layer, row, page):
            theirs.copy_(ours)

    def _pairs(
        self, index: int, slots: Sequence[int], layer: TieredLayer, row: Row, page: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(view of the row, view of the pool), each [pages, H, P, D]: one pair a copy."""
        for offset, slot, count in _runs(slots):
            column = row.padding + (page + offset) * self.page_tokens
            pages = layer.pages(row.index, column, self.page_tokens, count)
            for ours, theirs in zip(pages, self._layers[index], strict=True):
                yield ours, theirs[slot : slot + count]


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(offset, first slot, count) of every run of consecutive slots: each is one copy."""
    offset = 0
    while offset < len(slots):
        end = offset + 1
        while end < len(slots) and slots[end] == slots[end - 1] + 1:
            end += 1
        yield offset, slots[offset], end - offset
        offset = end


@dataclass(slots=True)
class _Piece:
    """Pages of a row that one transfer brings, from page `first` on; leased until copied."""

    row: Row
    first: int
    load: Transfer
    pages: int = 0


class LatePagesError(TieredKVError):
    """Pages that were counted on did not come while the model was computing."""


class Restore:
    """Brings what a store has of some rows into the layers of a cache.

    `begin`, then either `finish` (all is here, the rows say how much) or `stream` (the rows say how
    much is coming). Use it in a `with` block: whatever happens, every lease is given back.

    Args:
        layers: with room for the rows, nothing kept yet.
        rows: which of their pages come is noted in them.
    """

    def __init__(
        self, store: TieredStore, pool: Pool, layers: Sequence[TieredLayer], rows: Sequence[Row]
    ) -> None:
        self._store = store
        self._pool = pool
        self._layers = layers
        self._rows = rows
        self._pieces: list[_Piece] = []
        self._here = [Event() for _ in layers]
        self._marks: list[Any] = [None] * len(layers)
        self._layers_here = 0
        self._error: BaseException | None = None

    def begin(self, chains: Sequence[KeyChain]) -> None:
        """Ask for the pages of each row's keys; blocks until it is known how many come.

        By then what is on disk has been read and verified, and what did not fit into hbm at once
        has been copied, all but the last of it.
        """
        for row, keys in zip(self._rows, chains, strict=True):
            self._ask(row, keys)

    def _ask(self, row: Row, keys: KeyChain) -> None:
        stored = self._store.match(keys).pages
        is_whole = False
        while not is_whole:
            leased = sum(piece.pages for piece in self._pieces)
            if leased >= self._store.hbm.capacity_pages:
                self.finish()
                leased = 0
            first = row.pages
            # No more than fits: a page asked for is not evicted to make room for another.
            end = first + self._store.hbm.capacity_pages - leased
            load = self._store.get(keys[first:end] if end < stored else keys[first:])
            piece = _Piece(row, first, load)
            self._pieces.append(piece)
            piece.pages = load.wait_layer(0)
            row.tiers += load.tiers[: piece.pages]
            is_whole = row.pages >= stored
            if is_whole or first + piece.pages >= end:
                continue
            lacks_room = any(reason == "no_room" for reason, _ in load.plan.misses)
            if not lacks_room or not (leased or piece.pages):
                return
            self.finish()
            if row.pages < first + piece.pages:
                return

    def finish(self) -> None:
        """Copy what was asked for; blocks. A page that does not come shortens its row."""
        for piece in self._pieces:
            for index, layer in enumerate(self._layers):
                arriving = piece.load.wait_layer(index)
                slots = piece.load.slots[:arriving]
                self._pool.read(index, slots, layer, piece.row, piece.first)
            arrived = piece.load.wait()
            if arrived < piece.pages:
                piece.row.cut(piece.first + arrived)
        self._give_back()

    def stream(self, device: torch.device) -> None:
        """Copy what was asked for while the caller goes on: each layer waits for its own pages.

        Bounded by the deadline of the loads, whether the cache is used or not.
        """
        if not self._pieces:
            return
        stream = open_stream("restore", device)
        for index, layer in enumerate(self._layers):
            layer.expect(partial(self._await, index, device))
        _, start = caller_event(device, None)  # the room's memory may be somebody's until then
        pieces, self._pieces = self._pieces, []
        stream.submit(partial(self._copy, stream, pieces, start))

    def __enter__(self) -> Restore:
        return self

    def __exit__(self, *exception: object) -> None:
        self._give_back()

    def _give_back(self) -> None:
        pieces, self._pieces = self._pieces, []
        _release(pieces)

    def _copy(self, stream: Stream, pieces: Sequence[_Piece], start: Any) -> None:
        try:
            if start is not None:
                torch.cuda.current_stream().wait_event(start)
            with torch.inference_mode():  # a cache made in that mode can be written in no other
                for index in range(len(self._layers)):
                    self._copy_layer(index, pieces)
                    self._marks[index] = stream.mark()
                    self._layers_here = index + 1
                    self._here[index].fire()
        except BaseException as error:  # surfaces where the layer is used
            self._error = error
        finally:
            _release(pieces)
            for event in self._here:
                event.fire()
            stream.close()

    def _copy_layer(self, index: int, pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            if piece.load.wait_layer(index) < piece.pages:
                raise TieredKVError("not before the deadline")
            slots = piece.load.slots[: piece.pages]
            self._pool.read(index, slots, self._layers[index], piece.row, piece.first)

    def _await(self, index: int, device: torch.device) -> None:
        """Block until a layer is here; on a GPU the current stream waits.

        Raises:
            LatePagesError: it did not come.
        """
        self._here[index].wait()
        if index >= self._layers_here:
            raise LatePagesError(
                f"layer {index} of the restored prefix did not come ({self._error}): nothing was "
                "computed from it; restore again, what is missing then is a miss"
            ) from self._error
        if self._marks[index] is not None:
            torch.cuda.current_stream(device).wait_event(self._marks[index])


def _release(pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        piece.load.release()
