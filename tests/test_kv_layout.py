"""KVLayout against sizes worked out by hand, and against the caches transformers really makes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout, LayerGroup

KIB, MIB, GIB = 2**10, 2**20, 2**30
Config = dict[str, Any]


def _config(model: str, facts: str, **more: Any) -> Config:
    """A config.json, its numbers written as words `key=value`; bfloat16 unless said otherwise."""
    numbers = {key: json.loads(value) for key, value in (word.split("=") for word in facts.split())}
    return {"model_type": model, "torch_dtype": "bfloat16", **numbers, **more}


def _plain(
    model: str, layers: int, hidden: int, heads: int, kv_heads: int, facts: str = ""
) -> Config:
    shape = f"num_hidden_layers={layers} hidden_size={hidden} num_attention_heads={heads}"
    return _config(model, f"{shape} num_key_value_heads={kv_heads} {facts}")


QWEN3_32B = _plain("qwen3", 64, 5120, 64, 8, "head_dim=128 use_sliding_window=false")
LLAMA_8B = _plain("llama", 32, 4096, 32, 8)
MISTRAL_7B = _plain("mistral", 32, 4096, 32, 8, "sliding_window=4096")
QWEN2_WINDOW = "use_sliding_window=false sliding_window=131072 max_window_layers=28"
QWEN2_7B = _plain("qwen2", 28, 3584, 28, 4, QWEN2_WINDOW)
DEEPSEEK_LATENT = "kv_lora_rank=512 qk_rope_head_dim=64 qk_nope_head_dim=128 v_head_dim=128"
DEEPSEEK_V3 = _plain("deepseek_v3", 61, 7168, 128, 128, DEEPSEEK_LATENT)
GEMMA3_TEXT = _plain("gemma3_text", 62, 5376, 32, 16, "head_dim=128 sliding_window=1024")
GEMMA3_27B = {  # as published: nested, the pattern left to the model's code
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {k: v for k, v in GEMMA3_TEXT.items() if k != "torch_dtype"},
    "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
}
GEMMA2_9B = _plain("gemma2", 42, 3584, 16, 8, "head_dim=256 sliding_window=4096")
FALCON_7B = _config(
    "falcon",
    "num_hidden_layers=32 hidden_size=4544 num_attention_heads=71"
    " multi_query=true new_decoder_architecture=false",
)
STARCODER = _config("gpt_bigcode", "n_layer=40 n_head=48 n_embd=6144 multi_query=true")
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
MAMBA_KEYS = "mamba_d_state=16 mamba_d_conv=4 mamba_expand=2"
JAMBA_KEYS = f"attn_layer_period=8 attn_layer_offset=4 intermediate_size=14336 {MAMBA_KEYS}"
JAMBA = _plain("jamba", 32, 4096, 32, 8, JAMBA_KEYS)
MAMBA_130M = _config(
    "mamba",
    "num_hidden_layers=24 hidden_size=768 intermediate_size=1536 state_size=16 conv_kernel=4",
    torch_dtype="float32",
)
MAMBA2 = _config(  # Codestral Mamba 7B
    "mamba2",
    "num_hidden_layers=64 hidden_size=4096 num_heads=128 head_dim=64 n_groups=8"
    " state_size=128 conv_kernel=4 expand=2",
)
QWEN3_NEXT = _plain(
    *("qwen3_next", 48, 2048, 16, 2),
    "head_dim=256 full_attention_interval=4 linear_conv_kernel_dim=4 linear_key_head_dim=128"
    " linear_value_head_dim=128 linear_num_key_heads=16 linear_num_value_heads=32",
)
FALCON_H1 = _plain(
    *("falcon_h1", 24, 2048, 8, 2),
    "head_dim=64 mamba_d_ssm=3072 mamba_n_heads=48 mamba_d_head=64 mamba_n_groups=1"
    " mamba_d_state=256 mamba_d_conv=4 mamba_expand=2",
)
EVERY: tuple[Config, ...] = (
    *(QWEN3_32B, MISTRAL_7B, DEEPSEEK_V3, GEMMA3_27B, FALCON_7B),
    *(JAMBA, MAMBA2, QWEN3_NEXT, FALCON_H1),
)


def _layout(config: Config, page_tokens: int = 64, **more: Any) -> KVLayout:
    return KVLayout.from_model_config(config, page_tokens, **more)


def test_qwen3_32b_takes_exactly_32_gib_for_4_by_32768_tokens() -> None:
    """2 x 64 layers x 8 heads x 128 x 2 bytes = 256 KiB a token; x 4 x 32,768 = 2**17 tokens."""
    layout = _layout(QWEN3_32B)
    assert layout.token_bytes == 256 * KIB
    assert layout.kv_bytes(4, 32768) == 32 * GIB
    assert layout.kv_bytes(8, 32768) == 64 * GIB
    assert layout.live_bytes(4, 32768) == 32 * GIB
    assert layout.layer_page_bytes == (256 * KIB,) * 64
    assert layout.page_bytes == 16 * MIB
    assert layout.groups == (LayerGroup("full", tuple(range(64)), 4 * KIB, 0, 8, 128),)


def test_llama_3_1_8b_takes_128_kib_a_token() -> None:
    """head_dim = 4096 / 32 = 128; 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072."""
    assert _layout(LLAMA_8B).token_bytes == 128 * KIB


def test_multi_head_attention_when_no_kv_heads_are_named() -> None:
    """GPT-2 small in its own words: 2 x 12 layers x 12 heads x 64 x 2 bytes = 36,864."""
    layout = _layout(GPT2, dtype="float16")
    assert layout.token_bytes == 36_864
    assert (layout.groups[0].kv_heads, layout.groups[0].head_dim) == (12, 64)


@pytest.mark.parametrize(
    ("config", "token_bytes"),
    [
        pytest.param(FALCON_7B, 2 * 32 * 1 * 64 * 2, id="falcon-7b"),  # 8 KiB
        pytest.param({**FALCON_7B, "num_kv_heads": 71}, 2 * 32 * 1 * 64 * 2, id="falcon-7b-saved"),
        pytest.param(STARCODER, 2 * 40 * 1 * 128 * 2, id="starcoder"),  # 20 KiB
    ],
)
def test_multi_query_attention_keeps_one_head(config: Config, token_bytes: int) -> None:
    """Falcon-7B: head_dim 4544 / 71 = 64 and one KV head, whatever num_kv_heads says."""
    layout = _layout(config)
    assert layout.token_bytes == token_bytes
    assert layout.groups[0].kv_heads == 1


def test_falcon_40b_is_grouped_though_it_says_multi_query() -> None:
    """The new decoder: 128 heads of 64, 8 KV heads; 2 x 60 x 8 x 64 x 2 bytes = 120 KiB a token."""
    config = {
        **FALCON_7B,
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    }
    assert _layout(config).token_bytes == 120 * KIB


def test_deepseek_v3_keeps_one_latent_and_no_v() -> None:
    """(512 + 64) x 2 bytes = 1,152 a layer; x 61 layers = 70,272 a token, not 128 K and V."""
    layout = _layout(DEEPSEEK_V3)
    assert layout.token_bytes == 70_272
    assert layout.groups == (LayerGroup("latent", tuple(range(61)), 1152, 0, 1, 576),)
    assert layout.kv_bytes(1, 64) == layout.page_bytes == 64 * 70_272


def test_gemma3_27b_alternates_five_windows_and_one_global_layer() -> None:
    """2 x 16 heads x 128 x 2 bytes = 8 KiB a layer and token; 5, 11, .. 59 are global: 10 of 62.

    131,072 tokens: a store keeps all, 62 x 8 KiB x 131,072 = 62 GiB. Decoding needs of the other
    52 their 1,024 tokens only: 10 x 1 GiB + 52 x 8 MiB = 10 GiB + 416 MiB.
    """
    layout = _layout(GEMMA3_27B)
    assert layout.model == "gemma3_text"
    kinds = {g.kind: g for g in layout.groups}
    assert kinds["full"].layers == tuple(range(5, 62, 6))
    assert len(kinds["sliding"].layers) == 52
    assert kinds["sliding"].window_tokens == 1024
    assert layout.kv_bytes(1, 131072) == 62 * GIB
    assert layout.live_bytes(1, 131072) == 10 * GIB + 416 * MIB
    assert layout.live_bytes(1, 512) == layout.kv_bytes(1, 512)
    assert layout.page_bytes == 64 * layout.token_bytes


def test_gemma2_alternates_from_a_window() -> None:
    """Even layers look back 4,096 tokens, odd ones all the way: 21 of 42 each."""
    kinds = {g.kind: g.layers for g in _layout(GEMMA2_9B).groups}
    assert kinds == {"sliding": tuple(range(0, 42, 2)), "full": tuple(range(1, 42, 2))}


def test_mistral_looks_through_a_window_in_every_layer() -> None:
    """32 layers x 4 KiB x min(32,768, 4,096) tokens = 512 MiB live, 4 GiB in pages."""
    layout = _layout(MISTRAL_7B)
    assert [g.kind for g in layout.groups] == ["sliding"]
    assert layout.live_bytes(1, 32768) == 512 * MIB
    assert layout.kv_bytes(1, 32768) == 4 * GIB
    without = _layout({**MISTRAL_7B, "sliding_window": None})
    assert [g.kind for g in without.groups] == ["full"]


def test_qwen2_slides_only_when_told_and_only_above_max_window_layers() -> None:
    assert [g.kind for g in _layout(QWEN2_7B).groups] == ["full"]
    unsaid = {k: v for k, v in QWEN2_7B.items() if k != "use_sliding_window"}
    assert [g.kind for g in _layout(unsaid).groups] == ["full"]
    told = _layout({**QWEN2_7B, "use_sliding_window": True, "max_window_layers": 20})
    assert {g.kind: g.layers for g in told.groups} == {
        "full": tuple(range(20)),
        "sliding": tuple(range(20, 28)),
    }


def test_layer_types_win_over_patterns() -> None:
    types = ["full_attention", "sliding_attention"] * 21
    layout = _layout({**GEMMA2_9B, "layer_types": types, "sliding_window_pattern": 6})
    assert {g.kind: g.layers for g in layout.groups}["full"] == tuple(range(0, 42, 2))


def test_sliding_window_pattern_names_every_nth_layer_global() -> None:
    config = _plain("cohere2", 8, 1024, 8, 2, "sliding_window=4096 sliding_window_pattern=4")
    assert {g.kind: g.layers for g in _layout(config).groups}["full"] == (3, 7)


def test_global_layers_may_have_heads_of_their_own() -> None:
    """Gemma-4 form: a sliding layer 2 x 2 x 16 x 2 = 128 bytes a token, a global one 256."""
    config = _plain("gemma4_text", 6, 64, 4, 2, "head_dim=16 sliding_window=512")
    by_key = _layout({**config, "global_head_dim": 32}, 1)
    by_layer = _layout({**config, "per_layer_config": {"5": {"head_dim": 32}}}, 1)
    assert by_key == by_layer
    assert by_key.layer_page_bytes == (128,) * 5 + (256,)


def test_layers_that_share_kv_keep_nothing_but_keep_their_index() -> None:
    config = _plain("gemma3n_text", 10, 64, 4, 2, "head_dim=16 sliding_window=32")
    layout = _layout({**config, "num_kv_shared_layers": 4}, 1)
    assert layout.layers == 10
    assert layout.layer_page_bytes == (128,) * 6 + (0,) * 4


def test_jamba_keeps_four_attention_layers_and_28_states() -> None:
    """Layers 4, 12, 20, 28 are attention: 2 x 8 x 128 x 2 bytes = 4 KiB a token each.

    The others: 8,192 channels x 4 inputs x 2 bytes = 64 KiB, and 8,192 x 16 x 4 bytes = 512 KiB.
    A page of 64 tokens: 4 x 256 KiB + 28 x 576 KiB = 17,152 KiB.
    """
    layout = _layout(JAMBA)
    kinds = {g.kind: g for g in layout.groups}
    assert kinds["full"].layers == (4, 12, 20, 28)
    assert kinds["state"].layer_state_bytes == 576 * KIB
    assert layout.token_bytes == 16 * KIB
    assert layout.page_bytes == 17_152 * KIB
    assert layout.layer_page_bytes[3:5] == (576 * KIB, 256 * KIB)
    assert layout.live_bytes(2, 1000) == 2 * (1000 * 16 * KIB + 28 * 576 * KIB)


def test_mamba_keeps_states_and_no_tokens() -> None:
    """1,536 channels x (4 inputs + 16 of state) x 4 bytes = 122,880 a layer, 24 layers."""
    layout = _layout(MAMBA_130M)
    assert (layout.token_bytes, layout.page_bytes) == (0, 24 * 122_880)
    assert layout.kv_bytes(3, 1000) == 3 * 15 * layout.page_bytes  # 15 whole pages of 64


def test_mamba2_convolves_x_b_and_c() -> None:
    """128 x 64 = 8,192 channels + 2 x 8 groups x 128 = 10,240, x 4 inputs x 2 bytes = 80 KiB.

    State: 128 heads x 64 x 128 x 4 bytes = 4 MiB. 64 layers of 4,176 KiB.
    """
    layout = _layout(MAMBA2)
    assert layout.layer_page_bytes == (4176 * KIB,) * 64


def test_qwen3_next_keeps_three_states_to_one_attention() -> None:
    """2 x 16 x 128 + 32 x 128 = 8,192 channels x 4 x 2 = 64 KiB; 32 x 128 x 128 x 4 = 2 MiB.

    Attention in layers 3, 7, .. 47: 2 x 2 x 256 x 2 bytes = 2 KiB a token.
    """
    implied = _layout(QWEN3_NEXT)
    kinds = {g.kind: g for g in implied.groups}
    assert kinds["full"].layers == tuple(range(3, 48, 4))
    assert kinds["state"].layer_state_bytes == 2 * MIB + 64 * KIB
    assert implied.token_bytes == 12 * 2 * KIB
    types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert _layout({**QWEN3_NEXT, "layer_types": types}) == implied


def test_state_dtype_follows_the_config() -> None:
    layout = _layout({**QWEN3_NEXT, "mamba_ssm_dtype": "bfloat16"})
    assert {g.kind: g for g in layout.groups}["state"].layer_state_bytes == MIB + 64 * KIB


def test_a_hybrid_layer_keeps_kv_and_a_state() -> None:
    """Falcon-H1 form: K and V 2 x 2 x 64 x 2 = 512 bytes a token, in every layer beside its state.

    3,072 + 2 x 256 = 3,584 channels x 4 x 2 bytes = 28 KiB; 48 x 64 x 256 x 4 bytes = 3 MiB.
    """
    layout = _layout(FALCON_H1)
    assert [g.layers for g in layout.groups] == [tuple(range(24))] * 2
    assert layout.layer_page_bytes == (64 * 512 + 28 * KIB + 3 * MIB,) * 24


def test_nemotron_pattern_letters_name_the_layers() -> None:
    facts = "head_dim=128 mamba_num_heads=128 mamba_head_dim=80 n_groups=8 ssm_state_size=128"
    config = _plain("nemotron_h", 6, 4480, 40, 8, f"{facts} conv_kernel=4 expand=2")
    config["hybrid_override_pattern"] = "M-M*-E"
    layout = _layout(config, 1)
    state = (
        128 * 80 + 2 * 8 * 128
    ) * 4 * 2 + 128 * 80 * 128 * 4  # heads x dim, not expand x hidden
    assert layout.layer_page_bytes == (state, 0, state, 2 * 8 * 128 * 2, 0, 0)


def test_zamba_attention_is_twice_as_wide_as_the_model() -> None:
    """hidden 3,712 x 2 / 16 heads = 464 a head, in hybrid layers only, beside a Mamba state."""
    config = _plain("zamba", 3, 3712, 16, 16, f"n_mamba_heads=2 {MAMBA_KEYS}")
    config["layers_block_type"] = ["mamba", "mamba", "hybrid"]
    layout = _layout(config, 1)
    state = 7424 * 4 * 2 + 7424 * 16 * 4
    assert layout.layer_page_bytes == (state, state, 2 * 16 * 464 * 2 + state)


def test_bamba_names_its_attention_layers_by_index() -> None:
    facts = f'mamba_n_heads=8 mamba_d_head="auto" mamba_n_groups=1 {MAMBA_KEYS}'
    config = _plain("bamba", 4, 256, 4, 2, f"attn_layer_indices=[1,3] {facts}")
    kinds = {g.kind: g for g in _layout(config).groups}
    assert kinds["full"].layers == (1, 3)
    assert kinds["state"].layer_state_bytes == (512 + 2 * 16) * 4 * 2 + 512 * 16 * 4


TINY_LATENT = (
    "kv_lora_rank=16 q_lora_rank=null qk_rope_head_dim=8 qk_nope_head_dim=16 v_head_dim=16"
)
TINY_DELTA = "linear_num_key_heads=2 linear_num_value_heads=4 linear_conv_kernel_dim=4"
TINY_DELTA += " linear_key_head_dim=16 linear_value_head_dim=16 head_dim=16"
TINY_EXPERTS = "num_experts=2 num_experts_per_tok=1 moe_intermediate_size=32"
TINY = {
    "qwen3": _plain("qwen3", 2, 64, 4, 2, "head_dim=32"),
    "gemma3": _plain("gemma3_text", 6, 64, 4, 2, "head_dim=16 sliding_window=32"),
    "deepseek": _plain("deepseek_v3", 2, 64, 4, 4, f"first_k_dense_replace=2 {TINY_LATENT}"),
    "jamba": _plain(
        *("jamba", 2, 64, 4, 2),
        "attn_layer_period=2 attn_layer_offset=1 num_experts=1 use_mamba_kernels=false "
        + MAMBA_KEYS,
    ),
    "falcon-h1": _plain(
        *("falcon_h1", 1, 64, 4, 2),
        "mamba_n_heads=8 mamba_d_ssm=64 mamba_d_state=16 mamba_d_conv=4 mamba_n_groups=1",
    ),
    "qwen3-next": _plain(
        *("qwen3_next", 4, 64, 4, 2),
        f"shared_expert_intermediate_size=32 {TINY_EXPERTS} {TINY_DELTA}",
    ),
}


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_tensor_bytes(v) for v in value.values())
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TINY)
def test_page_bytes_are_what_transformers_caches(name: str) -> None:
    """A page's tokens through a random model: each layer's tensors have the layout's bytes."""
    transformers = pytest.importorskip("transformers")
    page_tokens = 16
    more = {k: v for k, v in TINY[name].items() if k not in ("model_type", "torch_dtype")}
    config = transformers.CONFIG_MAPPING[TINY[name]["model_type"]](
        vocab_size=64, intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(torch.arange(3, 3 + page_tokens)[None], past_key_values=cache, use_cache=True)
    parts = ("keys", "values", "conv_states", "recurrent_states")
    real = [sum(_tensor_bytes(getattr(c, p, None)) for p in parts) for c in cache.layers]
    for source in (TINY[name], {**config.to_dict(), "torch_dtype": "bfloat16"}):
        assert list(_layout(source, page_tokens).layer_page_bytes) == real


def test_ranks_share_the_heads() -> None:
    whole, rank = _layout(QWEN3_32B), _layout(QWEN3_32B, tp_rank=3, tp_size=4)
    assert rank.token_bytes * 4 == whole.token_bytes
    assert rank.groups[0].kv_heads == 2
    assert (rank.tp_rank, rank.tp_size) == (3, 4)


def test_fewer_heads_than_ranks_are_replicated() -> None:
    """8 KV heads on 16 ranks: one each, so two ranks keep the same."""
    rank = _layout(QWEN3_32B, tp_rank=15, tp_size=16)
    assert rank.groups[0].kv_heads == 1
    assert rank.token_bytes == _layout(QWEN3_32B).token_bytes // 8


def test_a_latent_is_replicated_whole() -> None:
    assert _layout(DEEPSEEK_V3, tp_rank=7, tp_size=8).token_bytes == 70_272


@pytest.mark.parametrize(
    "config", [JAMBA, MAMBA_130M, QWEN3_NEXT, MAMBA2], ids=lambda c: c["model_type"]
)
def test_states_are_split_over_ranks(config: Config) -> None:
    whole, rank = _layout(config), _layout(config, tp_rank=1, tp_size=2)
    assert rank.state_bytes * 2 == whole.state_bytes


def test_one_state_group_is_replicated_and_its_heads_are_split() -> None:
    """Falcon-H1 on 2 ranks: 24 heads x 64 + 2 x 256 = 2,048 channels x 8 bytes; state 1.5 MiB."""
    rank = _layout(FALCON_H1, tp_size=2)
    assert rank.groups[1].layer_state_bytes == 2048 * 8 + 3 * MIB // 2


@pytest.mark.parametrize(
    ("config", "tp_size"), [(QWEN3_32B, 3), (FALCON_7B, 2), (MAMBA2, 3), (DEEPSEEK_V3, 3)]
)
def test_heads_that_do_not_divide_are_refused(config: Config, tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"tp_size {tp_size} does not divide"):
        _layout(config, tp_size=tp_size)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks_are_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ConfigError, match="tp_rank"):
        _layout(LLAMA_8B, tp_rank=rank, tp_size=ranks)


