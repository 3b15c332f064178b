"""Hugging Face transformers: a KV cache whose prefix comes from a store and goes back to it.

::

    layout = layout_for(model, page_tokens=64)
    config = StoreConfig(hbm="8GiB", host="64GiB", model_name=model_fingerprint(model))
    with TieredStore.open(layout, config) as store:
        cache = TieredCache.restore(store, input_ids)
        output = model.generate(input_ids, **{CACHE_ARGUMENT: cache})
        cache.save(output)

For transformers 5.0 and newer, decoders that keep K and V of every past token (full, sliding and
chunked attention; MHA, GQA, MQA and MLA), one sequence at a time. What is not supported is refused
in one line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tiered_kv.errors import LayoutMismatchError
from tiered_kv.keys import KeyChain, Multimodal, as_token_array
from tiered_kv.plugins.huggingface_layer import TieredLayer
from tiered_kv.plugins.huggingface_model import (
    CACHE_ARGUMENT,
    layer_shapes,
    layout_for,
    model_fingerprint,
)

if TYPE_CHECKING:
    import numpy as np

    from tiered_kv.store import TieredStore

__all__ = ["CACHE_ARGUMENT", "TieredCache", "layout_for", "model_fingerprint"]


class TieredCache(DynamicCache):
    """A transformers cache of one sequence that starts with what a store has of it.

    Give it to `model.generate` together with the *whole* prompt it was restored for, not padded;
    transformers computes only the tokens it lacks. Made by `restore`. It holds a copy of its own:
    the store may evict meanwhile, or close if nothing is to be saved. Not for two threads at once.

    Attributes:
        restored_tokens: leading tokens that came from the store; 0 makes it an ordinary cache.
        restored_by_tier: how many of them came from which tier, as {"host": 1024, ...}.
    """

    restored_tokens: int
    restored_by_tier: dict[str, int]

    def __init__(self, store: TieredStore, token_ids: Any, key_options: dict[str, Any]) -> None:
        super().__init__()
        self._store = store
        self._tokens = _one_sequence(token_ids)
        self._key_options = key_options
        self._page_tokens = store.layout.page_tokens
        self._shapes = layer_shapes(store.layout)
        self._tiered = [TieredLayer(index, shape) for index, shape in enumerate(self._shapes)]
        self.layers = list(self._tiered)
        self.layer_class_to_replicate = None
        self._is_untouched = True
        self.restored_tokens = 0
        self.restored_by_tier = {}

    @classmethod
    def restore(
        cls,
        store: TieredStore,
        token_ids: Any,
        *,
        salt: str = "",
        lora: str = "",
        multimodal: Sequence[Multimodal] = (),
        device: torch.device | str | None = None,
    ) -> TieredCache:
        """A cache that holds the longest stored prefix of a prompt, but never all of it; blocks.

        The last token is always left to compute, because `generate` needs its logits. Pages are
        copied out of the store's hbm tier, in pieces where the prefix is larger than that tier. A
        load that fails ends the prefix there and is no error.

        Args:
            store: opened with `layout_for(model)` and `model_name=model_fingerprint(model)`.
            token_ids: the whole prompt: list, numpy array or tensor, [tokens] or [1, tokens].
            salt: tenant; two salts never share a page.
            lora: the adapter in use, "" for none.
            multimodal: images and sounds behind placeholder tokens.
            device: where attention runs; by default where the store's hbm tier is.

        Raises:
            ValueError: no token, or more than one sequence.
            LayoutMismatchError: the store's layout is not one that `layout_for` makes.
        """
        key_options: dict[str, Any] = {"salt": salt, "lora": lora, "multimodal": multimodal}
        cache = cls(store, token_ids, key_options)
        if len(cache._tokens) == 0:
            raise ValueError("token_ids is empty: generate() needs at least one token")
        where = torch.device(device or store.hbm.device)
        for layer in cache._tiered:
            layer.reserve(len(cache._tokens), where)
        cache._load(store.keys(cache._tokens[:-1], **key_options))
        return cache

    @torch.no_grad()
    def save(self, token_ids: Any = None) -> int:
        """Store the full pages that the store lacks; returns how many it took. Blocks.

        A page counts when it has arrived in the host tier. A tail shorter than a page is not
        stored, nor are pages that find no room: the next turn computes them again.

        Args:
            token_ids: every token of the sequence, prompt and reply, as `generate` returns them.
                They must be those the model was given, in that order: only their number and the
                part known already can be verified. None: those of `restore` and earlier calls.

        Raises:
            ValueError: they do not begin with the tokens known already, or the cache holds fewer.
        """
        held = self._held_tokens()
        if token_ids is not None:
            self._tokens = self._continued(token_ids, held)
        keys = self._store.keys(self._tokens[:held], **self._key_options)
        first = start = self._store.match(keys).pages
        for layer in self._tiered:
            layer.settle()
        while first < len(keys) and (slots := self._allocate(len(keys) - first)):
            taken = self._put(keys[first : first + len(slots)], first, slots)
            first += taken
            if taken < len(slots):
                break
        return first - start

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model: adds new K and V to a layer, returns all of it.

        Raises:
            ValueError: more than one sequence, or more tokens than the prompt has left.
            LayoutMismatchError: K and V are not those of the store's layout.
        """
        if layer_idx >= len(self._tiered):
            raise LayoutMismatchError(
                f"the model has a layer {layer_idx}, the store's layout has {len(self._tiered)} "
                "layers: make it with layout_for(model)"
            )
        if self._is_untouched:
            self._refuse_another_prompt(key_states.shape[-2])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Drop all tokens, restored ones too; the store keeps its own."""
        super().reset()  # type: ignore[no-untyped-call]
        self.restored_tokens, self.restored_by_tier = 0, {}

    def _load(self, keys: KeyChain) -> None:
        """Copy the longest prefix of `keys` that the store can bring into the layers."""
        store, tiers = self._store, Counter[str]()
        stored, pages = store.match(keys).pages, 0
        while pages < len(keys):
            # No more than fits at once: a page asked for is not evicted to make room for another.
            end = pages + store.hbm.capacity_pages
            with store.get(keys[pages:end] if end < stored else keys[pages:]) as load:
                for index in range(len(self._tiered)):
                    arriving = load.wait_layer(index)
                    self._copy(index, pages, load.slots[:arriving], into_pool=False)
                arrived = load.wait()
                tiers.update(load.tiers[:arrived])
            if arrived == 0:
                break
            pages += arrived
        self.restored_tokens = pages * self._page_tokens
        self.restored_by_tier = {tier: n * self._page_tokens for tier, n in tiers.items()}
        for layer in self._tiered:
            layer.keep(self.restored_tokens)

    def _put(self, keys: KeyChain, first: int, slots: list[int]) -> int:
        """Fill slots of the pool with pages first, first + 1, ... and hand them to the store."""
        try:
            for index in range(len(self._tiered)):
                self._copy(index, first, slots, into_pool=True)
        except BaseException:
            self._store.hbm.release(slots)
            raise
        return self._store.put(keys, slots).wait()

    def _allocate(self, pages: int) -> list[int] | None:
        """Slots for as many of the pages as find room now."""
        while pages:
            slots = self._store.hbm.allocate(pages)
            if slots is not None:
                return slots
            pages //= 2
        return None

    def _copy(self, index: int, first: int, slots: Sequence[int], *, into_pool: bool) -> None:
        """Copy pages first, first + 1, ... of one layer into these slots, or out of them."""
        layer, pool = self._tiered[index], self._pool_views(index)
        for offset, slot, count in _runs(slots):
            pages = layer.pages(self._page_tokens, first + offset, count)
            for ours, theirs in zip(pages, pool, strict=True):
                if into_pool:
                    theirs[slot : slot + count].copy_(ours)
                else:
                    ours.copy_(theirs[slot : slot + count])

    def _pool_views(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer in every slot of the hbm tier, as views [slots, H, P, D]."""
        shape, page_tokens = self._shapes[index], self._page_tokens
        pool = self._store.hbm.layers[index].view(shape.dtype)
        cut = shape.heads * page_tokens * shape.key_dim
        return (
            pool[:, :cut].view(-1, shape.heads, page_tokens, shape.key_dim),
            pool[:, cut:].view(-1, shape.heads, page_tokens, shape.value_dim),
        )

    def _refuse_another_prompt(self, new_tokens: int) -> None:
        """The first tokens computed must fit behind the restored prefix, or outputs are wrong."""
        left = len(self._tokens) - self.restored_tokens
        if self.restored_tokens and new_tokens > left:
            raise ValueError(
                f"the model computes {new_tokens} tokens, {left} are left of the prompt behind the "
                f"{self.restored_tokens} restored: give generate() the prompt given to restore(), "
                "and no assistant_model or prompt_lookup_num_tokens (they ignore a cache's content)"
            )
        self._is_untouched = False

    def _held_tokens(self) -> int:
        held = {layer.get_seq_length() for layer in self._tiered}
        if len(held) > 1:
            raise ValueError(
                f"the layers hold different numbers of tokens ({sorted(held)}): "
                "the model did not fill every layer of the store's layout"
            )
        return held.pop()

    def _continued(self, token_ids: Any, held: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The given tokens, or the known ones if those go further; raises unless they agree."""
        tokens = _one_sequence(token_ids)
        if len(tokens) > held + 1:  # generate() returns one token more than it has K and V of
            raise ValueError(f"token_ids has {len(tokens)} tokens, the cache holds only {held}")
        common = min(len(tokens), len(self._tokens))
        different = (tokens[:common] != self._tokens[:common]).nonzero()[0]
        if different.size:
            raise ValueError(
                f"token_ids differs at token {different[0]} from what the cache was restored for: "
                "give the whole sequence, prompt and reply"
            )
        return tokens if len(tokens) > len(self._tokens) else self._tokens


def _one_sequence(token_ids: Any) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Token ids as an array of one dimension, from [tokens] or [1, tokens]."""
    if len(getattr(token_ids, "shape", ())) == 2:
        if token_ids.shape[0] != 1:
            raise ValueError(f"TieredCache holds one sequence, not a batch of {token_ids.shape[0]}")
        token_ids = token_ids[0]
    return as_token_array(token_ids)


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(offset, first slot, count) of every run of consecutive slots: each is one copy."""
    offset = 0
    while offset < len(slots):
        end = offset + 1
        while end < len(slots) and slots[end] == slots[end - 1] + 1:
            end += 1
        yield offset, slots[offset], end - offset
        offset = end
