"""An engine with a real model: every turn is answered from the store, then again from nothing."""

from __future__ import annotations

import inspect
import time
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tiered_kv.errors import ConfigError
from tiered_kv.plugins.huggingface import CACHE_ARGUMENT, TieredCache
from tiered_kv.replay.engines.models import LoadedModel
from tiered_kv.replay.requests import TIERS, IdArray, Outcome, Request, as_ids
from tiered_kv.store import TieredStore

_WARM_UP_TOKENS = 512


class HuggingFaceEngine:
    """Greedy answers by a transformers model: on restored pages, then again from nothing.

    Both ways run the same code on the same machine one after the other, so their times and outputs
    can be compared. Time to first token with the store includes finding and loading the pages;
    saving the new ones comes after the answer and is not part of it.

    Args:
        store: opened with the model's own layout.
        loaded: the model.
    """

    name = "hf"

    def __init__(self, store: TieredStore, loaded: LoadedModel) -> None:
        self._store = store
        self._loaded = loaded
        self._model = loaded.model
        self._device = next(loaded.model.parameters()).device
        takes = inspect.signature(loaded.model.forward).parameters
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        self._tolerance = logit_tolerance(next(loaded.model.parameters()).dtype)
        self._warm_up()

    def serve(self, request: Request) -> Outcome:
        """Answer one prompt, with the store and without."""
        self._refuse_too_long(request)
        start = time.perf_counter()
        cache = TieredCache.restore(self._store, request.ids, device=self._device)
        reply, logits, first_s = self._answer(request, cache, start)
        cache.save(np.concatenate([request.ids, reply]))
        start = time.perf_counter()
        expected, expected_logits, recompute_s = self._answer(request, DynamicCache(), start)
        difference = float((logits - expected_logits).abs().max())
        allowed = self._tolerance * max(1.0, float(expected_logits.abs().max()))
        reused = {tier: cache.restored_by_tier.get(tier, 0) for tier in TIERS}
        return Outcome(
            reused_tokens=reused,
            ttft_store_s=first_s,
            ttft_recompute_s=recompute_s,
            outputs_equal=bool(np.array_equal(reply, expected)) and difference <= allowed,
            reply_ids=reply if request.reply_ids is None else request.reply_ids,
            logit_difference=difference,
        )

    @torch.inference_mode()
    def _answer(
        self, request: Request, cache: Any, start: float
    ) -> tuple[IdArray, torch.Tensor, float]:
        """Greedy tokens, the first one's logits, and the seconds from `start` to the first."""
        prompt = torch.from_numpy(request.ids[cache.get_seq_length() :].astype(np.int64))
        first_logits = self._forward(prompt, cache)
        token = int(first_logits.argmax())
        first_s = time.perf_counter() - start
        reply = [token]
        for _ in range(request.reply_tokens - 1):
            token = int(self._forward(torch.tensor([token]), cache).argmax())
            reply.append(token)
        return as_ids(reply), first_logits.float(), first_s

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        output = self._model(
            input_ids=ids[None].to(self._device),
            use_cache=True,
            **{CACHE_ARGUMENT: cache},
            **self._last_logits_only,
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _warm_up(self) -> None:
        """Two unmeasured answers: the first call of a process pays for its threads and memory."""
        tokens = min(_WARM_UP_TOKENS, (self._loaded.max_tokens or _WARM_UP_TOKENS) - 2)
        ids = as_ids(np.arange(tokens) % self._loaded.vocabulary)
        for _ in range(2):
            self._answer(Request(None, None, 0.0, ids, tokens, 2), DynamicCache(), 0.0)

    def _refuse_too_long(self, request: Request) -> None:
        longest = self._loaded.max_tokens
        tokens = request.prompt_tokens + request.reply_tokens
        if longest is not None and tokens > longest:
            raise ConfigError(
                f"--model {self._loaded.name}: holds {longest} tokens, but prompt and answer need "
                f"{tokens}; give shorter conversations (--context-tokens, --limit) or another model"
            )


def logit_tolerance(dtype: torch.dtype) -> float:
    """By how much a first token's logits may differ, as a share of the largest (at least 1).

    A prompt computed in two parts is summed in another order than in one. 1e-5 in float32; types
    with fewer bits get as many of their own rounding steps.
    """
    steps = 1e-5 / torch.finfo(torch.float32).eps
    return steps * torch.finfo(dtype).eps
