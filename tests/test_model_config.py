"""Reading a config: where it may lie, what is assumed, and what is said of one that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from known_models import DEEPSEEK_V3, JAMBA, KIB, LLAMA_8B, Config, layout_of, without

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
    ({**LLAMA_8B, "layer_types": 32}, "'32' is not one of"),
    ({**LLAMA_8B, "layer_types": ["sliding_attention"] * 32}, "sliding_window"),
    ({**DEEPSEEK_V3, "index_topk": 2048}, "index_topk"),
    (without(DEEPSEEK_V3, "qk_rope_head_dim"), "qk_rope_head_dim"),
    (without(JAMBA, "mamba_d_conv"), "mamba_d_conv"),
    ({**JAMBA, "model_type": "jamba9"}, "layer_types"),
)


@pytest.mark.parametrize(("config", "named"), WRONG)
def test_bad_configs_give_one_line_that_names_what_is_wrong(config: Config, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        layout_of(config)
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
