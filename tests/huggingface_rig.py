"""What the tests of the Hugging Face plugin stand on: tiny random models, stores for them, turns.

The weights are larger than transformers draws them, so that attention decides the tokens: K and V
that are wrong by a little give other logits than 1e-5 allows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tiered_kv.config import StoreConfig
from tiered_kv.plugins.huggingface import CACHE_ARGUMENT, TieredCache, layout_for, open_store
from tiered_kv.store import TieredStore

transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]

PAGE_TOKENS = 16
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
}
WINDOW = {"sliding_window": 24}  # much shorter than any context below
TWO_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**WINDOW, **TWO_KINDS, "head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**WINDOW, **TWO_KINDS, "head_dim": 16}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**WINDOW, **TWO_KINDS, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", LATENT),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
}


def build_model(name: str, seed: int = 7, **changes: Any) -> Any:
    model_class, config_class, extra = MODELS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **extra, **changes})
    torch.manual_seed(seed)
    return getattr(transformers, model_class)(config).eval()


shared_model = functools.cache(build_model)


def small_store(
    model: Any,
    directory: Path | None = None,
    *,
    hbm_pages: int = 16,
    host_pages: int = 64,
    device: str = "cpu",
) -> TieredStore:
    layout = layout_for(model, PAGE_TOKENS)
    config = StoreConfig.parse(
        hbm=hbm_pages * layout.page_bytes,
        host=host_pages * layout.page_bytes,
        disk=directory,
        disk_size=None if directory is None else "64MiB",
        device=device,
    )
    return open_store(model, config, PAGE_TOKENS)


def on_one_thread() -> Iterator[None]:
    """Matrices this small lose time on a second thread, and much of it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_tokens(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (1, count), generator=generator)


def generate(model: Any, prompt: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    output: torch.Tensor = model.generate(prompt, **given, **options)
    return output


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    output: torch.Tensor = model(tokens, **given).logits
    return output


def converse(model: Any, store: TieredStore, prompt: torch.Tensor) -> torch.Tensor:
    """One turn: restore, generate, save all of it."""
    cache = TieredCache.restore(store, prompt)
    output = generate(model, prompt, cache)
    cache.save(output)
    return output


def padded(prompts: Sequence[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [1, tokens] as one batch, padded on the left, and its attention mask."""
    width = max(prompt.shape[1] for prompt in prompts)
    gaps = [width - prompt.shape[1] for prompt in prompts]
    lines = [
        torch.nn.functional.pad(prompt, (gap, 0), value=pad)
        for prompt, gap in zip(prompts, gaps, strict=True)
    ]
    mask = torch.ones((len(prompts), width), dtype=torch.long)
    for row, gap in enumerate(gaps):
        mask[row, :gap] = 0
    return torch.cat(lines), mask


class Passes:
    """Counts what a model computes inside a `with` block: the columns of every forward pass."""

    def __init__(self, model: Any) -> None:
        self.columns: list[tuple[int, int]] = []  # (rows, columns)
        self._model = model

    def __enter__(self) -> Passes:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            self.columns.append(tuple(kwargs["input_ids"].shape))

        self._hook = self._model.register_forward_pre_hook(note, with_kwargs=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()


def kept_by(cache: Any, layer: int | None = None) -> list[torch.Tensor]:
    """K and V of every layer in turn, or of one."""
    layers = cache.layers if layer is None else [cache.layers[layer]]
    return [side for layer in layers for side in (layer.keys, layer.values)]


def whole_pages(tokens: int) -> int:
    return tokens // PAGE_TOKENS * PAGE_TOKENS
