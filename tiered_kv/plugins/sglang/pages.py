"""HostPages: the pages of one host pool of SGLang as memory, without a copy where that goes."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tiered_kv.errors import ConfigError
from tiered_kv.storage.base import PageBuffer

_GEOMETRY = (
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "num_mamba_layers",
)
_ONE_ORDER = ("page_first", "page_first_direct", "page_head")
"""Layouts of which SGLang's flat pages hold the same bytes in the same order as its pointers."""


class HostPages:
    """One host pool. Only looks at its memory; whose pages may be touched is SGLang's business.

    Args:
        name: of the pool, as SGLang calls it: "kv", "mamba", "swa", ...
        pool: SGLang's `HostKVCache`, or what stands in its place.

    Attributes:
        page_tokens: host indices a page has.
        page_bytes: of a page; 1 for a pool that has places and no bytes (`is_logical`), whose pages
            are kept as marks.
        pages: how many the pool has.
        is_flat: its pages can be had as copies alone.

    Raises:
        ConfigError: its pages can be had in no way.
    """

    def __init__(self, name: str, pool: Any) -> None:
        self.name = name
        self._pool = pool
        self.page_tokens = int(getattr(pool, "page_size", 1) or 1)
        if getattr(pool, "shard_size", 1) > 1:
            raise ConfigError(
                "SGLang shards the pages of this model's KV over its ranks, which tiered-kv does "
                "not know: start without a storage backend, or with another one"
            )
        if getattr(pool, "_is_dummy", False):
            raise ConfigError(
                "SGLang keeps the host pages of this model on its first rank alone: start it with "
                "the storage backend, do not attach one later"
            )
        self.pages = max(1, int(getattr(pool, "size", 0)) // self.page_tokens)
        self.is_flat = False
        meta = self._probe()
        self.is_logical = meta is None
        self._part_bytes: tuple[int, ...] = (1,) if meta is None else tuple(meta)
        self.page_bytes = sum(self._part_bytes)

    def _probe(self) -> list[int] | None:
        """Bytes of each part of a page; None if it has none."""
        try:
            meta = self._pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (NotImplementedError, ValueError, AttributeError):  # not in this layout
            meta = self._probe_flat()
            self.is_flat = True
        return [int(n) for n in meta[1]] if meta and sum(meta[1]) else None

    def _probe_flat(self) -> tuple[None, list[int]]:
        try:
            self._pool.get_data_page(0, flat=True)
            return None, [bytes_of(self._pool.get_dummy_flat_data_page()).nbytes]
        except (NotImplementedError, ValueError, AttributeError) as error:
            layout = getattr(self._pool, "layout", "?")
            raise ConfigError(
                f"SGLang gives no access to the pages of its {self.name} pool with "
                f"--hicache-mem-layout {layout} ({error}): choose page_first"
            ) from error

    @property
    def is_one_order(self) -> bool:
        """Whether a page has the same bytes in its parts as in SGLang's flat form of it."""
        return self.is_flat or getattr(self._pool, "layout", "") in _ONE_ORDER

    def fingerprint(self, *identity: str) -> str:
        """SHA-256 (hex) of all that the bytes of a page depend on.

        Args:
            identity: what the pool does not know: the model, its ranks, its dtype by name.
        """
        facts: dict[str, Any] = {"version": "sglang/1", "identity": identity, "pool": self.name}
        for name in _GEOMETRY:
            value = getattr(self._pool, name, None)
            facts[name] = value if isinstance(value, int) else None
        facts["dtype"] = str(getattr(self._pool, "dtype", None))
        facts["layout"] = str(getattr(self._pool, "layout", None))
        facts["is_flat"] = self.is_flat
        facts["page_tokens"] = self.page_tokens
        facts["part_bytes"] = self._part_bytes
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def check(self, host_indices: torch.Tensor, keys: int) -> None:
        """Check that indices are those of as many pages.

        Raises:
            ValueError: they are not.
        """
        if host_indices is None or host_indices.numel() != keys * self.page_tokens:
            given = 0 if host_indices is None else host_indices.numel()
            raise ValueError(
                f"{self.name}: {given} host indices for {keys} pages of {self.page_tokens}"
            )

    def sources(self, host_indices: torch.Tensor) -> list[list[PageBuffer]]:
        """The bytes of pages to be stored, each in its parts: the pool's own memory, or copies."""
        if self.is_logical:
            return [[np.zeros(1, np.uint8)] for _ in range(self._pages_of(host_indices))]
        if self.is_flat:
            first = host_indices[:: self.page_tokens].tolist()
            return [[bytes_of(self._pool.get_data_page(at, flat=True))] for at in first]
        return self._views(host_indices)

    def targets(self, host_indices: torch.Tensor) -> list[list[PageBuffer]]:
        """Where pages are to be read to: the pool's own memory, or memory to `deliver` from."""
        if self.is_logical:
            return self.sources(host_indices)
        if self.is_flat:
            count = self._pages_of(host_indices)
            return [[np.empty(self.page_bytes, np.uint8)] for _ in range(count)]
        return self._views(host_indices)

    def deliver(
        self,
        host_indices: torch.Tensor,
        targets: Sequence[Sequence[PageBuffer]],
        came: Sequence[bool],
    ) -> None:
        """Put pages that came into the pool, where they were not read into it."""
        if not self.is_flat or self.is_logical:
            return
        first = host_indices[:: self.page_tokens].tolist()
        dtype = self._pool.get_dummy_flat_data_page().dtype
        for at, target, is_here in zip(first, targets, came, strict=True):
            if is_here:
                page = torch.from_numpy(target[0]).view(dtype)
                self._pool.set_from_flat_data_page(at, page)

    def _pages_of(self, host_indices: torch.Tensor) -> int:
        return host_indices.numel() // self.page_tokens

    def _views(self, host_indices: torch.Tensor) -> list[list[PageBuffer]]:
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        width = len(self._part_bytes)
        parts = [_view(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]
        return [parts[at : at + width] for at in range(0, len(parts), width)]


def _view(pointer: int, n_bytes: int) -> PageBuffer:
    """Memory of somebody else, who keeps it for as long as the view is used."""
    memory: Any = (ctypes.c_uint8 * n_bytes).from_address(pointer)
    view: PageBuffer = np.frombuffer(memory, np.uint8)
    return view


def bytes_of(tensor: torch.Tensor) -> PageBuffer:
    """The bytes of a tensor: its own memory if it is contiguous, else a copy."""
    flat: PageBuffer = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return flat
