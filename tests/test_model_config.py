"""Reading a config: where it may lie, what is assumed, and what is said of one that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_models import (
    BAMBA,
    DEEPSEEK_V3,
    EVERY,
    GEMMA2_9B,
    JAMBA,
    KIB,
    LLAMA_8B,
    MAMBA_130M,
    MISTRAL_7B,
    QWEN2_7B,
    QWEN3_NEXT,
    Config,
    layout_of,
    without,
)

from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout


def test_nested_configs_fill_in_what_their_class_assumes() -> None:
    """LLaVA-1.5 names of its Llama only the type: all else is the class's default, Llama-7B.

    2 x 32 layers x 32 heads x 128 x 2 bytes = 512 KiB a token. The same words alone, as a model's
    own config, are refused: there they are an accident.
    """
    text = {"model_type": "llama", "torch_dtype": "float16"}
    layout = layout_of({"model_type": "llava", "text_config": text})
    assert (layout.model, layout.token_bytes) == ("llama", 512 * KIB)
    with pytest.raises(ConfigError, match="num_attention_heads"):
        layout_of(text)


WRONG = (
    ({"model_type": "resnet", "depths": [3, 4]}, "resnet.*num_attention_heads"),
    ({"model_type": "rwkv", "hidden_size": 64}, "rwkv"),
    (without(LLAMA_8B, "model_type"), "model_type"),
    (without(LLAMA_8B, "num_hidden_layers"), "num_hidden_layers"),
    (without(LLAMA_8B, "hidden_size"), "hidden_size"),
    (without(LLAMA_8B, "torch_dtype"), "torch_dtype"),
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
    ({**LLAMA_8B, "layer_types": 32}, "layer_types must be a list.*not 32"),
    ({**LLAMA_8B, "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
    (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim"),
    (without(JAMBA, "mamba_d_conv"), "mamba_d_conv"),
    ({**JAMBA, "model_type": "jamba9"}, "layer_types"),
    ({**LLAMA_8B, "layer_types": []}, "0 layer types for 32 layers: need one a layer"),
    ({**LLAMA_8B, "layer_types": "*" * 32}, "layer_types must be a list"),
    ({**LLAMA_8B, "hybrid_override_pattern": "*" * 31 + "?"}, r"layer type '\?' is not one of"),
    ({**LLAMA_8B, "layer_types": ["mlp"] * 32}, "need attention or a state"),
    ({**LLAMA_8B, "num_hidden_layers": 10**9}, "num_hidden_layers must be an integer in 1..4096"),
    ({**LLAMA_8B, "num_hidden_layers": 32.0}, r"num_hidden_layers .*, not 32\.0"),
    ({**LLAMA_8B, "num_hidden_layers": 10**5000}, "num_hidden_layers must be"),
    ({**LLAMA_8B, "head_dim": -128}, r"head_dim must be an integer in 1\.\..*, not -128"),
    ({**LLAMA_8B, "head_dim": "128"}, "head_dim must be an integer"),
    ({**LLAMA_8B, "torch_dtype": ["bfloat16"]}, "dtype .* is not one of"),
    ({**LLAMA_8B, "model_type": ["llama"]}, "model_type"),
    ({**LLAMA_8B, "multi_query": "false"}, "multi_query must be true or false"),
    ({**LLAMA_8B, "num_kv_shared_layers": 33}, "num_kv_shared_layers must be .* in 0..31"),
    ({**LLAMA_8B, "per_layer_config": [1]}, "per_layer_config must be an object by layer"),
    ({**LLAMA_8B, "per_layer_config": {"32": {}}}, "only layers 0..31 .*, not '32'"),
    ({**LLAMA_8B, "per_layer_config": {"-1": {}}}, "only layers 0..31 .*, not '-1'"),
    ({**LLAMA_8B, "per_layer_config": {"1": 64}}, "an object for each, not '1': 64"),
    ({**LLAMA_8B, "per_layer_config": {"1": {"head_dim": 0}}}, "head_dim must be"),
    ({**LLAMA_8B, "per_layer_config": {"1": {"skip": ["attention"]}}}, "skips parts"),
    ({**MISTRAL_7B, "sliding_window": "4096"}, "sliding_window must be an integer"),
    ({**MISTRAL_7B, "use_sliding_window": 2}, "use_sliding_window must be true or false"),
    (
        {**BAMBA, "attn_layer_indices": 1},
        r"attn_layer_indices must be a list .* in 0\.\.3",
    ),
    ({**BAMBA, "attn_layer_indices": [1, "3"]}, "attn_layer_indices must be a list of integers"),
    ({**BAMBA, "attn_layer_indices": [4]}, r"attn_layer_indices .*, not \[4\]"),
    ({**BAMBA, "mamba_n_heads": 7}, "7 Mamba heads do not divide 512 channels"),
    ({**BAMBA, "attn_type_list": [1, 0]}, "attn_type_list must have 4 entries"),
    ({**JAMBA, "attn_layer_offset": 8}, r"attn_layer_offset must be an integer in 0\.\.7"),
    (without(JAMBA, "attn_layer_offset"), "lacks attn_layer_offset"),
    ({**QWEN3_NEXT, "linear_num_value_heads": 0}, "linear_num_value_heads must be"),
    ({"model_type": "llama", "torch_dtype": "float16", "text_config": {}}, "num_attention_heads"),
)


@pytest.mark.parametrize(("config", "named"), WRONG)
def test_bad_configs_give_one_line_that_names_what_is_wrong(config: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        layout_of(config)
    assert "\n" not in str(caught.value)


NOT_CONFIGS = {
    "empty": b"",
    "truncated": json.dumps(LLAMA_8B).encode()[:-9],
    "list": b"[1]",
    "binary": bytes(range(256)),
    "deep": b"[" * 200_000,
    "digits": b'{"num_hidden_layers": ' + b"9" * 5000 + b"}",
    "weights": bytes(2**24 + 1),
}


@pytest.mark.parametrize("content", NOT_CONFIGS.values(), ids=NOT_CONFIGS)
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: not a model's config"):
        KVLayout.from_model_config(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        with pytest.raises(ConfigError, match=r"\.json: No such file.*; give a local config\.json"):
            KVLayout.from_model_config(path)


@pytest.mark.parametrize("path", ["", "two\nlines", "nul\0", "x" * 5000])
def test_an_impossible_path_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        KVLayout.from_model_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [None, 7, b"config.json", ["config.json"], object()])
def test_what_is_neither_path_nor_content_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match=f"not {type(config).__name__}"):
        KVLayout.from_model_config(config)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.sampled_from([2**24, 2**31, 10**12, -(10**30), 10**5000]),
    st.floats(),
    st.sampled_from(["", "auto", "8", "two\nlines", "full_attention", "M*", "bfloat16", "int3"]),
    st.lists(st.sampled_from([0, 1, -1, None, 0.5, "mamba", "full_attention", []]), max_size=3),
    st.sampled_from([["full_attention"] * 32, ["sliding_attention"] * 32, [[[]]]]),
    st.sampled_from([{}, {"0": 1}, {"0": {"head_dim": -1}}, {"x": {}}, {0: {"head_dim": 32}}]),
)
KNOWN_KEYS = (
    *sorted({key for config in (*EVERY, BAMBA) for key in config}),
    *("per_layer_config", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
    *("num_kv_shared_layers", "layer_types", "layers_block_type", "hybrid_override_pattern"),
    *("attn_type_list", "sliding_window_pattern", "max_window_layers", "v_head_dim"),
    *("mamba_head_dim", "mamba_ssm_dtype", "index_topk", "dtype", "text_config"),
)
REPEATABLE = settings(max_examples=400, deadline=None, derandomize=True, database=None)


def layout_or_message(config: Config) -> KVLayout | str:
    try:
        return layout_of(config)
    except ConfigError as error:
        return str(error)


@REPEATABLE
@given(
    config=st.sampled_from((*EVERY, BAMBA, LLAMA_8B, QWEN2_7B, GEMMA2_9B, MAMBA_130M)),
    changes=st.dictionaries(st.sampled_from(KNOWN_KEYS), JUNK, min_size=1, max_size=3),
    lost=st.sets(st.sampled_from(KNOWN_KEYS), max_size=2),
)
def test_a_damaged_config_gives_a_layout_or_one_line(
    config: Config, changes: Config, lost: set[str]
) -> None:
    """Junk under known keys, also inside a nested config: never a traceback, never an absurdity."""
    inner = config.get("text_config")
    damaged = without({**(inner or config), **changes}, *lost)
    result = layout_or_message({**config, "text_config": damaged} if inner else damaged)
    if isinstance(result, str):
        assert "\n" not in result
        assert len(result) < 300
        return
    assert result.page_bytes > 0
    assert min(result.layer_page_bytes) >= 0
    assert result.layers <= 4096
    assert all(min(g.kv_heads, g.head_dim, g.window_tokens or 0) >= 0 for g in result.groups)
    assert len(result.fingerprint) == 64


@REPEATABLE
@given(
    st.fixed_dictionaries(
        {"num_hidden_layers": JUNK, "num_attention_heads": JUNK, "hidden_size": JUNK},
        optional={"num_key_value_heads": JUNK, "head_dim": JUNK},
    )
    | st.fixed_dictionaries(
        dict.fromkeys(
            ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"],
            st.integers(-1, 9),
        )
    )
)
def test_plain_attention_is_the_formula_or_refused(sizes: Config) -> None:
    """2 x layers x KV heads x head dim x 2 bytes, for just those sizes that make sense."""
    told = {key: value for key, value in sizes.items() if value not in (None, "auto")}
    layers, heads = told.get("num_hidden_layers", 0), told.get("num_attention_heads", 0)
    kv_heads, width = told.get("num_key_value_heads", heads), told.get("hidden_size", 0)
    numbers = [layers, heads, kv_heads, told.get("head_dim", width)]
    is_sound = all(type(number) is int and 0 < number <= 2**24 for number in numbers)
    if is_sound and "head_dim" not in told:
        is_sound = width % heads == 0
    result = layout_or_message({"model_type": "llama", "dtype": "bfloat16", **sizes})
    if is_sound and layers <= 4096 and heads % kv_heads == 0:
        assert isinstance(result, KVLayout)
        head_dim = told["head_dim"] if "head_dim" in told else width // heads
        assert result.token_bytes == 2 * layers * kv_heads * head_dim * 2
    else:
        assert isinstance(result, str)
