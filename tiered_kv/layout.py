"""How a model's page is made: its layers, their heads and dims, and the bytes each of them keeps.

A page holds, for `page_tokens` consecutive tokens and one tensor-parallel rank, layer after layer
in model order::

    full, sliding   K then V, each [kv_heads, page_tokens, head_dim]
    latent          [page_tokens, kv_lora_rank + qk_rope_head_dim], once: no V lies beside it
    state           one snapshot at the page's last token: the last conv_kernel inputs of the
                    convolution, then the recurrent state

A layer with attention and a state (Falcon-H1, Zamba) is in two groups and keeps K, V, then the
snapshot. A layer that keeps nothing (an MLP block, one that reads another layer's KV) is in a state
group of zero bytes, so that an index here is always the layer's index in the model. A sliding
layer's page is full: what its window still needs is the engine's question (`KVLayout.live_bytes`).
Imports neither torch nor transformers: a config is read as the JSON it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tiered_kv.errors import ConfigError
from tiered_kv.model_config import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    STATE_GROUPS,
    STATE_WIDTH,
    ModelConfig,
    dtype_name,
    read_config,
    shown,
)

_1_BYTE = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8", "uint8")
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, **dict.fromkeys(_1_BYTE, 1)}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same thing.

    Attributes:
        kind: what they keep, see the module's head.
        layer_token_bytes: bytes one layer keeps for a token on one rank; 0 for "state".
        layer_state_bytes: bytes one layer keeps at a page's end; only for "state".
        kv_heads: heads on this rank, 1 for "latent"; 0 where not known.
        head_dim: width of a head, of latent and rope together for "latent"; 0 where not known.
        window_tokens: how far back these layers look, None for all the way.
    """

    kind: Literal["full", "sliding", "latent", "state"]
    layers: tuple[int, ...]
    layer_token_bytes: int
    layer_state_bytes: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    window_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The geometry of one rank's page, and so of every slot, record and copy of a store.

    Attributes:
        model: `model_type` of the config, or what the layout was made from.
        dtype: of K, V and latents. A recurrent state has its own, see `from_model_config`.
        groups: every layer of the model, by what it keeps.
        layer_page_bytes: layer i's bytes of a page, in model order; a page is these, concatenated.

    Raises:
        ConfigError: sizes or ranks out of range, or layers that leave a gap.
    """

    model: str
    dtype: str
    page_tokens: int
    groups: tuple[LayerGroup, ...]
    tp_rank: int = 0
    tp_size: int = 1
    layer_page_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)
    page_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_sizes(self.page_tokens, self.tp_rank, self.tp_size)
        by_layer: dict[int, int] = {}
        for group in self.groups:
            layer_bytes = group.layer_token_bytes * self.page_tokens + group.layer_state_bytes
            for layer in group.layers:
                by_layer[layer] = by_layer.get(layer, 0) + layer_bytes
        if sorted(by_layer) != list(range(len(by_layer))) or not sum(by_layer.values()):
            raise ConfigError("groups must name every layer from 0 on, some that keep something")
        if min(by_layer.values()) < 0:
            raise ConfigError("groups must keep zero bytes or more in every layer")
        object.__setattr__(self, "layer_page_bytes", tuple(by_layer[i] for i in sorted(by_layer)))
        object.__setattr__(self, "page_bytes", sum(by_layer.values()))

    @property
    def layers(self) -> int:
        """Layers of the model, those that keep nothing included."""
        return len(self.layer_page_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes a token adds over all layers; states, which do not grow, are not in it."""
        return sum(g.layer_token_bytes * len(g.layers) for g in self.groups)

    @property
    def state_bytes(self) -> int:
        """Bytes of one snapshot of all states."""
        return sum(g.layer_state_bytes * len(g.layers) for g in self.groups)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all the above, equal in every process; pages of another are foreign."""
        facts = asdict(self)
        del facts["layer_page_bytes"], facts["page_bytes"]  # follow from the rest
        text = json.dumps({"version": 1, **facts}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def kv_bytes(self, batch: int, tokens: int) -> int:
        """Bytes that the pages of `batch` sequences of `tokens` tokens hold on one rank.

        For plain attention 2 x layers x batch x tokens x kv_heads x head_dim x bytes. Sliding
        layers count in full, as a page keeps them; every full page adds its state snapshot. For
        whole pages it is therefore exactly batch x pages x `page_bytes`.
        """
        return batch * (tokens * self.token_bytes + tokens // self.page_tokens * self.state_bytes)

    def live_bytes(self, batch: int, tokens: int) -> int:
        """Bytes an engine needs to go on decoding: of a sliding layer its window, of a state one.

        `kv_bytes` is what a store keeps so that any prefix can be resumed, this what a GPU must
        hold for a sequence that runs; equal for a model without windows and states.
        """
        per_sequence = self.state_bytes
        for group in self.groups:
            window = tokens if group.window_tokens is None else min(tokens, group.window_tokens)
            per_sequence += window * group.layer_token_bytes * len(group.layers)
        return batch * per_sequence

    @classmethod
    def from_model_config(
        cls,
        config: str | Path | Mapping[str, Any],
        page_tokens: int = 64,
        *,
        dtype: str | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> KVLayout:
        """The layout of a decoder, from its Hugging Face config.json.

        Rank `tp_rank` of `tp_size` has its share of the KV heads; fewer heads than ranks are
        replicated, one a rank. A latent is replicated whole. A recurrent state is float32, as
        transformers keeps it, unless the config's `mamba_ssm_dtype` or `mamba_ssm_cache_dtype` says
        otherwise; convolution inputs have the model's dtype.

        Args:
            config: path of a config.json or of the directory that holds it, or its content.
            dtype: of the KV cache; None or "auto" takes the model's `torch_dtype`.

        Raises:
            ConfigError: unreadable, not a decoder known here, a key missing or impossible, heads
                that do not divide; one line that names it and says what would be right.
        """
        _check_sizes(page_tokens, tp_rank, tp_size)
        settings = ModelConfig.of_text_model(read_config(config))
        model_dtype = settings.find("torch_dtype")
        kv_dtype = model_dtype if dtype in (None, "auto") else dtype_name(dtype)
        if kv_dtype is None:
            raise settings.error("no torch_dtype in its config: say which, as in dtype='bfloat16'")
        cache = _CacheReader(_dtype_bytes(kv_dtype), _dtype_bytes(model_dtype or kv_dtype), tp_size)
        return cls(settings.model, kv_dtype, page_tokens, cache.groups(settings), tp_rank, tp_size)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], page_tokens: int) -> KVLayout:
        """The layout of an engine's own cache: one torch tensor a layer, first dimension pages.

        Pages are taken as bytes, whatever is in them; a layer whose page does not divide by
        `page_tokens` counts as state. Shape and memory order of a page go into `model`, and so into
        the fingerprint: a cache kept heads-first never reads one kept tokens-first. Looks at shapes
        only, never at data.

        Raises:
            ConfigError: no tensors, unequal page counts, or a page that is not one contiguous run.
        """
        _check_sizes(page_tokens)
        if not tensors or any(t.ndim < 2 or t.shape[0] != tensors[0].shape[0] for t in tensors):
            raise ConfigError("tensors must be one a layer, each [pages, ...] of as many pages")
        layer_bytes = [t[:1].numel() * t.element_size() for t in tensors]
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in tensors})
        shapes = dict.fromkeys(_page_shape(t) for t in tensors)
        groups = _opaque_groups(layer_bytes, page_tokens)
        return cls(f"tensors {' '.join(shapes)}", "+".join(dtypes), page_tokens, groups)

    @classmethod
    def uniform(cls, page_bytes: int, page_tokens: int, layers: int | None = None) -> KVLayout:
        """A layout of no model, of pages that are just so big: for traces and tests.

        Each is cut into `layers` equal parts; None takes of 4, 2 and 1 the first that divides.

        Raises:
            ConfigError: a size below 1, or layers that do not divide the page.
        """
        _check_sizes(page_tokens)
        layers = next(n for n in (4, 2, 1) if page_bytes % n == 0) if layers is None else layers
        if layers < 1 or page_bytes < 1 or page_bytes % layers:
            raise ConfigError(f"page_bytes must be a multiple of {layers} layers, not {page_bytes}")
        groups = _opaque_groups([page_bytes // layers] * layers, page_tokens)
        return cls("uniform", "uint8", page_tokens, groups)


@dataclass(frozen=True, slots=True)
class _CacheReader:
    """What layers keep on one rank, from their settings."""

    kv_bytes: int
    model_bytes: int
    tp_size: int

    def groups(self, settings: ModelConfig) -> tuple[LayerGroup, ...]:
        members: dict[LayerGroup, list[int]] = {}
        for layer, (kind, own) in enumerate(settings.layers()):
            for part in self._parts(own, kind):
                members.setdefault(part, []).append(layer)
        if not any(part.layer_token_bytes or part.layer_state_bytes for part in members):
            raise settings.error("none of its layers keeps anything: need attention or a state")
        return tuple(replace(part, layers=tuple(layers)) for part, layers in members.items())

    def _parts(self, layer: ModelConfig, kind: str) -> list[LayerGroup]:
        parts = []
        if kind in ("full", "sliding", "hybrid"):
            parts.append(self._attention(layer, is_sliding=kind == "sliding"))
        if kind in ("state", "hybrid"):
            parts.append(LayerGroup("state", (), 0, self._state_bytes(layer)))
        return parts or [LayerGroup("state", (), 0)]

    def _attention(self, layer: ModelConfig, *, is_sliding: bool) -> LayerGroup:
        heads = layer.need(*HEADS)
        self._share(layer, HEADS[0], heads)
        window = layer.window_tokens() if is_sliding else None
        if is_sliding and window is None:
            raise layer.error("its config lacks sliding_window, the tokens a layer looks back")
        latent = layer.count("kv_lora_rank")
        if latent:
            width = latent + layer.need("qk_rope_head_dim")
            return LayerGroup("latent", (), width * self.kv_bytes, 0, 1, width, window)
        kv_heads = layer.count(*KV_HEADS) or heads
        if layer.flag("multi_query") and not layer.flag("new_decoder_architecture"):
            kv_heads = 1  # Falcon-7B, GPTBigCode
        head_dim = layer.count("head_dim", "attention_head_dim", "kv_channels")
        if head_dim is None:
            width = layer.need(*HIDDEN) * (2 if layer.model.startswith("zamba") else 1)
            head_dim, rest = divmod(width, heads)
            if rest:
                raise layer.error(f"its config lacks head_dim; {heads} heads do not divide {width}")
        if (layer.count("v_head_dim") or head_dim) != head_dim:
            raise layer.error(f"v_head_dim is not head_dim ({head_dim}): use KVLayout.from_tensors")
        if heads % kv_heads:
            raise layer.error(f"{KV_HEADS[0]} ({kv_heads}) must divide {heads} attention heads")
        kv_heads = self._share(layer, KV_HEADS[0], kv_heads, is_shared=True)
        token_bytes = 2 * kv_heads * head_dim * self.kv_bytes
        kind: Literal["sliding", "full"] = "sliding" if is_sliding else "full"
        return LayerGroup(kind, (), token_bytes, 0, kv_heads, head_dim, window)

    def _state_bytes(self, layer: ModelConfig) -> int:
        """Bytes of convolution inputs and recurrent state of a Mamba or gated-delta layer."""
        dtype = layer.find("mamba_ssm_dtype", "mamba_ssm_cache_dtype") or "float32"
        if layer.count("linear_num_value_heads"):
            channels, state = self._gated_delta(layer)
            kernel = layer.need("linear_conv_kernel_dim")
        elif layer.count(*STATE_WIDTH):
            channels, state = (self._mamba2 if layer.count(*STATE_GROUPS) else self._mamba)(layer)
            kernel = layer.need("mamba_d_conv", "conv_kernel")
        else:
            raise layer.error("a state layer of a kind not known here: use KVLayout.from_tensors")
        return channels * kernel * self.model_bytes + state * _dtype_bytes(dtype_name(dtype))

    def _gated_delta(self, layer: ModelConfig) -> tuple[int, int]:
        """Convolved channels (Q, K and V) and elements of the state [v_heads, k_dim, v_dim]."""
        names = ("linear_num_key_heads", "linear_num_value_heads")
        k_heads, v_heads = (self._share(layer, name, layer.need(name)) for name in names)
        k_dim, v_dim = layer.need("linear_key_head_dim"), layer.need("linear_value_head_dim")
        return 2 * k_heads * k_dim + v_heads * v_dim, v_heads * k_dim * v_dim

    def _mamba(self, layer: ModelConfig) -> tuple[int, int]:
        """Channels, all convolved, and elements of the state [channels, state width]."""
        channels = self._share(layer, "Mamba channels", _mamba_channels(layer))
        return channels, channels * layer.need(*STATE_WIDTH)

    def _mamba2(self, layer: ModelConfig) -> tuple[int, int]:
        """Convolved channels (X, B, C) and elements of the state [heads, head dim, state width]."""
        heads = layer.need("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
        dim = layer.count("mamba_head_dim")
        if dim is None:
            dim, rest = divmod(_mamba_channels(layer), heads)
            if rest:
                raise layer.error(
                    f"{heads} Mamba heads do not divide {dim * heads + rest} channels"
                )
        channels = self._share(layer, "Mamba heads", heads) * dim
        groups = self._share(layer, "Mamba groups", layer.need(*STATE_GROUPS), is_shared=True)
        width = layer.need(*STATE_WIDTH)
        return channels + 2 * groups * width, channels * width

    def _share(self, layer: ModelConfig, what: str, count: int, *, is_shared: bool = False) -> int:
        """How many of them one rank has; `is_shared`: ranks may share one, each with a copy."""
        if is_shared and count < self.tp_size and self.tp_size % count == 0:
            return 1
        if count % self.tp_size:
            raise layer.error(f"tp_size {self.tp_size} does not divide {what} ({count})")
        return count // self.tp_size


def _mamba_channels(layer: ModelConfig) -> int:
    is_hybrid = layer.find(*HEADS) is not None  # then intermediate_size is the MLP's
    channels = layer.count("mamba_d_ssm", *(() if is_hybrid else ("intermediate_size",)))
    return channels or layer.need("mamba_expand", "expand") * layer.need(*HIDDEN)


def _opaque_groups(layer_bytes: Sequence[int], page_tokens: int) -> tuple[LayerGroup, ...]:
    groups = []
    for size in dict.fromkeys(layer_bytes):
        layers = tuple(i for i, other in enumerate(layer_bytes) if other == size)
        token_bytes, rest = divmod(size, page_tokens)
        full, state = LayerGroup("full", layers, token_bytes), LayerGroup("state", layers, 0, size)
        groups.append(state if rest else full)
    return tuple(groups)


def _page_shape(tensor: Any) -> str:
    """Shape of one page, and the order of its dimensions in memory if that differs."""
    shape, strides = tuple(tensor.shape)[1:], tuple(tensor.stride())[1:]
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    expected = 1
    for d in reversed(order):
        if strides[d] != expected:
            raise ConfigError(f"tensors: a page (shape {shape}) must be one contiguous run")
        expected *= shape[d]
    text = "x".join(map(str, shape))
    return text if order == sorted(order) else f"{text}@{''.join(map(str, order))}"


def _check_sizes(page_tokens: int, tp_rank: int = 0, tp_size: int = 1) -> None:
    if type(page_tokens) is not int or page_tokens < 1:
        raise ConfigError(f"page_tokens must be an integer of at least 1, not {shown(page_tokens)}")
    are_integers = type(tp_rank) is int and type(tp_size) is int
    if not are_integers or tp_size < 1 or not 0 <= tp_rank < tp_size:
        given = f"{shown(tp_rank)} of {shown(tp_size)}"
        raise ConfigError(f"tp_rank must be an integer in 0..tp_size-1, not {given}")


def _dtype_bytes(name: str) -> int:
    if name not in _DTYPE_BYTES:
        raise ConfigError(f"dtype {shown(name)} is not one of {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[name]
