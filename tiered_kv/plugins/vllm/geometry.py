"""Geometry of vLLM's KV cache: its layers as attached HBM, and one block of all of them as a page.

vLLM places every layer of a model in one allocation, each block of a layer in one contiguous run of
bytes; layers that share a block table form a group. A page is one block of every group: all bytes
of its layers, padding at their ends included. Nothing here copies or keeps memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
    iter_layer_specs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout, LayerGroup
from tiered_kv.storage.attached import AttachedHbm, AttachedLayer

_SUPPORTED = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
)
_ONE_RUN = "LBHNC, LBNHC, BLHNC, BLNHC"


class Layer(NamedTuple):
    """One layer of the model on this rank.

    Attributes:
        group: index of its KV cache group.
        spec: of the layer; in a scheduler that of the first layer of its group.
        page_bytes: what it keeps in a block, padding at the end included.
    """

    name: str
    group: int
    spec: AttentionSpec
    page_bytes: int


def layers_of(kv_cache_config: KVCacheConfig) -> tuple[Layer, ...]:
    """The layers of this rank in execution order; equal in a worker and in its scheduler.

    A layer that reads another's KV is not among them.

    Raises:
        ConfigError: the model keeps something else than K and V, or lays it out otherwise than in
            blocks of one size; one line.
    """
    refuse_unsupported(kv_cache_config)
    # The smaller stride is the layer's own block: the other one steps over all blocks or layers.
    page_bytes = {
        name: min(tensor.layer_stride, tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        for name in tensor.layers
    }
    layers = [
        Layer(name, group, _spec_of(spec.kv_cache_spec, name), page_bytes[name])
        for group, spec in enumerate(kv_cache_config.kv_cache_groups)
        for name in spec.layer_names
        if name in page_bytes
    ]
    return tuple(sorted(layers, key=lambda layer: _numbers(layer.name)))


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block, and so in a page."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def window_blocks(kv_cache_config: KVCacheConfig) -> tuple[int | None, ...]:
    """For each group how many blocks before the next token its layers need; None: all of them."""
    tokens = block_tokens(kv_cache_config)
    windows: list[int | None] = []
    for group in kv_cache_config.kv_cache_groups:
        spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
        window = _window_tokens(spec)
        windows.append(None if window is None else -(-(window - 1) // tokens))
    return tuple(windows)


def layout_of(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> KVLayout:
    """The layout of a page on this rank; its `page_bytes` are those of `attach`.

    Its fingerprint tells apart what is kept of a token, the order of blocks, layers and heads in
    memory, the block size, and the rank.

    Raises:
        ConfigError: as `layers_of`; or tokens of a block are spread over ranks.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            raise _unsupported(f"{name} {getattr(parallel, name)}", "set it to 1")
    layers = layers_of(kv_cache_config)
    order = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout or "?"
    _check_order(order, layers)
    tokens = block_tokens(kv_cache_config)
    members: dict[tuple[str, LayerGroup], list[int]] = {}
    for at, layer in enumerate(layers):
        members.setdefault((_described(layer), _kept(layer, tokens)), []).append(at)
    stage, tp_rank = divmod(parallel.rank, parallel.tensor_parallel_size)
    model = [
        f"vllm {order} {vllm_config.cache_config.cache_dtype}",
        *(text for text, _ in members),
        *([f"stage {stage}"] if parallel.pipeline_parallel_size > 1 else []),
    ]
    dtypes = sorted({str(layer.spec.dtype).removeprefix("torch.") for layer in layers})
    groups = tuple(replace(kept, layers=tuple(at)) for (_, kept), at in members.items())
    return KVLayout(
        "; ".join(model), "+".join(dtypes), tokens, groups, tp_rank, parallel.tensor_parallel_size
    )


def attach(
    kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig, *, layerwise: bool
) -> AttachedHbm:
    """The engine's own tensors as HBM: layers as `layers_of`, slots of one block id a group.

    Args:
        kv_caches: what `register_kv_caches` is given; a block may be split into kernel blocks.
        kv_cache_config: this worker's.
        layerwise: as of `AttachedHbm`.

    Raises:
        ConfigError: as `layers_of`; or a block of a layer is not one contiguous run of bytes.
    """
    blocks = kv_cache_config.num_blocks
    layers = [
        AttachedLayer(layer.group, _bytes_of(kv_caches[layer.name], blocks, layer))
        for layer in layers_of(kv_cache_config)
    ]
    return AttachedHbm(layers, layerwise=layerwise, groups=len(kv_cache_config.kv_cache_groups))


def required_layout(vllm_config: VllmConfig) -> str | None:
    """The memory layout to ask vLLM for: all layers of a block side by side, to be copied in one.

    None where no attention backend in sight can do it. vLLM drops the wish, with a warning, if it
    chooses a backend that cannot; `VLLM_KV_CACHE_LAYOUT` goes before it.
    """
    backend = vllm_config.attention_config.backend
    if backend is not None:
        orders = backend.get_class().supported_kv_cache_layouts()
        if orders is not None:
            fitting = (o.name for o in orders if o.is_block_outermost and o.is_block_compact)
            return next(fitting, None)
    if not current_platform.is_cuda():
        return None
    capability = current_platform.get_device_capability()
    # Kernels for Blackwell read a block heads first, the others tokens first unless told otherwise.
    return "BLHNC" if capability is not None and capability.major >= 10 else "BLNHC"


