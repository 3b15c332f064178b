"""How fast a prompt is computed, by a real model where there is one."""

from __future__ import annotations

import inspect
import time
from importlib.util import find_spec
from pathlib import Path

from tiered_kv.bench.settings import BreakEvenSettings
from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout
from tiered_kv.replay.engines.models import TINY_MODELS, LoadedModel, load_model

_PROMPT_TOKENS = 2048
_SMOKE_TOKENS = 64
_WITHIN_S = 60.0
_LEAST_SAMPLES = 3
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def layout_and_model(settings: BreakEvenSettings) -> tuple[KVLayout, LoadedModel | None]:
    """The layout that `model` names, and the model itself if its prefill must be measured.

    Raises:
        ConfigError: no such model, or neither a prefill rate nor weights to measure one with.
    """
    model, rate = settings.model, settings.prefill_tokens_per_s
    if not model:
        raise ConfigError(
            "--model: is required: the config.json of a model or the directory that holds it, or "
            f"one of {', '.join(TINY_MODELS)}"
        )
    has_transformers = find_spec("transformers") is not None
    if model in TINY_MODELS:
        if not has_transformers:
            raise ConfigError(
                f"--model {model}: needs transformers: pip install 'tiered-kv[hf]', or give the "
                "config.json of a model"
            )
        loaded = load_model(model, dtype="float32", device=_device(settings), seed=0)
        dtype = "float32" if settings.dtype == "auto" else settings.dtype
        layout = KVLayout.from_model_config(loaded.config, settings.page_tokens, dtype=dtype)
        return layout, loaded if rate is None else None
    layout = KVLayout.from_model_config(model, settings.page_tokens, dtype=settings.dtype)
    if rate is not None:
        return layout, None
    if not _has_weights(Path(model)):
        raise ConfigError(_RATE_NEEDED.format(f"{model} has no weights to measure it with"))
    if not has_transformers:
        raise ConfigError(_RATE_NEEDED.format("it is measured by transformers, which is missing"))
    return layout, load_model(model, dtype=_weights_dtype(model), device=_device(settings), seed=0)


def _weights_dtype(model: str) -> str:
    """The config's, not the KV cache's; float32 where it names none."""
    try:
        return KVLayout.from_model_config(model).dtype
    except ConfigError:
        return "float32"


_RATE_NEEDED = (
    "--prefill-tokens-per-s: is required: {}; give what your engine computes, such as 8000"
)


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(next(path.glob(names), None) for names in _WEIGHTS)


def _device(settings: BreakEvenSettings) -> str:
    from tiered_kv.store import resolve_device

    return resolve_device(settings.device)


def tokens_per_s(loaded: LoadedModel, settings: BreakEvenSettings, notes: list[str]) -> list[float]:
    """Rates of computing one prompt of 2,048 tokens (or what the model takes), with its KV kept.

    As many as were asked for, fewer if they would take over a minute, but 3. Adds to the notes what
    they are.
    """
    import torch

    model = loaded.model
    tokens = _SMOKE_TOKENS if settings.smoke else _PROMPT_TOKENS
    tokens = min(tokens, loaded.max_tokens or tokens)
    device = next(model.parameters()).device
    ids = torch.arange(tokens, device=device)[None] % loaded.vocabulary
    takes = inspect.signature(model.forward).parameters
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
    taken: list[float] = []
    begun = time.monotonic()
    with torch.inference_mode():
        for repeat in range(settings.repeats + 1):
            started = time.perf_counter()
            model(input_ids=ids, use_cache=True, **last_only)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:
                taken.append(time.perf_counter() - started)
            if len(taken) >= _LEAST_SAMPLES and time.monotonic() - begun > _WITHIN_S:
                break
    notes.append(
        f"prefill: {len(taken)} prompts of {tokens:,} tokens by transformers on {device}, one at a "
        "time; an engine's own rate is better where you know it (--prefill-tokens-per-s)"
    )
    return [tokens / seconds for seconds in taken]
