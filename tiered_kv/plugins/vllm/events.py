"""KV events: what other processes, such as a router, are told of the pages below the GPU.

vLLM publishes them with its own events of the GPU's blocks. A page is told as the block it holds,
once for every KV cache group, under the medium names of vLLM's native offloading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vllm.config import VllmConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from tiered_kv.keys import PageKey
from tiered_kv.plan import DISK, HOST
from tiered_kv.plugins.vllm.geometry import block_tokens

_MEDIUM = {HOST: MEDIUM_CPU, DISK: MEDIUM_STORAGE}


class EventLog:
    """Events since the last `take`. Not locked: the scheduler side alone uses it.

    Only pages whose block hash it was told can be removed: a key of ours does not give it back.
    Remembers hash and tiers of those, about 300 bytes a page. Make it with `open_event_log`.
    """

    def __init__(self, kv_cache_config: KVCacheConfig) -> None:
        self._groups = [
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in kv_cache_config.kv_cache_groups
        ]
        self._tokens = block_tokens(kv_cache_config)
        self._known: dict[PageKey, tuple[BlockHash, set[str]]] = {}
        self._events: list[KVCacheEvent] = []

    def stored(
        self,
        pages: Mapping[PageKey, bytes],
        tier: str,
        *,
        parent: bytes | None = None,
        token_ids: Sequence[int] = (),
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Pages are in a tier now, "host" or "disk"; said already, it is not said again.

        Args:
            pages: key -> vLLM's block hash; with `token_ids` consecutive ones of one request.
            parent: hash of the block before the first; None at the start of a prompt.
            token_ids: of all these pages. Without them the event carries hashes alone, and a
                block_size of 0 says so, as vLLM's native offloading does it.
            lora_request: the adapter it was computed with.

        Raises:
            ValueError: token ids that are not whole pages of these keys.
        """
        if token_ids and len(token_ids) != len(pages) * self._tokens:
            raise ValueError(
                f"{len(token_ids)} token ids for {len(pages)} pages of {self._tokens} tokens"
            )
        new: list[tuple[int, BlockHash]] = []
        before: list[bytes | None] = [parent, *pages.values()]
        for at, (key, block_hash) in enumerate(pages.items()):
            known, tiers = self._known.setdefault(key, (BlockHash(block_hash), set()))
            if tier not in tiers:
                tiers.add(tier)
                new.append((at, known))
        for first, hashes in _stretches(new):
            self._tell_stored(
                hashes,
                _MEDIUM[tier],
                before[first],
                token_ids[first * self._tokens : (first + len(hashes)) * self._tokens],
                lora_request,
            )

    def _tell_stored(
        self,
        hashes: Sequence[BlockHash],
        medium: str,
        parent: bytes | None,
        token_ids: Sequence[int],
        lora_request: LoRARequest | None,
    ) -> None:
        for group, (kind, window) in enumerate(self._groups):
            self._events.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(h) for h in hashes],
                    parent_block_hash=(
                        maybe_convert_block_hash(BlockHash(parent))
                        if parent is not None and token_ids
                        else None
                    ),
                    token_ids=list(token_ids),
                    block_size=self._tokens if token_ids else 0,
                    lora_id=lora_request.adapter_id if lora_request else None,
                    medium=medium,
                    lora_name=lora_request.name if lora_request else None,
                    group_idx=group,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                )
            )

    def removed(self, keys: Sequence[PageKey], tier: str) -> None:
        """Pages are in a tier no more; of those it was never told of nothing is said."""
        hashes = []
        for key in keys:
            block_hash, tiers = self._known.get(key, (b"", set()))
            if tier in tiers:
                hashes.append(maybe_convert_block_hash(BlockHash(block_hash)))
                tiers.discard(tier)
                if not tiers:
                    del self._known[key]
        if hashes:
            self._events += [
                BlockRemoved(block_hashes=hashes, medium=_MEDIUM[tier], group_idx=group)
                for group in range(len(self._groups))
            ]

    def hash_of(self, key: PageKey) -> bytes | None:
        """The block hash of a page that is in some tier, if it was told."""
        return self._known[key][0] if key in self._known else None

    def cleared(self) -> None:
        """All pages of all tiers are gone."""
        for tier in _MEDIUM:
            self.removed(list(self._known), tier)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events


def open_event_log(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EventLog | None:
    """A log if the user has switched KV events on, else None."""
    events = vllm_config.kv_events_config
    if events is None or not events.enable_kv_cache_events:
        return None
    return EventLog(kv_cache_config)


def _stretches(pages: Sequence[tuple[int, BlockHash]]) -> list[tuple[int, list[BlockHash]]]:
    """Neighbouring pages together: (number of the first, hashes)."""
    stretches: list[tuple[int, list[BlockHash]]] = []
    for at, block_hash in pages:
        if stretches and at == stretches[-1][0] + len(stretches[-1][1]):
            stretches[-1][1].append(block_hash)
        else:
            stretches.append((at, [block_hash]))
    return stretches
