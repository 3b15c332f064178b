"""KVLayout of known models against figures worked out by hand, and what transformers caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from known_models import (
    BAMBA,
    DEEPSEEK_V3,
    FALCON_7B,
    FALCON_H1,
    GEMMA2_9B,
    GEMMA3_27B,
    GIB,
    GPT2,
    JAMBA,
    KIB,
    LLAMA_8B,
    MAMBA2,
    MAMBA_130M,
    MAMBA_KEYS,
    MIB,
    MISTRAL_7B,
    QWEN2_7B,
    QWEN3_32B,
    QWEN3_NEXT,
    STARCODER,
    Config,
    layout_of,
    plain,
    without,
)

from tiered_kv.layout import LayerGroup


def test_qwen3_32b_takes_exactly_32_gib_for_4_by_32768_tokens() -> None:
    """2 x 64 layers x 8 heads x 128 x 2 bytes = 262,144 bytes = 256 KiB = 2**18 a token.

    Head dim 128 is given, and is not hidden / heads = 5,120 / 64 = 80. Batch 4 x 32,768 tokens are
    2**17 tokens: 2**35 bytes = 34,359,738,368 = 32 GiB; batch 8 are 2**18: 2**36 bytes = 64 GiB.
    """
    layout = layout_of(QWEN3_32B)
    assert layout.token_bytes == 256 * KIB
    assert layout.kv_bytes(4, 32768) == 32 * GIB == 34_359_738_368
    assert layout.kv_bytes(8, 32768) == 64 * GIB == 68_719_476_736
    assert layout.live_bytes(4, 32768) == 32 * GIB
    assert layout.layer_page_bytes == (256 * KIB,) * 64
    assert layout.page_bytes == 16 * MIB
    assert layout.groups == (LayerGroup("full", tuple(range(64)), 4 * KIB, 0, 8, 128),)


def test_llama_3_1_8b_takes_128_kib_a_token() -> None:
    """head_dim = 4096 / 32 = 128; 2 x 32 layers x 8 heads x 128 x 2 bytes = 131,072 = 2**17.

    Its whole context, 131,072 = 2**17 tokens, is 2**34 bytes = 16 GiB.
    """
    layout = layout_of(LLAMA_8B)
    assert layout.token_bytes == 128 * KIB == 131_072
    assert layout.kv_bytes(1, 131072) == 16 * GIB


def test_multi_head_attention_when_no_kv_heads_are_named() -> None:
    """GPT-2 small in its own words: 2 x 12 layers x 12 heads x 64 x 2 bytes = 36,864."""
    layout = layout_of(GPT2, dtype="float16")
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
    layout = layout_of(config)
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
    assert layout_of(config).token_bytes == 120 * KIB


def test_deepseek_v3_keeps_one_latent_and_no_v() -> None:
    """(512 + 64) x 2 bytes = 1,152 a layer; x 61 layers = 70,272 a token, not 128 K and V.

    4 x 32,768 = 2**17 tokens: 70,272 / 8 = 8,784 x 2**20 bytes = 8,784 MiB. K and V of 128 heads,
    192 and 128 wide, would be 61 x 128 x 320 x 2 = 4,997,120 bytes a token: 71 times as much.
    """
    layout = layout_of(DEEPSEEK_V3)
    assert layout.token_bytes == 70_272
    assert layout.groups == (LayerGroup("latent", tuple(range(61)), 1152, 0, 1, 576),)
    assert layout.kv_bytes(1, 64) == layout.page_bytes == 64 * 70_272
    assert layout.kv_bytes(4, 32768) == 8784 * MIB


def test_gemma3_27b_alternates_five_windows_and_one_global_layer() -> None:
    """2 x 16 heads x 128 x 2 bytes = 8 KiB a layer and token; 5, 11, .. 59 are global: 10 of 62.

    131,072 tokens: a store keeps all, 62 x 8 KiB x 131,072 = 62 GiB. Decoding needs of the other
    52 their 1,024 tokens only: 10 x 1 GiB + 52 x 8 MiB = 10 GiB + 416 MiB.
    """
    layout = layout_of(GEMMA3_27B)
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
    kinds = {g.kind: g.layers for g in layout_of(GEMMA2_9B).groups}
    assert kinds == {"sliding": tuple(range(0, 42, 2)), "full": tuple(range(1, 42, 2))}


def test_mistral_looks_through_a_window_in_every_layer() -> None:
    """32 layers x 4 KiB x min(32,768, 4,096) tokens = 512 MiB live, 4 GiB in pages."""
    layout = layout_of(MISTRAL_7B)
    assert [g.kind for g in layout.groups] == ["sliding"]
    assert layout.live_bytes(1, 32768) == 512 * MIB
    assert layout.kv_bytes(1, 32768) == 4 * GIB
    without = layout_of({**MISTRAL_7B, "sliding_window": None})
    assert [g.kind for g in without.groups] == ["full"]


def test_qwen2_slides_only_when_told_and_only_above_max_window_layers() -> None:
    assert [g.kind for g in layout_of(QWEN2_7B).groups] == ["full"]
    unsaid = {k: v for k, v in QWEN2_7B.items() if k != "use_sliding_window"}
    assert [g.kind for g in layout_of(unsaid).groups] == ["full"]
    told = layout_of({**QWEN2_7B, "use_sliding_window": True, "max_window_layers": 20})
    assert {g.kind: g.layers for g in told.groups} == {
        "full": tuple(range(20)),
        "sliding": tuple(range(20, 28)),
    }


def test_layer_types_win_over_patterns() -> None:
    types = ["full_attention", "sliding_attention"] * 21
    layout = layout_of({**GEMMA2_9B, "layer_types": types, "sliding_window_pattern": 6})
    assert {g.kind: g.layers for g in layout.groups}["full"] == tuple(range(0, 42, 2))


def test_sliding_window_pattern_names_every_nth_layer_global() -> None:
    config = plain("cohere2", 8, 1024, 8, 2, "sliding_window=4096 sliding_window_pattern=4")
    assert {g.kind: g.layers for g in layout_of(config).groups}["full"] == (3, 7)


def test_global_layers_may_have_heads_of_their_own() -> None:
    """Gemma-4 form: a sliding layer 2 x 2 x 16 x 2 = 128 bytes a token, a global one 256."""
    config = plain("gemma4_text", 6, 64, 4, 2, "head_dim=16 sliding_window=512")
    by_key = layout_of({**config, "global_head_dim": 32}, 1)
    by_layer = layout_of({**config, "per_layer_config": {"5": {"head_dim": 32}}}, 1)
    assert by_key == by_layer
    assert by_key.layer_page_bytes == (128,) * 5 + (256,)


def test_overrides_by_layer_win_over_what_all_global_layers_have() -> None:
    """As transformers reads it: with a `per_layer_config`, even an empty one, global_* are void."""
    config = plain("gemma4_text", 6, 64, 4, 2, "head_dim=16 sliding_window=512 global_head_dim=64")
    assert layout_of({**config, "per_layer_config": {}}, 1).layer_page_bytes == (128,) * 6
    by_layer = layout_of({**config, "per_layer_config": {"5": {"head_dim": 32}}}, 1)
    assert by_layer.layer_page_bytes == (128,) * 5 + (256,)


@pytest.mark.parametrize("key", ["11", "011", 11])
def test_overrides_name_layers_as_transformers_writes_them(key: object) -> None:
    """It pads with zeros where a model has ten layers or more."""
    config = plain("llama", 12, 64, 4, 2, "head_dim=16")
    layout = layout_of({**config, "per_layer_config": {key: {"head_dim": 32}}}, 1)
    assert layout.layer_page_bytes == (128,) * 11 + (256,)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", [6, 8, 12])
@pytest.mark.parametrize(
    "facts",
    [
        "",
        "global_head_dim=32",
        "global_head_dim=16",
        "num_global_key_value_heads=1",
        "num_global_key_value_heads=1 attention_k_eq_v=true",
    ],
    ids=lambda facts: facts or "neither",
)
def test_gemma4_global_layers_are_as_wide_as_transformers_makes_them(
    facts: str, layers: int
) -> None:
    """Given neither global_head_dim nor per_layer_config 512 wide, and the last layer global."""
    transformers = pytest.importorskip("transformers")
    raw = plain("gemma4_text", layers, 64, 4, 2, f"head_dim=16 sliding_window=32 {facts}")
    config = transformers.CONFIG_MAPPING["gemma4_text"](**without(raw, "model_type"))
    real = [2 * own.num_key_value_heads * own.head_dim * 2 for own in config.per_layer_config]
    is_global = [kind == "full_attention" for kind in config.layer_types]
    for source in (raw, {**config.to_dict(), "torch_dtype": "bfloat16"}):
        layout = layout_of(source, 1)
        assert list(layout.layer_page_bytes) == real
        full = {i for g in layout.groups if g.kind == "full" for i in g.layers}
        assert [i in full for i in range(layers)] == is_global


def test_layers_that_share_kv_keep_nothing_but_keep_their_index() -> None:
    config = plain("gemma3n_text", 10, 64, 4, 2, "head_dim=16 sliding_window=32")
    layout = layout_of({**config, "num_kv_shared_layers": 4}, 1)
    assert layout.layers == 10
    assert layout.layer_page_bytes == (128,) * 6 + (0,) * 4


def test_jamba_keeps_four_attention_layers_and_28_states() -> None:
    """Layers 4, 12, 20, 28 are attention: 2 x 8 x 128 x 2 bytes = 4 KiB a token each.

    The others: 8,192 channels x 4 inputs x 2 bytes = 64 KiB, and 8,192 x 16 x 4 bytes = 512 KiB.
    A page of 64 tokens: 4 x 256 KiB + 28 x 576 KiB = 17,152 KiB.
    """
    layout = layout_of(JAMBA)
    kinds = {g.kind: g for g in layout.groups}
    assert kinds["full"].layers == (4, 12, 20, 28)
    assert kinds["state"].layer_state_bytes == 576 * KIB
    assert layout.token_bytes == 16 * KIB
    assert layout.page_bytes == 17_152 * KIB
    assert layout.layer_page_bytes[3:5] == (576 * KIB, 256 * KIB)
    assert layout.live_bytes(2, 1000) == 2 * (1000 * 16 * KIB + 28 * 576 * KIB)


def test_mamba_keeps_states_and_no_tokens() -> None:
    """1,536 channels x (4 inputs + 16 of state) x 4 bytes = 122,880 a layer, 24 layers."""
    layout = layout_of(MAMBA_130M)
    assert (layout.token_bytes, layout.page_bytes) == (0, 24 * 122_880)
    assert layout.kv_bytes(3, 1000) == 3 * 15 * layout.page_bytes  # 15 whole pages of 64


def test_mamba2_convolves_x_b_and_c() -> None:
    """128 x 64 = 8,192 channels + 2 x 8 groups x 128 = 10,240, x 4 inputs x 2 bytes = 80 KiB.

    State: 128 heads x 64 x 128 x 4 bytes = 4 MiB. 64 layers of 4,176 KiB.
    """
    layout = layout_of(MAMBA2)
    assert layout.layer_page_bytes == (4176 * KIB,) * 64


def test_qwen3_next_keeps_three_states_to_one_attention() -> None:
    """2 x 16 x 128 + 32 x 128 = 8,192 channels x 4 x 2 = 64 KiB; 32 x 128 x 128 x 4 = 2 MiB.

    Attention in layers 3, 7, .. 47: 2 x 2 x 256 x 2 bytes = 2 KiB a token.
    """
    implied = layout_of(QWEN3_NEXT)
    kinds = {g.kind: g for g in implied.groups}
    assert kinds["full"].layers == tuple(range(3, 48, 4))
    assert kinds["state"].layer_state_bytes == 2 * MIB + 64 * KIB
    assert implied.token_bytes == 12 * 2 * KIB
    types = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert layout_of({**QWEN3_NEXT, "layer_types": types}) == implied


def test_state_dtype_follows_the_config() -> None:
    layout = layout_of({**QWEN3_NEXT, "mamba_ssm_dtype": "bfloat16"})
    assert {g.kind: g for g in layout.groups}["state"].layer_state_bytes == MIB + 64 * KIB


def test_a_hybrid_layer_keeps_kv_and_a_state() -> None:
    """Falcon-H1 form: K and V 2 x 2 x 64 x 2 = 512 bytes a token, in every layer beside its state.

    3,072 + 2 x 256 = 3,584 channels x 4 x 2 bytes = 28 KiB; 48 x 64 x 256 x 4 bytes = 3 MiB.
    """
    layout = layout_of(FALCON_H1)
    assert [g.layers for g in layout.groups] == [tuple(range(24))] * 2
    assert layout.layer_page_bytes == (64 * 512 + 28 * KIB + 3 * MIB,) * 24


def test_nemotron_pattern_letters_name_the_layers() -> None:
    facts = "head_dim=128 mamba_num_heads=128 mamba_head_dim=80 n_groups=8 ssm_state_size=128"
    config = plain("nemotron_h", 6, 4480, 40, 8, f"{facts} conv_kernel=4 expand=2")
    config["hybrid_override_pattern"] = "M-M*-E"
    layout = layout_of(config, 1)
    state = (
        128 * 80 + 2 * 8 * 128
    ) * 4 * 2 + 128 * 80 * 128 * 4  # heads x dim, not expand x hidden
    assert layout.layer_page_bytes == (state, 0, state, 2 * 8 * 128 * 2, 0, 0)


def test_zamba_attention_is_twice_as_wide_as_the_model() -> None:
    """hidden 3,712 x 2 / 16 heads = 464 a head, in hybrid layers only, beside a Mamba state."""
    config = plain("zamba", 3, 3712, 16, 16, f"n_mamba_heads=2 {MAMBA_KEYS}")
    config["layers_block_type"] = ["mamba", "mamba", "hybrid"]
    layout = layout_of(config, 1)
    state = 7424 * 4 * 2 + 7424 * 16 * 4
    assert layout.layer_page_bytes == (state, state, 2 * 16 * 464 * 2 + state)


def test_bamba_names_its_attention_layers_by_index() -> None:
    kinds = {g.kind: g for g in layout_of(BAMBA).groups}
    assert kinds["full"].layers == (1, 3)
    assert kinds["state"].layer_state_bytes == (512 + 2 * 16) * 4 * 2 + 512 * 16 * 4


TINY_LATENT = (
    "kv_lora_rank=16 q_lora_rank=null qk_rope_head_dim=8 qk_nope_head_dim=16 v_head_dim=16"
)
TINY_DELTA = "linear_num_key_heads=2 linear_num_value_heads=4 linear_conv_kernel_dim=4"
TINY_DELTA += " linear_key_head_dim=16 linear_value_head_dim=16 head_dim=16"
TINY_EXPERTS = "num_experts=2 num_experts_per_tok=1 moe_intermediate_size=32"
TINY = {
    "qwen3": plain("qwen3", 2, 64, 4, 2, "head_dim=32"),
    "gemma3": plain("gemma3_text", 6, 64, 4, 2, "head_dim=16 sliding_window=32"),
    "deepseek": plain("deepseek_v3", 2, 64, 4, 4, f"first_k_dense_replace=2 {TINY_LATENT}"),
    "jamba": plain(
        *("jamba", 2, 64, 4, 2),
        "attn_layer_period=2 attn_layer_offset=1 num_experts=1 use_mamba_kernels=false "
        + MAMBA_KEYS,
    ),
    "falcon-h1": plain(
        *("falcon_h1", 1, 64, 4, 2),
        "mamba_n_heads=8 mamba_d_ssm=64 mamba_d_state=16 mamba_d_conv=4 mamba_n_groups=1",
    ),
    "qwen3-next": plain(
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
        assert list(layout_of(source, page_tokens).layer_page_bytes) == real