def test_a_path_a_directory_and_a_dict_give_the_same_layout(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA3_27B))
    expected = KVLayout.from_model_config(GEMMA3_27B)
    assert KVLayout.from_model_config(path) == expected
    assert KVLayout.from_model_config(str(tmp_path)) == expected
    assert expected.page_tokens == 64


def test_dtype_comes_from_the_config_unless_given() -> None:
    assert _layout(LLAMA_8B).dtype == _layout(LLAMA_8B, dtype="auto").dtype == "bfloat16"
    newer = {k: v for k, v in LLAMA_8B.items() if k != "torch_dtype"} | {"dtype": "torch.float16"}
    assert _layout(newer).dtype == "float16"
    halved = _layout(LLAMA_8B, dtype="float8_e4m3fn")
    assert (halved.dtype, halved.token_bytes) == ("float8_e4m3fn", 64 * KIB)


def test_a_kv_dtype_leaves_states_as_they_are() -> None:
    assert _layout(JAMBA, dtype="float8_e5m2").state_bytes == _layout(JAMBA).state_bytes
    assert _layout(JAMBA, dtype="float8_e5m2").token_bytes == _layout(JAMBA).token_bytes // 2


def test_nested_configs_fill_in_what_their_class_assumes() -> None:
    """LLaVA-1.5 names of its Llama only the type: all else is the class's default, Llama-7B.

    2 x 32 layers x 32 heads x 128 x 2 bytes = 512 KiB a token. The same words alone, as a model's
    own config, are refused: there they are an accident.
    """
    text = {"model_type": "llama", "torch_dtype": "float16"}
    layout = _layout({"model_type": "llava", "text_config": text})
    assert (layout.model, layout.token_bytes) == ("llama", 512 * KIB)
    with pytest.raises(ConfigError, match="num_attention_heads"):
        _layout(text)


