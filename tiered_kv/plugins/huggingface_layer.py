"""One layer of a `TieredCache`: K and V of one sequence in a room that grows.

`DynamicLayer` copies the whole layer for every token it adds. This one writes new tokens behind the
old ones in place, and pages go straight into the room: a restored prefix is copied once.

Shapes: H = K/V heads, T = tokens, P = tokens a page, D = width of one head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiered_kv.errors import LayoutMismatchError
from tiered_kv.plugins.huggingface_model import LayerShape

try:
    from transformers.cache_utils import DynamicLayer
except ImportError as error:
    raise ImportError(
        "tiered_kv.plugins.huggingface needs transformers 5.0 or newer: pip install 'tiered-kv[hf]'"
    ) from error

GROWTH_TOKENS = 256  # added at once: one copy of the layer every 256 tokens


class TieredLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """K and V of one layer, [1, H, T, D] each, as `DynamicLayer` has them, but with room behind.

    Layers with a sliding window keep every token too, because their pages must be whole: to
    transformers' masks this is a layer that starts at token 0, and they do the windowing.
    """

    def __init__(self, index: int, shape: LayerShape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index = index
        self._shape = shape
        self._room: tuple[Tensor, Tensor] | None = None

    def reserve(self, tokens: int, device: torch.device) -> None:
        """Make room for `tokens` of an empty layer, and for what is generated after them."""
        shape = self._shape
        keys, values = (
            torch.empty(
                (1, shape.heads, tokens + GROWTH_TOKENS, dim), dtype=shape.dtype, device=device
            )
            for dim in (shape.key_dim, shape.value_dim)
        )
        self._room = keys, values

    def keep(self, tokens: int) -> None:
        """Count the first `tokens` of the room as present."""
        assert self._room is not None
        keys, values = self._room
        self.keys, self.values = keys[:, :, :tokens], values[:, :, :tokens]
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def settle(self) -> None:
        """Bring K and V back into the room if transformers has put tensors of its own instead."""
        keys, values = self.keys, self.values
        if keys is not None and values is not None and self.get_seq_length():
            self._write(keys.detach()[:, :, :0], values.detach()[:, :, :0])

    def pages(self, page_tokens: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of pages [first, first + count) of the room, as views [count, H, P, D]."""
        assert self._room is not None
        tokens = slice(first * page_tokens, (first + count) * page_tokens)
        keys, values = (
            side[0, :, tokens]
            .view(side.shape[1], count, page_tokens, side.shape[3])
            .transpose(0, 1)
            for side in self._room
        )
        return keys, values

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
        """Drop all tokens and the room."""
        self.keys = self.values = None
        self._room = None
        self.is_initialized = False

    def _write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        before = self.get_seq_length()
        room_keys, room_values = self._room or (None, None)
        self._room = (
            _extended(room_keys, self.keys if before else None, keys),
            _extended(room_values, self.values if before else None, values),
        )
        self.keep(before + keys.shape[-2])
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def _refuse_other_shapes(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape[0] != 1:
            raise ValueError(
                f"TieredCache holds one sequence, not a batch of {keys.shape[0]}: "
                "no batches, num_beams > 1 or num_return_sequences > 1"
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
    tokens = before + new.shape[-2]
    if (
        room is None
        or room.shape[-2] < tokens
        or room.device != new.device
        or (room.is_inference() and not torch.is_inference_mode_enabled())
        or (seen is not None and seen.data_ptr() != room.data_ptr())
    ):
        shape = (*new.shape[:2], tokens + GROWTH_TOKENS, new.shape[-1])
        room = torch.empty(shape, dtype=new.dtype, device=new.device)
        if seen is not None:
            room[:, :, :before] = seen
    room[:, :, before:tokens] = new
    return room
