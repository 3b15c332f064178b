"""Configs of published models, cut down to what sizes their KV cache."""

from __future__ import annotations

import json
from typing import Any

from tiered_kv.layout import KVLayout

KIB, MIB, GIB = 2**10, 2**20, 2**30
Config = dict[str, Any]


def config_of(model: str, facts: str, **more: Any) -> Config:
    """A config.json, its numbers written as words `key=value`; bfloat16 unless said otherwise."""
    numbers = {key: json.loads(value) for key, value in (word.split("=") for word in facts.split())}
    return {"model_type": model, "torch_dtype": "bfloat16", **numbers, **more}


def plain(
    model: str, layers: int, hidden: int, heads: int, kv_heads: int, facts: str = ""
) -> Config:
    shape = f"num_hidden_layers={layers} hidden_size={hidden} num_attention_heads={heads}"
    return config_of(model, f"{shape} num_key_value_heads={kv_heads} {facts}")


QWEN3_32B = plain("qwen3", 64, 5120, 64, 8, "head_dim=128 use_sliding_window=false")
LLAMA_8B = plain("llama", 32, 4096, 32, 8)
MISTRAL_7B = plain("mistral", 32, 4096, 32, 8, "sliding_window=4096")
QWEN2_WINDOW = "use_sliding_window=false sliding_window=131072 max_window_layers=28"
QWEN2_7B = plain("qwen2", 28, 3584, 28, 4, QWEN2_WINDOW)
DEEPSEEK_LATENT = "kv_lora_rank=512 qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128"
DEEPSEEK_V3 = plain("deepseek_v3", 61, 7168, 128, 128, DEEPSEEK_LATENT)
GEMMA3_TEXT = plain("gemma3_text", 62, 5376, 32, 16, "head_dim=128 sliding_window=1024")
GEMMA3_27B = {  # as published: nested, the pattern left to the model's code
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {k: v for k, v in GEMMA3_TEXT.items() if k != "torch_dtype"},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GEMMA2_9B = plain("gemma2", 42, 3584, 16, 8, "head_dim=256 sliding_window=4096")
FALCON_7B = config_of(
    "falcon",
    "num_hidden_layers=32 hidden_size=4544 num_attention_heads=71"
    " multi_query=true new_decoder_architecture=false",
)
STARCODER = config_of("gpt_bigcode", "n_layer=40 n_head=48 n_embd=6144 multi_query=true")
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
MAMBA_KEYS = "mamba_d_state=16 mamba_d_conv=4 mamba_expand=2"
JAMBA_KEYS = f"attn_layer_period=8 attn_layer_offset=4 intermediate_size=14336 {MAMBA_KEYS}"
JAMBA = plain("jamba", 32, 4096, 32, 8, JAMBA_KEYS)
MAMBA_130M = config_of(
    "mamba",
    "num_hidden_layers=24 hidden_size=768 intermediate_size=1536 state_size=16 conv_kernel=4",
    torch_dtype="float32",
)
MAMBA2 = config_of(  # Codestral Mamba 7B
    "mamba2",
    "num_hidden_layers=64 hidden_size=4096 num_heads=128 head_dim=64 n_groups=8"
    " state_size=128 conv_kernel=4 expand=2",
)
QWEN3_NEXT = plain(
    *("qwen3_next", 48, 2048, 16, 2),
    "head_dim=256 full_attention_interval=4 linear_conv_kernel_dim=4 linear_key_head_dim=128"
    " linear_value_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32",
)
FALCON_H1 = plain(
    *("falcon_h1", 24, 2048, 8, 2),
    "head_dim=64 mamba_d_ssm=3072 mamba_n_heads=48 mamba_d_head=64 mamba_n_groups=1"
    " mamba_d_state=256 mamba_d_conv=4 mamba_expand=2",
)
BAMBA = plain(  # the form, not a model's size
    *("bamba", 4, 256, 4, 2),
    'attn_layer_indices=[1,3] mamba_n_heads=8 mamba_d_head="auto" mamba_n_groups=1 ' + MAMBA_KEYS,
)
EVERY: tuple[Config, ...] = (
    *(QWEN3_32B, MISTRAL_7B, DEEPSEEK_V3, GEMMA3_27B, FALCON_7B),
    *(JAMBA, MAMBA2, QWEN3_NEXT, FALCON_H1),
)


def layout_of(config: Config, page_tokens: int = 64, **more: Any) -> KVLayout:
    return KVLayout.from_model_config(config, page_tokens, **more)


def without(config: Config, *keys: str) -> Config:
    return {k: v for k, v in config.items() if k not in keys}
