"""One layer of a `TieredCache`: K and V of its rows in a room that grows.

`DynamicLayer` copies the whole layer for every token it adds. This one writes new tokens behind the
old ones in place, and pages go straight into the room: a restored prefix is copied once.

Shapes: B = rows (sequences), H = K/V heads, T = columns (tokens and padding), P = tokens a page,
D = width of one head.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tiered_kv.errors import LayoutMismatchError, TieredKVError
from tiered_kv.plugins.huggingface_model import LayerShape

try:
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError(
        "tiered_kv.plugins.huggingface needs transformers 5.0 or newer: pip install 'tiered-kv[hf]'"
    ) from error

GROWTH_TOKENS = 256  # added at once: one copy of the layer every 256 tokens


class TieredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """K and V of one layer, [B, H, T, D] each, as `DynamicLayer` has them, but with room behind.

    Layers with a sliding window keep every token too, because their pages must be whole: to
    transformers' masks this is a layer that starts at token 0, and they do the windowing.

    Restored pages may still be on their way (`expect`): how many columns there are is known, and
    whoever asks for K or V first waits for them.
    """

    def __init__(self, index: int, shape: LayerShape, rows: int = 1) -> None:
        self._index = index
        self._shape = shape
        self._rows = rows
        self._room: tuple[Tensor, Tensor] | None = None
        self._held: dict[str, Tensor | None] = {}
        self._arrive: Callable[[], None] | None = None
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def keys(self) -> Tensor | None:
        """K of all columns; blocks until restored pages have arrived."""
        return self._arrived("keys")

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        self._held["keys"] = keys

    @property
    def values(self) -> Tensor | None:
        """V of all columns; blocks until restored pages have arrived."""
        return self._arrived("values")

    @values.setter
    def values(self, values: Tensor | None) -> None:
        self._held["values"] = values

    def _arrived(self, side: str) -> Tensor | None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
        return self._held[side]

    def get_seq_length(self, *args: Any) -> int:
        """Columns, those still on their way included; does not wait."""
        keys = self._held["keys"]
        return 0 if keys is None or keys.numel() == 0 else int(keys.shape[-2])

    def reserve(self, columns: int, device: torch.device) -> None:
        """Make room for the columns of an empty layer, and for what is generated after them."""
        shape = self._shape
        keys, values = (
            torch.empty(
                (self._rows, shape.heads, columns + GROWTH_TOKENS, dim),
                dtype=shape.dtype,
                device=device,
            )
            for dim in (shape.key_dim, shape.value_dim)
        )
        self._room = keys, values

    def blank(self, row: int, columns: int) -> None:
        """Zero the first columns of a row: padding is masked, but 0 times a NaN is a NaN."""
        assert self._room is not None
        for side in self._room:
            side[row, :, :columns] = 0

    def keep(self, columns: int) -> None:
        """Count the first columns of the room as present."""
        assert self._room is not None
        keys, values = self._room
        self.keys, self.values = keys[:, :, :columns], values[:, :, :columns]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def expect(self, arrive: Callable[[], None]) -> None:
        """Some of the columns kept are on their way: `arrive` blocks until they are here."""
        self._arrive = arrive

    def settle(self) -> None:
        """Bring K and V back into the room if transformers has put tensors of its own instead."""
        keys, values = self.keys, self.values
        if keys is not None and values is not None and self.get_seq_length():
            self._write(keys.detach()[:, :, :0], values.detach()[:, :, :0])

    def pages(self, row: int, column: int, page_tokens: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of `count` pages of a row from a column on, as views [count, H, P, D]."""
        assert self._room is not None
        columns = slice(column, column + count * page_tokens)
        keys, values = (
            side[row, :, columns]
            .view(side.shape[1], count, page_tokens, side.shape[3])
            .transpose(0, 1)
            for side in self._room
        )
        return keys, values

    def row(self, row: int, column: int, tokens: int) -> TieredLayer:
        """One row from a column on as a layer of its own, in the same room, of so many tokens."""
        assert self._room is not None
        alone = TieredLayer(self._index, self._shape)
        keys, values = (side[row : row + 1, :, column:] for side in self._room)
        alone._room = keys, values
        alone.keep(tokens)
        return alone

    def take(self, row: int, column: int, alone: TieredLayer) -> None:
        """Have what was added to a `row`, wherever it was put (layers may be on other devices)."""
        assert self._room is not None and alone._room is not None
        tokens = alone.get_seq_length()
        for ours, theirs in zip(self._room, alone._room, strict=True):
            place = ours[row : row + 1, :, column : column + tokens]
            if place.data_ptr() != theirs.data_ptr():
                place.copy_(theirs[:, :, :tokens])

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new K and V behind the old; views of all of it, valid until the next call."""
        self._refuse_other_shapes(key_states, value_states)
        if torch.is_grad_enabled() and key_states.requires_grad:
            # training: what is written in place cannot be differentiated
            return super().update(key_states, value_states, *args, **kwargs)
        return self._write(key_states, value_states)

    def reset(self) -> None:
        """Drop all columns and the room, once nobody writes to it any more."""
        if self._arrive is not None:
            with suppress(TieredKVError):
                self._arrive()
        self._arrive = None
        self.keys = self.values = None
        self._room = None
        self.is_initialized = False

    def _write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before = self.get_seq_length()
        seen_keys, seen_values = (self.keys, self.values) if before else (None, None)
        room_keys, room_values = self._room or (None, None)
        self._room = (
            _extended(room_keys, seen_keys, keys),
            _extended(room_values, seen_values, values),
        )
        self.keep(before + keys.shape[-2])
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _refuse_other_shapes(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape[0] != self._rows:
            raise ValueError(
                f"the model computes {keys.shape[0]} sequences, this cache was restored for "
                f"{self._rows}: give generate() the prompts given to restore(), without "
                "num_beams > 1 or num_return_sequences > 1"
            )
        shape = LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], keys.dtype)
        if shape != self._shape:
            raise LayoutMismatchError(
                f"layer {self._index} of the model makes {shape}, the store's layout has "
                f"{self._shape}: make it with layout_for(model)"
            )


def _extended(room: Tensor | None, seen: Tensor | None, new: Tensor) -> Tensor:
    """The room with `seen` at its start and `new` behind; another room if this one will not do."""
    before = 0 if seen is None else seen.shape[-2]
    columns = before + new.shape[-2]
    if (
        room is None
        or room.shape[-2] < columns
        or room.device != new.device
        or (room.is_inference() and not torch.is_inference_mode_enabled())
        or (seen is not None and seen.data_ptr() != room.data_ptr())
    ):
        shape = (*new.shape[:2], columns + GROWTH_TOKENS, new.shape[-1])
        room = torch.empty(shape, dtype=new.dtype, device=new.device)
        if seen is not None:
            room[:, :, :before] = seen
    room[:, :, before:columns] = new
    return room
