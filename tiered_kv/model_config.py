"""A Hugging Face config.json, as the questions that a layout asks of it.

Read as the JSON it is, without transformers: what a model's class assumes when a key is missing is
written down here, once. Every fault is a `ConfigError` of one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
_REFUSED_MODELS = ("diffusion_gemma_text", "longcat_flash", "recurrent_gemma", "rwkv", "xlstm")
_REFUSED_KEYS = (
    *("index_topk", "compress_ratios", "block_configs", "linear_attn_config"),
    *("attn_config", "multi_query_attention", "is_encoder_decoder"),
)
# One layer in n is global, where a config older than `layer_types` leaves that to the model's code.
_GLOBAL_EVERY = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4, "llama4_text": 4, "olmo3": 4}
_GLOBAL_EVERY |= {"gemma3n_text": 5, "gemma3_text": 6, "gemma4_text": 6, "gemma4_unified_text": 6}
# Here the last layer is global whatever is said of it, and global heads have this width unless
# `global_head_dim` or `per_layer_config` names another (transformers 5.24).
_GEMMA4 = ("gemma4_text", "gemma4_unified_text")
_GEMMA4_GLOBAL_HEAD_DIM = 512

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

# Past these a number is a slip, and would only come out as an absurd size or a list without end.
_MOST = 2**24
_MOST_LAYERS = 2**12
_MOST_FILE_BYTES = 2**24


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
        if values is config or "model_type" not in values:
            defaults = {"head_dim": defaults.get("head_dim")}
        dtype = dtype and dtype_name(dtype)
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
        return ConfigError(f"model type {shown(self.model)}: {problem}")

    def find(self, *names: str) -> Any:
        """The first that is given; null and "auto" count as not given."""
        for name in names:
            if self.values.get(name) not in (None, "auto"):
                return self.values[name]
        return None

    def count(self, *names: str, least: int = 1, most: int = _MOST) -> int | None:
        """The first that is given, as an integer of `least` to `most`."""
        value = self.find(*names)
        if value is not None and (type(value) is not int or not least <= value <= most):
            name = next(name for name in names if self.find(name) is not None)
            raise self.error(f"{name} must be an integer in {least}..{most}, not {shown(value)}")
        return value

    def need(self, *names: str, most: int = _MOST) -> int:
        """As `count`, but it must be there."""
        value = self.count(*names, most=most)
        if value is None:
            raise self.error(f"its config lacks {' or '.join(names)}, a positive integer")
        return value

    def flag(self, name: str) -> bool:
        """Whether it is given and true."""
        value = self.find(name)
        if value not in (None, False, True):
            raise self.error(f"{name} must be true or false, not {shown(value)}")
        return bool(value)

    def window_tokens(self) -> int | None:
        """How far back a sliding layer looks."""
        return self.count("sliding_window", "attention_chunk_size", most=2**63 - 1)

    def layers(self) -> list[tuple[str, ModelConfig]]:
        """What each layer is, full, sliding, state, hybrid or none, and the settings it has."""
        kinds = self._block_kinds()
        own = self._layer_overrides(kinds)
        return [
            (kind, replace(self, values={**self.values, **own.get(layer, {})}))
            for layer, kind in enumerate(kinds)
        ]

    def _layer_overrides(self, kinds: list[str]) -> dict[int, Mapping[str, Any]]:
        """By layer, what differs from the config; `per_layer_config` wins over global_*."""
        given = self.find("per_layer_config")
        if given is None:
            return {i: self._global_heads() for i, kind in enumerate(kinds) if kind == "full"}
        if not isinstance(given, Mapping):
            raise self.error(f"per_layer_config must be an object by layer, not {shown(given)}")
        overrides: dict[int, Mapping[str, Any]] = {}
        for key, own in given.items():
            layer = _layer_index(key)
            if not 0 <= layer < len(kinds) or not isinstance(own, Mapping):
                only = f"only layers 0..{len(kinds) - 1} and an object for each"
                raise self.error(
                    f"per_layer_config must have {only}, not {shown(key)}: {shown(own)}"
                )
            if own.get("skip"):
                raise self.error("per_layer_config skips parts: use KVLayout.from_tensors")
            overrides[layer] = own
        return overrides

    def _global_heads(self) -> dict[str, int]:
        default = _GEMMA4_GLOBAL_HEAD_DIM if self.model in _GEMMA4 else None
        heads = self.count("num_global_key_value_heads") if self.flag("attention_k_eq_v") else None
        width = self.count("global_head_dim") or default
        own = {"head_dim": width, "num_key_value_heads": heads}
        return {name: value for name, value in own.items() if value is not None}

    def _block_kinds(self) -> list[str]:
        kinds = self._named_blocks()
        kinds = self._implied_blocks() if kinds is None else kinds
        layers = self.count(*_LAYERS, most=_MOST_LAYERS) or len(kinds)
        if not kinds or layers != len(kinds):
            raise self.error(f"{len(kinds)} layer types for {layers} layers: need one a layer")
        if self.model in _GEMMA4 and kinds[-1] == "sliding":
            kinds[-1] = "full"
        # The last ones read the KV of others.
        shared = self.count("num_kv_shared_layers", least=0, most=layers - 1) or 0
        return kinds[: layers - shared] + ["none"] * shared

    def _named_blocks(self) -> list[str] | None:
        keys = ("layer_types", "layers_block_type", "hybrid_override_pattern")
        key = next((key for key in keys if self.find(key) is not None), None)
        if key is None:
            return None
        given, one_of = self.values[key], f"one of {', '.join(_BLOCKS)}"
        names = list(given) if key == keys[2] and isinstance(given, str) else given
        if not isinstance(names, (list, tuple)):
            raise self.error(f"{key} must be a list, a layer {one_of}; not {shown(given)}")
        unknown = [name for name in names if not isinstance(name, str) or name not in _BLOCKS]
        if unknown:
            raise self.error(f"layer type {shown(unknown[0])} is not {one_of}")
        return [_BLOCKS[name] for name in names]

    def _implied_blocks(self) -> list[str]:
        layers = self.need(*_LAYERS, most=_MOST_LAYERS)
        if self.model == "falcon_h1":
            return ["hybrid"] * layers
        if self.find("attn_type_list") is not None:
            is_attention = self._integers("attn_type_list", 2)
            if len(is_attention) != layers:
                raise self.error(f"attn_type_list must have {layers} entries, one a layer")
            attention = [layer for layer, kind in enumerate(is_attention) if kind]
        elif self.model == "bamba":
            attention = self._integers("attn_layer_indices", layers)
        elif self.model == "jamba":
            period = self.need("attn_layer_period")
            offset = self.count("attn_layer_offset", least=0, most=period - 1)
            if offset is None:
                raise self.error("its config lacks attn_layer_offset, the first attention layer")
            attention = list(range(offset, layers, period))
        elif self.count("linear_num_value_heads"):
            interval = self.count("full_attention_interval") or 4
            attention = list(range(interval - 1, layers, interval))
        elif self.find(*HEADS) is None:
            attention = []
        elif self.find(*STATE_WIDTH) is not None:
            raise self.error("its config lacks layer_types, one 'attention' or 'mamba' a layer")
        else:
            return self._implied_windows(layers)
        return ["full" if layer in attention else "state" for layer in range(layers)]

    def _implied_windows(self, layers: int) -> list[str]:
        first = self.count("max_window_layers", least=0)
        unsaid = self.find("use_sliding_window") is None
        is_on = first is None if unsaid else self.flag("use_sliding_window")
        if not is_on or not self.window_tokens():
            return ["full"] * layers
        every = self.count("sliding_window_pattern") or _GLOBAL_EVERY.get(self.model, layers + 1)
        return [
            "sliding" if i >= (first or 0) and (i + 1) % every else "full" for i in range(layers)
        ]

    def _integers(self, name: str, end: int) -> list[int]:
        """A list of integers below `end`; empty if not given."""
        given = self.find(name)
        values = [] if given is None else given
        if not isinstance(values, (list, tuple)) or any(
            type(value) is not int or not 0 <= value < end for value in values
        ):
            raise self.error(
                f"{name} must be a list of integers in 0..{end - 1}, not {shown(given)}"
            )
        return list(values)


def read_config(config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """The content of a config.json, given as its path, its directory's or itself."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, Path)):
        kind = type(config).__name__
        raise ConfigError(
            f"config must be a path, or a config.json's content as a dict, not {kind}"
        )
    path = Path(config)
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            text = file.read(_MOST_FILE_BYTES + 1)
        if len(text) > _MOST_FILE_BYTES:
            raise ValueError(f"over {_MOST_FILE_BYTES} bytes")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError("no object at its top")
    except OSError as error:
        why = error.strerror or "unreadable"
        raise ConfigError(
            f"{_on_one_line(path)}: {why}; give a local config.json or its directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_on_one_line(path)}: not a model's config.json ({error})") from None
    return content


def dtype_name(dtype: object) -> str:
    """The bare name of a dtype, torch's own or written down."""
    return (dtype if isinstance(dtype, str) else shown(dtype)).removeprefix("torch.")


def shown(value: object) -> str:
    """A value for a message: what Python writes, on one line and not without end."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists in lists
        return f"that {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _layer_index(key: object) -> int:
    """The layer that a key of `per_layer_config` means, -1 for none; transformers writes "05"."""
    is_written = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 8
    return int(str(key)) if is_written else key if type(key) is int else -1


def _on_one_line(path: Path) -> str:
    return repr(str(path))[1:-1]
