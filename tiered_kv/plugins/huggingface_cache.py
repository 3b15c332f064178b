"""TieredCache: the KV cache of one call, whose prefix comes from a store and goes back to it."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.keys import KeyChain, Multimodal
from tiered_kv.plugins.huggingface_layer import TieredLayer
from tiered_kv.plugins.huggingface_model import CACHE_ARGUMENT, layer_shapes
from tiered_kv.plugins.huggingface_restore import Pool, Restore
from tiered_kv.plugins.huggingface_rows import Row, rows_of, shared_columns

if TYPE_CHECKING:
    from tiered_kv.store import TieredStore

_CHUNK_TOKENS = 2048  # of a row computed alone, at once
_log = logging.getLogger(__name__)


class TieredCache(DynamicCache):
    """A transformers cache of one or more sequences that starts with what a store has of them.

    Give it to `model.generate` together with the *whole* prompts it was restored for; transformers
    computes only the tokens it lacks. Made by `restore`. It holds a copy of its own: the store may
    evict meanwhile, or close if nothing is to be saved. Not for two threads at once.

    As a context manager it saves on exit what of its prompts is not stored yet.

    Attributes:
        restored_tokens: tokens of all rows that came from the store; 0 makes it an ordinary cache.
        restored_by_tier: how many of them came from which tier, as {"host": 1024, ...}.
        restored_by_row: how many of them each row has.
        computed_tokens: tokens that `restore` has computed with `model`.
    """

    restored_tokens: int
    restored_by_tier: dict[str, int]
    restored_by_row: tuple[int, ...]
    computed_tokens: int

    def __init__(self, store: TieredStore, rows: list[Row], key_options: dict[str, Any]) -> None:
        super().__init__()
        self._store = store
        self._rows = rows
        self._key_options = key_options
        self._pool = Pool(store)
        shapes = layer_shapes(store.layout)
        self._tiered = [TieredLayer(index, shape, len(rows)) for index, shape in enumerate(shapes)]
        self.layers = list(self._tiered)
        self.layer_class_to_replicate = None
        self._is_untouched = True
        self.reset()

    @classmethod
    def restore(
        cls,
        store: TieredStore,
        token_ids: Any,
        *,
        attention_mask: Any = None,
        salt: str = "",
        lora: str = "",
        multimodal: Sequence[Multimodal] = (),
        device: torch.device | str | None = None,
        model: Any = None,
        overlap: bool = True,
    ) -> TieredCache:
        """A cache that holds the longest stored prefix of each prompt, but never all of one.

        The last token is always left to compute, because `generate` needs its logits. A load that
        fails ends the prefix there and is no error. Blocks until it is known how much comes; the
        layers behind the first may still be on their way, and are waited for when they are used.

        transformers computes the same columns of all rows. So a row of which less is stored than of
        the others holds them back, unless `model` is given: then what that row lacks is computed
        here, for it alone, where that leaves less to compute in all.

        Args:
            store: opened with `open_store(model, config)`.
            token_ids: the whole prompts: list, numpy array or tensor, [tokens] or [rows, columns],
                padded on the left.
            attention_mask: of the same shape, 0 for padding; None: nothing is padding.
            salt: tenant; two salts never share a page.
            lora: the adapter in use, "" for none.
            multimodal: images and sounds behind placeholder tokens; for one prompt.
            device: where attention runs; by default where the store's hbm tier is.
            model: computes what single rows lack of the columns that are kept.
            overlap: let layers arrive while the model computes. False: block until all are here; a
                load that is late then shortens the prefix, where it would raise LatePagesError.

        Raises:
            ValueError: no token in a row, or padding that is not on the left.
            LayoutMismatchError: the store's layout is not one that `layout_for` makes.
        """
        rows = rows_of(token_ids, attention_mask)
        if multimodal and len(rows) > 1:
            raise ValueError("multimodal= is of one prompt: restore the rows of a batch singly")
        key_options: dict[str, Any] = {"salt": salt, "lora": lora, "multimodal": multimodal}
        cache = cls(store, rows, key_options)
        where = torch.device(device or store.hbm.device)
        cache._fill(where, model, overlap=overlap)
        return cache

    def save(self, token_ids: Any = None, *, pad_token_id: int | None = None) -> int:
        """Store the full pages that the store lacks; returns how many it took. Blocks.

        A page counts when it has arrived in the host tier. A tail shorter than a page is not
        stored, nor are pages that find no room: the next turn computes them again.

        Args:
            token_ids: every token of the sequences, prompts and replies, as `generate` returns
                them. They must be those the model was given, in that order: only their number and
                the part known already can be verified. None: those of `restore` and earlier calls.
            pad_token_id: what `generate` has put behind rows that ended early. None: nothing.

        Raises:
            ValueError: they do not begin with the tokens known already, or the cache holds fewer.
            LatePagesError: restored pages did not come.
        """
        held = {layer.get_seq_length() for layer in self._tiered}
        if len(held) > 1:
            raise ValueError(
                f"the layers hold different numbers of tokens ({sorted(held)}): "
                "the model did not fill every layer of the store's layout"
            )
        if token_ids is None:
            return self.save_rows()
        lines = token_ids if len(getattr(token_ids, "shape", ())) == 2 else [token_ids]
        if len(lines) != len(self._rows):
            raise ValueError(
                f"token_ids has {len(lines)} sequences, this cache was restored for "
                f"{len(self._rows)}"
            )
        parts = [row.part(line) for row, line in zip(self._rows, lines, strict=True)]
        if pad_token_id is not None:
            parts = [_without_tail(part, pad_token_id) for part in parts]
        return self.save_rows(parts)

    @torch.no_grad()
    def save_rows(self, sequences: Sequence[Any] | None = None) -> int:
        """`save` for rows of any lengths, without padding; what every layer holds of them.

        Args:
            sequences: the tokens of each row; None: those known already.
        """
        held = min(layer.get_seq_length() for layer in self._tiered)
        for layer in self._tiered:
            layer.settle()
        for row, tokens in zip(self._rows, sequences or (), strict=sequences is not None):
            row.extend(tokens, held - row.padding)
        return sum(self._save_row(row, max(0, held - row.padding)) for row in self._rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model: adds new K and V to a layer, returns all of it.

        Raises:
            ValueError: other rows than restored, or more tokens than the prompts have left.
            LayoutMismatchError: K and V are not those of the store's layout.
            LatePagesError: the layer's restored pages did not come.
        """
        if layer_idx >= len(self._tiered):
            raise LayoutMismatchError(
                f"the model has a layer {layer_idx}, the store's layout has {len(self._tiered)} "
                "layers: make it with layout_for(model)"
            )
        if layer_idx == 0:
            self._refuse_another_prompt(key_states.shape[-2])
        self._is_untouched = False
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Drop all tokens, restored ones too; the store keeps its own."""
        super().reset()  # type: ignore[no-untyped-call]
        self.restored_tokens, self.restored_by_tier = 0, {}
        self.restored_by_row = (0,) * len(self._rows)
        self.computed_tokens = 0
        self._prompt_left = 0  # columns still to compute of a prompt that was begun by a restore

    def activate_past_recording(self) -> None:
        """Called by assisted decoding before it computes anything.

        Raises:
            ConfigError: always, but on a device of kind mps, where plain search calls it too.
        """
        if self._is_untouched or self._tiered[0].device.type != "mps":
            raise _refusal("assisted decoding recomputes the whole prompt on top of a filled cache")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Called by beam search; refused."""
        raise _refusal("beam search moves rows over one another")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Called by contrastive search; refused."""
        raise _refusal("contrastive search repeats the rows of a cache")

    def batch_select_indices(self, indices: Tensor) -> None:
        """Called by contrastive search; refused."""
        raise _refusal("contrastive search picks rows of a cache")

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.save_rows()
        except Exception:
            if error is None:
                raise
            _log.exception("what was computed before the error could not be saved")

    # -- inside ------------------------------------------------------------------------------------

    def _fill(self, device: torch.device, model: Any, *, overlap: bool) -> None:
        """Bring what is stored into the layers, and count the columns that all rows have."""
        for layer in self._tiered:
            layer.reserve(self._rows[0].columns, device)
            for row in self._rows:
                layer.blank(row.index, row.padding)
        can_compute = model is not None
        with Restore(self._store, self._pool, self._tiered, self._rows) as restore:
            restore.begin(self._wanted(can_compute=can_compute))
            columns = self._columns([row.pages for row in self._rows], can_compute)
            is_behind = any(self._end(row) < columns for row in self._rows)
            if not overlap or not columns or is_behind:
                restore.finish()
                columns = self._columns([row.pages for row in self._rows], can_compute)
            for layer in self._tiered:
                layer.keep(columns)
            self._count_restored(columns)
            restore.stream(device)
        for row in self._rows:
            if self._end(row) < columns:
                self._compute(model, row, columns)

    def _wanted(self, *, can_compute: bool) -> list[KeyChain]:
        """For each row the keys of the pages to ask for: those in columns that will be kept."""
        chains = [self._store.keys(row.tokens[:-1], **self._key_options) for row in self._rows]
        stored = [self._store.match(keys).pages for keys in chains]
        columns = self._columns(stored, can_compute)
        used = [-(-max(0, columns - row.padding) // self._pool.page_tokens) for row in self._rows]
        return [
            keys[:use] if use < pages else keys  # what is not stored is asked for: a counted miss
            for keys, use, pages in zip(chains, used, stored, strict=True)
        ]

    def _columns(self, pages: Sequence[int], can_compute: bool) -> int:
        ends = [
            row.padding + count * self._pool.page_tokens
            for row, count in zip(self._rows, pages, strict=True)
        ]
        return shared_columns(self._rows, ends, can_compute=can_compute)

    def _end(self, row: Row) -> int:
        """Where the restored pages of a row end."""
        return row.padding + row.pages * self._pool.page_tokens

    def _count_restored(self, columns: int) -> None:
        page_tokens, by_tier, by_row = self._pool.page_tokens, Counter[str](), []
        for row in self._rows:
            used = max(0, min(columns, self._end(row)) - row.padding)
            by_row.append(used)
            for page, tier in enumerate(row.tiers[: -(-used // page_tokens)]):
                by_tier[tier] += min(page_tokens, used - page * page_tokens)
        self.restored_by_row, self.restored_by_tier = tuple(by_row), dict(by_tier)
        self.restored_tokens = sum(by_row)
        self._prompt_left = self._rows[0].columns - columns if columns else 0

    @torch.no_grad()
    def _compute(self, model: Any, row: Row, columns: int) -> None:
        """Have the model fill a row up to the column where the others are."""
        first, end = row.pages * self._pool.page_tokens, columns - row.padding
        alone = DynamicCache()
        layers = [layer.row(row.index, row.padding, first) for layer in self._tiered]
        alone.layers = list(layers)
        alone.layer_class_to_replicate = None
        takes = inspect.signature(model.forward).parameters
        options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        options[CACHE_ARGUMENT] = alone
        for at in range(first, end, _CHUNK_TOKENS):
            tokens = row.tokens[at : min(end, at + _CHUNK_TOKENS)].astype(np.int64)
            ids = torch.from_numpy(tokens)[None].to(model.device)
            model(input_ids=ids, use_cache=True, **options)
        for layer, own in zip(self._tiered, layers, strict=True):
            layer.take(row.index, row.padding, own)
        self.computed_tokens += end - first

    def _save_row(self, row: Row, held: int) -> int:
        """Put the pages of a row that the store lacks; `held` tokens of it have K and V."""
        keys = self._store.keys(row.tokens[:held], **self._key_options)
        first = start = self._store.match(keys).pages
        while first < len(keys) and (slots := self._allocate(len(keys) - first)):
            taken = self._put(keys[first : first + len(slots)], row, first, slots)
            first += taken
            if taken < len(slots):
                break
        return first - start

    def _put(self, keys: KeyChain, row: Row, first: int, slots: list[int]) -> int:
        """Fill slots of the pool with pages first, first + 1, ... and hand them to the store."""
        try:
            for index, layer in enumerate(self._tiered):
                self._pool.write(index, slots, layer, row, first)
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

    def _refuse_another_prompt(self, new_columns: int) -> None:
        """What is computed behind a restored prefix is the rest of its prompt, or a chunk of it."""
        if not self._prompt_left:
            return
        if new_columns > self._prompt_left:
            raise ValueError(
                f"the model computes {new_columns} tokens, {self._prompt_left} are left of the "
                f"prompt behind {self.get_seq_length()}: give generate() the prompt given to "
                "restore(), and no assistant_model or prompt_lookup_num_tokens (they ignore what a "
                "cache holds)"
            )
        self._prompt_left -= new_columns


def _without_tail(tokens: np.ndarray[Any, Any], pad_token_id: int) -> np.ndarray[Any, Any]:
    """The tokens up to the last that is not padding."""
    real = np.flatnonzero(tokens != pad_token_id)
    return tokens[: real[-1] + 1 if len(real) else 0]


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"TieredCache takes greedy search and sampling alone: {why}")