def _without(config: Config, *keys: str) -> Config:
    return {k: v for k, v in config.items() if k not in keys}


WRONG = (
    ({"model_type": "resnet", "depths": [3, 4]}, "resnet.*num_attention_heads"),
    ({"model_type": "rwkv", "hidden_size": 64}, "rwkv"),
    (_without(LLAMA_8B, "model_type"), "model_type"),
    (_without(LLAMA_8B, "num_hidden_layers"), "num_hidden_layers"),
    (_without(LLAMA_8B, "hidden_size"), "hidden_size"),
    (_without(LLAMA_8B, "torch_dtype"), "torch_dtype"),
    ({**LLAMA_8B, "num_key_value_heads": 0}, "num_key_value_heads"),
    ({**LLAMA_8B, "num_key_value_heads": [8, 4]}, "num_key_value_heads"),
    ({**LLAMA_8B, "num_key_value_heads": 5}, "num_key_value_heads"),
    ({**LLAMA_8B, "hidden_size": 4100}, "head_dim"),
    ({**LLAMA_8B, "torch_dtype": "int3"}, "dtype 'int3' is not one of"),
    ({**LLAMA_8B, "is_encoder_decoder": True}, "from_tensors"),
    ({**LLAMA_8B, "v_head_dim": 64}, "v_head_dim"),
    ({**LLAMA_8B, "layer_types": ["full_attention"]}, "need one a layer"),
    ({**LLAMA_8B, "layer_types": ["warp"] * 32}, "'warp' is not one of"),
    ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "from_tensors"),
    ({**LLAMA_8B, "layer_types": 32}, "'32' is not one of"),
    ({**LLAMA_8B, "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
    (_without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim"),
    (_without(JAMBA, "mamba_d_conv"), "mamba_d_conv"),
    ({**JAMBA, "model_type": "jamba9"}, "layer_types"),
)


@pytest.mark.parametrize(("config", "named"), WRONG)
def test_bad_configs_give_one_line_that_names_what_is_wrong(config: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        _layout(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json: not a model's config"):
        KVLayout.from_model_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ConfigError, match=r"\.json: No such file"):
            KVLayout.from_model_config(path)


@pytest.mark.parametrize("page_tokens", [0, -1, True, 16.0])
def test_page_tokens_below_one_are_refused(page_tokens: Any) -> None:
    for make, source in (
        (KVLayout.from_model_config, LLAMA_8B),
        (KVLayout.uniform, 64 * KIB),
        (KVLayout.from_tensors, [torch.zeros(2, 8)]),
    ):
        with pytest.raises(ConfigError, match="page_tokens must be an integer of at least 1"):
            make(source, page_tokens)  # type: ignore[arg-type]


def test_groups_that_leave_out_a_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="every layer"):
        KVLayout("x", "uint8", 4, (LayerGroup("full", (0, 2), 8),))
    with pytest.raises(ConfigError, match="every layer"):
        KVLayout("x", "uint8", 4, ())


def test_from_tensors_takes_bytes_as_they_are() -> None:
    """2 x 16 tokens x 4 heads x 8 x 2 bytes = 2 KiB a page; meta tensors: no data is read."""
    tensors = [torch.empty(10, 2, 16, 4, 8, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    layout = KVLayout.from_tensors(tensors, 16)
    assert layout.layer_page_bytes == (2 * KIB,) * 3
    assert (layout.dtype, layout.token_bytes) == ("bfloat16", 3 * 128)
    assert [g.kind for g in layout.groups] == ["full"]


def test_from_tensors_counts_an_indivisible_page_as_state() -> None:
    layout = KVLayout.from_tensors([torch.zeros(5, 16, 8), torch.zeros(5, 33)], 16)
    assert [(g.kind, g.layers) for g in layout.groups] == [("full", (0,)), ("state", (1,))]
    assert layout.layer_page_bytes == (512, 132)


def test_from_tensors_tells_heads_first_from_tokens_first() -> None:
    """Same bytes, other order: as shapes, and as one shape over permuted memory."""
    tokens_first = KVLayout.from_tensors([torch.zeros(4, 2, 16, 8, 32)], 16)
    heads_first = KVLayout.from_tensors([torch.zeros(4, 2, 8, 16, 32)], 16)
    permuted = KVLayout.from_tensors([torch.zeros(4, 2, 8, 16, 32).transpose(2, 3)], 16)
    assert tokens_first.page_bytes == heads_first.page_bytes == permuted.page_bytes
    assert len({x.fingerprint for x in (tokens_first, heads_first, permuted)}) == 3


NOT_PAGES = {
    "none": [],
    "page-counts": [torch.zeros(4, 8), torch.zeros(5, 8)],
    "no-page": [torch.zeros(4)],
    "holes": [torch.zeros(4, 8, 8)[:, :, :4]],
    "pages-second": [torch.zeros(2, 4, 8).transpose(0, 1)],
}


@pytest.mark.parametrize("tensors", NOT_PAGES.values(), ids=NOT_PAGES)
def test_from_tensors_refuses_what_is_not_pages(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="tensors"):
        KVLayout.from_tensors(tensors, 4)


@pytest.mark.parametrize(
    ("page_bytes", "layers", "parts"), [(65536, None, 4), (6, None, 2), (7, None, 1), (60, 3, 3)]
)
def test_uniform_cuts_equal_layers(page_bytes: int, layers: int | None, parts: int) -> None:
    layout = KVLayout.uniform(page_bytes, 4, layers)
    assert layout.page_bytes == page_bytes
    assert layout.layer_page_bytes == (page_bytes // parts,) * parts


@pytest.mark.parametrize(("page_bytes", "layers"), [(0, None), (-4, 2), (10, 3), (10, 0)])
def test_uniform_refuses_layers_that_do_not_divide(page_bytes: int, layers: int | None) -> None:
    with pytest.raises(ConfigError, match="page_bytes"):
        KVLayout.uniform(page_bytes, 4, layers)


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c["model_type"])
def test_whole_pages_are_batch_times_pages_times_page_bytes(config: Config) -> None:
    layout = _layout(config)
    assert layout.kv_bytes(3, 5 * 64) == 3 * 5 * layout.page_bytes
    assert sum(layout.layer_page_bytes) == layout.page_bytes
    assert layout.page_bytes == 64 * layout.token_bytes + layout.state_bytes
    assert pickle.loads(pickle.dumps(layout)) == layout


GOLDEN = "b97987684ff62807d5412b33b9c3500c04534091c7c4b8c49ec6dc5d9df0afb9"


def test_fingerprint_is_the_same_in_every_process() -> None:
    """Another value makes every store on disk foreign: change it only with the format's version."""
    assert _layout(GEMMA3_27B).fingerprint == GOLDEN
    code = (
        "import json, sys; from tiered_kv.layout import KVLayout;"
        "print(KVLayout.from_model_config(json.load(sys.stdin)).fingerprint)"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(GEMMA3_27B),
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == GOLDEN


def test_fingerprint_covers_everything() -> None:
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9}
    variants = [
        _layout(QWEN3_32B),
        _layout(QWEN3_32B, 32),
        _layout(QWEN3_32B, dtype="float16"),
        _layout(QWEN3_32B, tp_size=2),
        _layout(QWEN3_32B, tp_rank=1, tp_size=2),
        _layout({**QWEN3_32B, "model_type": "qwen4"}),
        _layout({**QWEN3_32B, "num_hidden_layers": 63}),
        _layout({**QWEN3_32B, "num_key_value_heads": 16, "head_dim": 64}),
        _layout({**QWEN3_32B, **window}),
    ]
    assert len({v.fingerprint for v in variants}) == len(variants)