def refuse_unsupported(kv_cache_config: KVCacheConfig) -> None:
    """Raise a ConfigError, one line, if pages cannot hold what this model keeps."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise _unsupported("a model without a KV cache", "run it without the connector")
    if kv_cache_config.hisparse_host_num_blocks is not None or any(
        group.host_resident or not group.enable_kv_transfer for group in groups
    ):
        raise _unsupported("a KV cache that vLLM keeps on the host (HiSparse)", "turn it off")
    for group in groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            _refuse_spec(spec)
    sizes = {group.kv_cache_spec.block_size for group in groups}
    sizes.add(kv_cache_config.hash_block_size or block_tokens(kv_cache_config))
    if len(sizes) > 1:
        shown = " and ".join(map(str, sorted(sizes)))
        raise _unsupported(
            f"blocks of different sizes ({shown} tokens)",
            "leave prefix_match_unit unset, or use a model whose layers agree",
        )


def _refuse_spec(spec: KVCacheSpec) -> None:
    if isinstance(spec, MambaSpec):
        raise _unsupported("layers with a recurrent state (Mamba, linear attention)")
    if isinstance(spec, CrossAttentionSpec):
        raise _unsupported("cross attention (encoder-decoder models)")
    if type(spec) not in _SUPPORTED or not spec.prefix_cacheable:
        raise _unsupported(f"what these layers keep ({type(spec).__name__})")
    if getattr(spec, "non_causal", False):
        raise _unsupported("attention to later tokens: K and V of a prefix depend on them")


def _unsupported(what: str, remedy: str = "run this model without the connector") -> ConfigError:
    return ConfigError(f"TieredKVConnector does not support {what}: {remedy}")


def _check_order(order: str, layers: Sequence[Layer]) -> None:
    """Memory orders that put a dimension of a block outside the blocks leave it in pieces."""
    has_heads = any(layer.spec.num_heads > 1 for layer in layers)
    compact = {"?", *(o.name for o in KVCacheLayout if o.is_block_compact)}  # "?": not resolved
    if has_heads and order not in compact:
        raise _in_pieces(order)


def _in_pieces(what: str) -> ConfigError:
    return _unsupported(
        f"blocks that are not one run of bytes ({what})",
        f"set VLLM_KV_CACHE_LAYOUT to one of {_ONE_RUN}, or leave it unset",
    )


def _spec_of(spec: KVCacheSpec, name: str) -> AttentionSpec:
    own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    assert isinstance(own, AttentionSpec)  # refuse_unsupported let nothing else through
    return own


def _numbers(name: str) -> list[int]:
    """Layer numbers in a module name: the order in which the model runs them."""
    return [int(part) for part in name.split(".") if part.isdecimal()]


def _window_tokens(spec: KVCacheSpec) -> int | None:
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return None


def _kept(layer: Layer, tokens: int) -> LayerGroup:
    """What one layer keeps, in the layout's terms; padding that tokens do not share is a state."""
    spec = layer.spec
    window = _window_tokens(spec)
    is_latent = isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec)
    kind: Literal["full", "sliding", "latent"] = "full" if window is None else "sliding"
    token_bytes, rest = divmod(layer.page_bytes, tokens)
    return LayerGroup(
        "latent" if is_latent else kind,
        (),
        token_bytes,
        rest,
        1 if is_latent else spec.num_kv_heads,
        spec.head_size,
        window,
    )


def _described(layer: Layer) -> str:
    """All that decides what the bytes of a block mean, but the memory order."""
    spec = layer.spec
    shape = f"{spec.num_heads}x{spec.num_states}x{spec.state_content_size_bytes}"
    packing = "+".join(
        text
        for text in (spec.kv_quant_mode.name.lower(), getattr(spec, "cache_dtype_str", None))
        if text
    )
    return (
        f"group {layer.group} {type(spec).__name__.removesuffix('Spec')} {shape} of "
        f"{spec.num_kv_heads} heads {spec.head_size}+{spec.head_size_v} {spec.dtype} {packing}"
    )


def _bytes_of(cache: torch.Tensor, blocks: int, layer: Layer) -> torch.Tensor:
    """A layer's cache as uint8 ``[blocks, page bytes]``, a view of the same memory."""
    if cache.shape[0] % blocks:
        raise _in_pieces(f"{layer.name} has {cache.shape[0]} kernel blocks in {blocks} blocks")
    by_block = group_kernel_blocks(cache, blocks)
    width = by_block.element_size()
    n_bytes = by_block[0].numel() * width
    if not _is_one_run(by_block[0]) or n_bytes > layer.page_bytes:
        raise _in_pieces(f"{layer.name}: {tuple(by_block.shape)} with {by_block.stride()}")
    view = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return view.set_(
        cache.untyped_storage(),
        by_block.storage_offset() * width,
        (blocks, layer.page_bytes),
        (by_block.stride(0) * width, 1),
    )


def _is_one_run(block: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(block.stride(), block.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
