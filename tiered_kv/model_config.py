"""A Hugging Face config.json, as the questions that a layout asks of it.

Read as the JSON it is, without transformers: what a model's class assumes when a key is missing is
written down here, once. Every fault is a `ConfigError` of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.errors import ConfigError

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "n_embed")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
STATE_WIDTH = ("mamba_d_state", "ssm_state_size", "state_size")
STATE_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

# Caches that the rules below would size wrongly: better no layout than a wrong one.
_REFUSED_MODELS = ("longcat_flash", "recurrent_gemma", "rwkv", "xlstm")
_REFUSED_KEYS = (
    *("index_topk", "compress_ratios", "block_configs", "linear_attn_config"),
    *("attn_config", "multi_query_attention", "is_encoder_decoder"),
)
# One layer in n is global, where a config older than `layer_types` leaves that to the model's code.
_GLOBAL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "llama4_text": 4, "olmo3": 4}
_GLOBAL_EVERY |= {"gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6}

# transformers leaves out of a nested config what equals the class's default, so those have to be
# known (as of 5.24). A top-level config is written in full; only head_dim is used for it.
_DEFAULT_KEYS = (_LAYERS[0], HIDDEN[0], HEADS[0], KV_HEADS[0], "head_dim", "sliding_window")
_CLASS_DEFAULTS: dict[str, tuple[int | None, ...]] = {
    "gemma3_text": (26, 2304, 8, 4, 256, 4096),
    "llama": (32, 4096, 32, None, None, None),
    "mistral": (32, 4096, 32, 8, None, 4096),
    "qwen3": (32, 4096, 32, 32, 128, None),
}
_BLOCKS = {  # by name in a list, or by letter in Nemotron-H's pattern
    **dict.fromkeys(("full_attention", "attention", "*"), "full"),
    **dict.fromkeys(("sliding_attention", "chunked_attention"), "sliding"),
    **dict.fromkeys(("linear_attention", "mamba", "M"), "state"),
    **dict.fromkeys(("mlp", "moe", "-", "E"), "none"),
    "hybrid": "hybrid",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The text model's part of a config, with the questions that are asked of it.

    Attributes:
        model: `model_type` of the text model.
        values: its keys; `torch_dtype` is always there, None where no one names it.
    """

    model: str
    values: Mapping[str, Any]

    @classmethod
    def of_text_model(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The decoder's settings, out of the nesting of a model that also sees or hears."""
        values, model, dtype = config, None, None
        inner: Mapping[str, Any] | None = config
        while inner is not None:
            values, model = inner, inner.get("model_type") or model
            dtype = inner.get("torch_dtype") or inner.get("dtype") or dtype
            inner = next((values[k] for k in _NESTED if isinstance(values.get(k), Mapping)), None)
        if not isinstance(model, str):
            raise ConfigError("the config has no model_type: give a decoder model's config.json")
        defaults = dict(zip(_DEFAULT_KEYS, _CLASS_DEFAULTS.get(model, ()), strict=False))
        if values is config:
            defaults = {"head_dim": defaults.get("head_dim")}
        dtype = dtype and str(dtype).removeprefix("torch.")
        settings = cls(model, {**defaults, **values, "torch_dtype": dtype})
        settings._refuse_unknown_caches()
        return settings

    def _refuse_unknown_caches(self) -> None:
        odd = next((key for key in _REFUSED_KEYS if self.find(key)), None)
        odd = self.model if self.model in _REFUSED_MODELS else odd
        if odd:
            raise self.error(f"{odd} means a cache unknown here: use KVLayout.from_tensors")
        if self.find(*HEADS, *STATE_WIDTH) is None:
            raise self.error("unknown: a decoder's config has num_attention_heads or a state_size")

    def error(self, problem: str) -> ConfigError:
        """To raise: the problem, after the model type it is a problem of."""
        return ConfigError(f"model type {self.model!r}: {problem}")

    def find(self, *names: str) -> Any:
        """The first that is given; null and "auto" count as not given."""
        for name in names:
            if self.values.get(name) not in (None, "auto"):
                return self.values[name]
        return None

    def count(self, *names: str) -> int | None:
        """The first that is given, as a positive integer."""
        value = self.find(*names)
        if value is not None and (type(value) is not int or value < 1):
            raise self.error(f"{' or '.join(names)} must be a positive integer, not {value!r}")
        return value

    def need(self, *names: str) -> int:
        """As `count`, but it must be there."""
        value = self.count(*names)
        if value is None:
            raise self.error(f"its config lacks {' or '.join(names)}, a positive integer")
        return value

    def block_kinds(self) -> list[str]:
        """What each layer is: full, sliding, state, hybrid or none."""
        names = self.find("layer_types", "layers_block_type", "hybrid_override_pattern")
        names = names or self._implied_blocks()
        names = [str(name) for name in (names if isinstance(names, (list, str)) else [names])]
        unknown = next((name for name in names if name not in _BLOCKS), None)
        if unknown is not None:
            raise self.error(f"layer type {unknown!r} is not one of {', '.join(_BLOCKS)}")
        layers = self.count(*_LAYERS) or len(names)
        if layers != len(names):
            raise self.error(f"{len(names)} layer types for {layers} layers: need one a layer")
        shared = self.find("num_kv_shared_layers") or 0  # the last ones, which read others' KV
        return [_BLOCKS[name] for name in names[: layers - shared]] + ["none"] * shared

    def _implied_blocks(self) -> list[str]:
        layers = self.need(*_LAYERS)
        if self.model == "falcon_h1":
            return ["hybrid"] * layers
        if self.find("attn_type_list"):
            attention = [i for i, kind in enumerate(self.find("attn_type_list")) if kind]
        elif self.model == "bamba":
            attention = self.find("attn_layer_indices") or []
        elif self.model == "jamba":
            period, offset = self.need("attn_layer_period"), self.find("attn_layer_offset") or 0
            attention = [i for i in range(layers) if i % period == offset]
        elif self.find("linear_num_value_heads"):
            interval = self.count("full_attention_interval") or 4
            attention = list(range(interval - 1, layers, interval))
        elif self.find(*HEADS) is None:
            attention = []
        elif self.find(*STATE_WIDTH):
            raise self.error("its config lacks layer_types, one 'attention' or 'mamba' a layer")
        else:
            return self._implied_windows(layers)
        return ["attention" if i in attention else "mamba" for i in range(layers)]

    def _implied_windows(self, layers: int) -> list[str]:
        is_on = self.find("use_sliding_window")
        is_on = self.find("max_window_layers") is None if is_on is None else is_on
        if not is_on or not self.find("sliding_window", "attention_chunk_size"):
            return ["full_attention"] * layers
        first = self.find("max_window_layers") or 0
        every = self.count("sliding_window_pattern") or _GLOBAL_EVERY.get(self.model, layers + 1)
        return [
            "sliding_attention" if i >= first and (i + 1) % every else "full_attention"
            for i in range(layers)
        ]


def read_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a config.json, given as its path, its directory's or itself."""
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("no object at its top")
    except OSError as error:
        why = error.strerror or "unreadable"
        raise ConfigError(f"{path}: {why}; give a local config.json or its directory") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not a model's config.json ({error})") from None
    return content
