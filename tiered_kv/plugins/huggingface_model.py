"""What a transformers model caches: its layout, its fingerprint, what TieredCache cannot hold.

The one place that asks transformers about a model; the public face is `plugins.huggingface`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.layout import KVLayout, LayerGroup

try:
    import transformers
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
except ImportError as error:
    raise ImportError(
        "tiered_kv.plugins.huggingface needs transformers 5.0 or newer: pip install 'tiered-kv[hf]'"
    ) from error

_FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE_ARGUMENT = "cache" if "cache" in _FORWARD else "past_key_values"
"""What `generate` and a model's `forward` call their cache: "cache" since transformers 5.24."""

_ROUNDING = 0.05  # of the largest: what other matrix shapes may change in 8-bit floats
_SAMPLES = 64  # values of each tensor that enter a model's fingerprint
# What a config says of the run or of how it was loaded, not of the weights.
_NOT_THE_MODEL = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token: `heads` keys and values, which may differ in width (MLA)."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads} heads of {self.key_dim}+{self.value_dim} {dtype}"


def layout_for(model: Any, page_tokens: int = 64) -> KVLayout:
    """The layout of what a transformers model caches, found by running it on one token or two.

    It is `KVLayout.from_model_config` of the model's config wherever that agrees with what the
    model really caches. MLA is where it does not: there transformers caches two tensors, latent and
    rope part in newer versions, K and V expanded to all heads in older ones.

    Raises:
        ConfigError: the model keeps something else than K and V of every past token.
    """
    _refuse_unsupported(model)
    shapes = _probed_shapes(model)
    _refuse_positions_of_columns(model)
    dtypes = {shape.dtype for shape in shapes}
    if len(dtypes) > 1:
        raise _unsupported(model, f"its layers cache different dtypes ({dtypes})")
    dtype = str(dtypes.pop()).removeprefix("torch.")
    config = model.config.get_text_config(decoder=True)
    try:
        layout = KVLayout.from_model_config(config.to_dict(), page_tokens, dtype=dtype)
        if layer_shapes(layout) == shapes:
            return layout
    except (ConfigError, LayoutMismatchError):
        pass  # a model type that only transformers knows, or one it caches in another way
    return KVLayout(config.model_type, dtype, page_tokens, _groups(model, shapes))


def _groups(model: Any, shapes: Sequence[LayerShape]) -> tuple[LayerGroup, ...]:
    members: dict[LayerGroup, list[int]] = {}
    for index, (shape, layer) in enumerate(zip(shapes, _default_layers(model), strict=True)):
        window = getattr(layer, "sliding_window", None)
        group = LayerGroup(
            kind="full" if window is None else "sliding",
            layers=(),
            layer_token_bytes=shape.token_bytes,
            kv_heads=shape.heads,
            head_dim=shape.key_dim,
            window_tokens=window,
        )
        members.setdefault(group, []).append(index)
    return tuple(replace(group, layers=tuple(layers)) for group, layers in members.items())


def layer_shapes(layout: KVLayout) -> tuple[LayerShape, ...]:
    """Heads and widths of every layer, in model order; the width of V follows from the bytes.

    Raises:
        LayoutMismatchError: a layer that is not K and V of every token, or of unknown heads.
    """
    dtype = getattr(torch, layout.dtype, None)
    shapes: dict[int, LayerShape] = {}
    for group in layout.groups:
        if dtype is None or group.kind not in ("full", "sliding") or group.kv_heads < 1:
            raise LayoutMismatchError(
                f"the store's layout ({layout.model}: {group.kind}, {layout.dtype}) does not say "
                "where K and V lie: make it with layout_for(model)"
            )
        width = group.layer_token_bytes // (dtype.itemsize * group.kv_heads)
        shape = LayerShape(group.kv_heads, group.head_dim, width - group.head_dim, dtype)
        shapes.update(dict.fromkeys(group.layers, shape))
    return tuple(shapes[index] for index in sorted(shapes))


def model_fingerprint(model: Any) -> str:
    """A name for exactly these weights, for `StoreConfig(model_name=...)`; equal in every process.

    Hashes the config and 64 values spread over each parameter and buffer: training, a merged
    adapter or another random initialisation changes it, an edit of a few single values may not.
    For an adapter switched on and off at run time, give `TieredCache.restore` its `lora` id too.
    """
    config = _of_the_model(model.config.to_dict())
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        flat = tensor.detach().reshape(-1)
        step = max(1, -(-flat.numel() // _SAMPLES))
        sample = flat[::step].contiguous().view(torch.uint8).cpu().numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode() + sample.tobytes())
    return f"{model.config.model_type}-{digest.hexdigest()[:32]}"


def _of_the_model(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _of_the_model(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not str(key).startswith("_") and key not in _NOT_THE_MODEL
    }


def _unsupported(model: Any, why: str) -> ConfigError:
    return ConfigError(f"TieredCache does not support this {model.config.model_type} model: {why}")


def _refuse_unsupported(model: Any) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise _unsupported(model, "an encoder-decoder keeps cross-attention K and V")
    text = model.config.get_text_config(decoder=True)
    both_ways = getattr(text, "use_bidirectional_attention", None)
    if not getattr(text, "is_causal", True) or both_ways in (True, "all"):
        raise _unsupported(model, "it attends to later tokens, so K and V depend on them")
    rope = getattr(text, "rope_parameters", None) or {}
    entries = [entry for entry in (rope, *rope.values()) if isinstance(entry, dict)]
    if changing := {"dynamic", "longrope"} & {entry.get("rope_type") for entry in entries}:
        raise _unsupported(model, f"rope_type {changing.pop()} makes K depend on the whole length")
    for layer in _default_layers(model):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _unsupported(
                model, f"it has a {type(layer).__name__}, not K and V of every token"
            )


def _default_layers(model: Any) -> list[Any]:
    """The cache layers that transformers itself would make for the model."""
    return list(DynamicCache(config=model.config).layers)


def _probed_shapes(model: Any) -> tuple[LayerShape, ...]:
    layers = [layer for layer in _cached(model, padding=0) if layer.get_seq_length() == 1]
    if len(layers) != len(_default_layers(model)):
        filled = f"{len(layers)} of {len(_default_layers(model))}"
        raise _unsupported(model, f"one token filled {filled} layers of its cache")
    return tuple(
        LayerShape(
            layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1], layer.keys.dtype
        )
        for layer in layers
    )


def _refuse_positions_of_columns(model: Any) -> None:
    """K and V of a token must be the same wherever padding puts it: they are found by tokens."""
    for side in ("keys", "values"):
        alone, behind = (getattr(_cached(model, padding)[0], side)[:, :, -1] for padding in (0, 1))
        if (alone - behind).abs().max() > _ROUNDING * alone.abs().max():
            raise _unsupported(model, "its K and V change with the padding before a prompt")


@torch.no_grad()
def _cached(model: Any, padding: int) -> list[Any]:
    """The cache layers of one token behind so many columns of padding."""
    cache = DynamicCache()
    mask = torch.tensor([[0] * padding + [1]], device=model.device)
    takes = inspect.signature(model.forward).parameters
    positions = {"position_ids": mask.cumsum(-1) - mask} if "position_ids" in takes else {}
    model(
        input_ids=mask, attention_mask=mask, use_cache=True, **positions, **{CACHE_ARGUMENT: cache}
    )
    return list(cache.layers)
