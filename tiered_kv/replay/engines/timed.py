"""An engine without a model: a clock computes, but all bytes are real and verified."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tiered_kv.keys import KeyChain
from tiered_kv.replay.clock import ComputeSpeed, SimulatedClock
from tiered_kv.replay.content import DerivedContent
from tiered_kv.replay.engines.rounds import PromptKeys, load_in_rounds, store_in_rounds
from tiered_kv.replay.requests import Outcome, Request
from tiered_kv.storage.base import PageBuffer
from tiered_kv.store import TieredStore


class TimedEngine:
    """Gets every stored page of a prompt, checks it byte for byte, and puts the pages it lacks.

    A page's bytes follow from its key (`DerivedContent`), so nothing need be remembered to check
    them. Time to first token is the measured time of loading plus the clock's time for the tokens
    not loaded; checking and storing are not part of it.

    Args:
        store: where pages live; its layout sets the size of a page.
        prompt_keys: how prompts are cut into pages.
        speed: how fast computing is.
    """

    name = "timed"

    def __init__(self, store: TieredStore, prompt_keys: PromptKeys, speed: ComputeSpeed) -> None:
        self._store = store
        self._keys = prompt_keys
        self._speed = speed
        self._content = DerivedContent(store.layout.page_bytes)
        self._layer_bytes = store.layout.layer_page_bytes
        self._load_s = 0.0
        self.clock = SimulatedClock()
        self.pages_compared = 0
        self.pages_wrong = 0

    def serve(self, request: Request) -> Outcome:
        """Answer one prompt; where the input has no answer, one is drawn from the prompt."""
        self.clock.wait_until(request.arrival_s)
        keys = self._keys.of_prompt(request)
        wrong_before, self._load_s = self.pages_wrong, 0.0
        tiers = load_in_rounds(keys, self._store.hbm.capacity_pages, self._stored_pages, self._get)
        reused = self._keys.tokens_by_tier(tiers, request.prompt_tokens)
        missing = request.prompt_tokens - sum(reused.values())
        ttft_s = self._load_s + self._speed.prefill_s(missing)
        self.clock.advance(ttft_s + self._speed.decode_s(request.reply_tokens))
        reply = self._keys.reply(request)
        answered = self._keys.of_answered(request, keys, reply)
        store_in_rounds(answered, len(tiers), self._store.hbm.capacity_pages, self._put)
        return Outcome(
            reused_tokens=reused,
            ttft_store_s=ttft_s,
            ttft_recompute_s=self._speed.prefill_s(request.prompt_tokens),
            outputs_equal=self.pages_wrong == wrong_before,
            reply_ids=reply,
        )

    def _stored_pages(self, keys: KeyChain) -> int:
        return self._store.match(keys).pages

    def _get(self, keys: KeyChain) -> list[str]:
        start = time.perf_counter()
        with self._store.get(keys) as load:
            arrived = load.wait()
            self._load_s += time.perf_counter() - start
            self._compare(keys[:arrived], load.slots[:arrived])
            return list(load.tiers[:arrived])

    def _compare(self, keys: KeyChain, slots: Sequence[int]) -> None:
        """Compare every byte of the pages in these HBM slots with what their keys say."""
        for key, slot in zip(keys, slots, strict=True):
            expected = self._content.of(key)
            is_right = True
            for layer, part in self._layer_parts(expected):
                is_right &= np.array_equal(layer[slot].cpu().numpy(), part)
            self.pages_compared += 1
            self.pages_wrong += not is_right

    def _layer_parts(self, page: PageBuffer) -> Iterator[tuple[torch.Tensor, PageBuffer]]:
        """Each layer's pool, with what a page holds of that layer."""
        offset = 0
        for layer, width in zip(self._store.hbm.layers, self._layer_bytes, strict=True):
            yield layer, page[offset : offset + width]
            offset += width

    def _put(self, keys: KeyChain) -> bool:
        slots = self._store.hbm.allocate(len(keys))
        if slots is None:
            return False
        self._fill(keys, slots)
        self._store.put(keys, slots).wait()
        return True

    def _fill(self, keys: KeyChain, slots: Sequence[int]) -> None:
        for key, slot in zip(keys, slots, strict=True):
            for layer, part in self._layer_parts(self._content.of(key)):
                layer[slot].copy_(torch.from_numpy(part))
