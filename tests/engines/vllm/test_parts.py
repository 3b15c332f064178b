"""Geometry against the real vLLM: caches its own planner and allocator made, and its engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_rig import MODEL_KINDS, ModelKind, open_engine, random_prompts
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tiered_kv.errors import ConfigError
from tiered_kv.plugins.vllm import geometry
from tiered_kv.plugins.vllm.geometry import (
    attach,
    block_tokens,
    layers_of,
    layout_of,
    required_layout,
    window_blocks,
)
from tiered_kv.storage.attached import AttachedHbm, pack_blocks

TOKENS, BLOCKS = 32, 9
FULL = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WIDE = replace(FULL, num_kv_heads=4)
PADDED = replace(FULL, page_size_padded=FULL.unpadded_page_size_bytes + 96)
LATENT = MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
SLIDING = SlidingWindowSpec(
    block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64
)
CHUNKED = ChunkedLocalAttentionSpec(
    block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, attention_chunk_size=96
)
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
orders = pytest.mark.parametrize("order", ORDERS)


def settings_of(order: str | None = None, **parallel: int) -> Any:
    """As much of a `VllmConfig` as geometry is made from."""
    sizes = {
        "rank": 0,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    layout = None if order is None else KVCacheLayout[order]
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes | parallel),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_layout=order,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: layout,
        ),
    )


def names(*indices: int) -> list[str]:
    return [f"model.layers.{index}.self_attn.attn" for index in indices]


def uniform(*specs: KVCacheSpec) -> UniformTypeKVCacheSpecs:
    by_name = dict(zip(names(*range(len(specs))), specs, strict=True))
    return UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=by_name)


MODELS: dict[str, list[tuple[list[str], KVCacheSpec]]] = {
    "attention": [(names(0, 1, 2), FULL)],
    "mla": [(names(0, 1, 2), LATENT)],
    "one-layer": [(names(0), FULL)],
    "hybrid": [(names(0, 2), SLIDING), (names(1, 3), FULL)],
    "three-groups": [(names(0, 3), SLIDING), (names(1, 4), SLIDING), (names(2, 5), FULL)],
    "two-digits": [(names(*range(12)), FULL)],
}
UNEQUAL = {  # vLLM puts these into orders that keep a block in one piece
    "unequal-heads": [(names(0, 1, 2, 3), uniform(FULL, WIDE, FULL, WIDE))],
    "padded": [(names(0, 1), PADDED)],
}


def config_of(order: str, groups: Sequence[tuple[list[str], KVCacheSpec]]) -> KVCacheConfig:
    """A worker's config, made by vLLM's own planner."""
    specs = [KVCacheGroupSpec(layers, spec) for layers, spec in groups]
    large = get_kv_cache_config_from_groups(settings_of(order), specs, 1 << 30)
    block_bytes = large.kv_cache_tensors[0].size // large.num_blocks
    config = get_kv_cache_config_from_groups(settings_of(order), specs, BLOCKS * block_bytes)
    assert config.num_blocks == BLOCKS
    config.kv_cache_layout = order
    return config


def allocated(
    config: KVCacheConfig, kernel_block_tokens: int | None = None
) -> dict[str, torch.Tensor]:
    sizes = None if kernel_block_tokens is None else [kernel_block_tokens]
    assert config.kv_cache_layout is not None
    layout = KVCacheLayout[config.kv_cache_layout]
    caches: dict[str, torch.Tensor] = allocate_kv_cache(config, torch.device("cpu"), layout, sizes)
    return caches


def fill(caches: dict[str, torch.Tensor]) -> None:
    """Different bits in every cell of every layer; NaNs do not occur."""
    for seed, cache in enumerate(caches.values()):
        cells = torch.Generator().manual_seed(seed)
        cache.copy_(torch.rand(cache.shape, generator=cells).to(cache.dtype))


def pages_of(hbm: AttachedHbm, slots: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    pages = [np.zeros(hbm.page_bytes, dtype=np.uint8) for _ in slots]
    hbm.read(slots, pages)
    return pages


# -- geometry, over caches that vLLM's own planner and allocator made ------------------------------


@orders
@pytest.mark.parametrize("model", MODELS)
def test_a_page_moved_to_other_blocks_is_the_same_kv_there(order: str, model: str) -> None:
    """Seen through vLLM's [blocks, heads, tokens, content] views; other blocks keep theirs."""
    config = config_of(order, MODELS[model])
    caches = allocated(config)
    hbm = attach(caches, config, layerwise=False)
    fill(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    groups = len(MODELS[model])
    source, target = [1, 2, 3][:groups], [6, 7, 8][:groups]
    pages = pages_of(hbm, [pack_blocks(source, BLOCKS)])
    hbm.write_layers([pack_blocks(target, BLOCKS)], pages, 0, len(hbm.layers))
    others = [block for block in range(BLOCKS) if block not in target]
    for (layers, _), old, new in zip(MODELS[model], source, target, strict=True):
        for name in layers:
            assert torch.equal(caches[name][new], before[name][old])
            assert torch.equal(caches[name][others], before[name][others])


@orders
@pytest.mark.parametrize("model", UNEQUAL)
def test_layers_of_unequal_size_or_with_padding_move_too(order: str, model: str) -> None:
    config = config_of(order, UNEQUAL[model])
    caches = allocated(config)
    hbm = attach(caches, config, layerwise=False)
    fill(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    hbm.write_layers([5], pages_of(hbm, [2]), 0, len(hbm.layers))
    others = [block for block in range(BLOCKS) if block != 5]
    for name, cache in caches.items():
        assert torch.equal(cache[5], before[name][2])
        assert torch.equal(cache[others], before[name][others])


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_kernel_blocks_that_split_a_block_move_with_it(order: str) -> None:
    config = config_of(order, MODELS["attention"])
    caches = allocated(config, kernel_block_tokens=8)
    assert {cache.shape[0] for cache in caches.values()} == {4 * BLOCKS}
    hbm = attach(caches, config, layerwise=False)
    fill(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    hbm.write_layers([5], pages_of(hbm, [2]), 0, 3)
    for name, cache in caches.items():
        assert torch.equal(cache[20:24], before[name][8:12])
        assert torch.equal(cache[:20], before[name][:20])
        assert torch.equal(cache[24:], before[name][24:])


@orders
@pytest.mark.parametrize("model", [*MODELS, *UNEQUAL])
def test_worker_and_scheduler_agree_on_pages_and_layers(order: str, model: str) -> None:
    config = config_of(order, (MODELS | UNEQUAL)[model])
    of_scheduler = generate_scheduler_kv_cache_config([config])
    layout = layout_of(config, settings_of())
    assert attach(allocated(config), config, layerwise=True).page_bytes == layout.page_bytes
    assert layout_of(of_scheduler, settings_of()).page_bytes == layout.page_bytes
    order_of = [layer.name for layer in layers_of(config)]
    assert order_of == names(*range(len(order_of)))
    assert [layer.name for layer in layers_of(of_scheduler)] == order_of
    assert block_tokens(of_scheduler) == block_tokens(config) == layout.page_tokens == TOKENS


@orders
def test_a_block_is_one_copy_where_its_layers_are_neighbours(order: str) -> None:
    config = config_of(order, MODELS["three-groups"])
    hbm = attach(allocated(config), config, layerwise=False)
    assert [len(runs) for runs in hbm._runs] == [1, 1, 1]
    neighbours = [run.pool.stride(0) == run.pool.shape[2] for (run,) in hbm._runs]
    assert neighbours == [order.startswith("BL")] * 3


def test_everything_that_tells_bytes_apart_is_in_the_fingerprint() -> None:
    def fingerprint(
        order: str = "LBHNC",
        layers: int = 3,
        of: KVCacheSpec = FULL,
        cache_dtype: str = "auto",
        **parallel: int,
    ) -> str:
        settings = settings_of(order, **parallel)
        settings.cache_config.cache_dtype = cache_dtype
        return layout_of(config_of(order, [(names(*range(layers)), of)]), settings).fingerprint

    same = {fingerprint() for _ in range(3)}
    others = [
        *(fingerprint(order) for order in ORDERS[1:]),
        fingerprint(layers=4),
        fingerprint(of=replace(FULL, block_size=16)),
        fingerprint(of=replace(FULL, dtype=torch.float16)),
        fingerprint(of=replace(FULL, num_kv_heads=4, head_size=4)),  # as many bytes
        fingerprint(of=replace(FULL, head_size=4, head_size_v=12)),  # again
        fingerprint(of=WIDE),
        fingerprint(of=SLIDING),
        fingerprint(of=PADDED),
        fingerprint(of=LATENT),
        fingerprint(of=replace(LATENT, cache_dtype_str="fp8_ds_mla")),
        fingerprint(cache_dtype="fp8_e5m2"),
        fingerprint(rank=0, tensor_parallel_size=2),
        fingerprint(rank=1, tensor_parallel_size=2),
        fingerprint(rank=0, tensor_parallel_size=2, pipeline_parallel_size=2),
        fingerprint(rank=2, tensor_parallel_size=2, pipeline_parallel_size=2),
    ]
    assert len(same) == 1
    assert len({*same, *others}) == 1 + len(others)


def test_a_hybrid_models_groups_are_in_the_fingerprint() -> None:
    one, other = (
        layout_of(config_of("LBHNC", groups), settings_of()).fingerprint
        for groups in (
            [(names(0, 1), SLIDING), (names(2, 3), SLIDING)],
            [(names(0, 2), SLIDING), (names(1, 3), SLIDING)],
        )
    )
    assert one != other


def test_a_window_is_as_many_blocks_as_vllm_looks_for() -> None:
    def windows(*specs: KVCacheSpec) -> tuple[int | None, ...]:
        groups = [KVCacheGroupSpec(names(at), spec) for at, spec in enumerate(specs)]
        return window_blocks(KVCacheConfig(BLOCKS, [], groups))

    assert windows(FULL, LATENT) == (None, None)
    assert windows(replace(FULL, sliding_window=64)) == (None,)  # kept whole, only computed so
    sizes = (1, 2, 33, 34, 64, 65, 66)
    found = windows(*(replace(SLIDING, sliding_window=tokens) for tokens in sizes))
    assert found == (0, 1, 1, 2, 2, 2, 3)
    latent = SlidingWindowMLASpec(
        block_size=TOKENS, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, sliding_window=128
    )
    assert windows(uniform(SLIDING, SLIDING), latent, CHUNKED) == (2, 4, 3)


MAMBA = MambaSpec(block_size=TOKENS, shapes=((4, 4),), dtypes=(torch.float32,))
CROSS = CrossAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "a model without a KV cache"),
        ([KVCacheGroupSpec(names(0), FULL), KVCacheGroupSpec(names(1), MAMBA)], "recurrent state"),
        ([KVCacheGroupSpec(names(0), CROSS)], "cross attention"),
        ([KVCacheGroupSpec(names(0), replace(FULL, non_causal=True))], "later tokens"),
        ([KVCacheGroupSpec(names(0), uniform(FULL, MAMBA))], "recurrent state"),
        ([KVCacheGroupSpec(names(0), FULL, host_resident=True)], "HiSparse"),
        ([KVCacheGroupSpec(names(0), FULL, enable_kv_transfer=False)], "HiSparse"),
        (
            [
                KVCacheGroupSpec(names(0), FULL),
                KVCacheGroupSpec(names(1), replace(SLIDING, block_size=64)),
            ],
            r"different sizes \(32 and 64 tokens\)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_one_clear_line(
    groups: list[KVCacheGroupSpec], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        layers_of(KVCacheConfig(BLOCKS, [], groups))
    assert str(error.value).startswith("TieredKVConnector does not support ")
    assert "\n" not in str(error.value)


def test_hashes_finer_than_blocks_are_not_supported() -> None:
    config = config_of("LBHNC", MODELS["hybrid"])
    config.hash_block_size = 16
    with pytest.raises(ConfigError, match=r"\(16 and 32 tokens\): leave prefix_match_unit unset"):
        layers_of(config)


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_not_supported(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} 2: set it to 1"):
        layout_of(config_of("LBHNC", MODELS["attention"]), settings_of(None, **{name: 2}))


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_an_order_that_tears_blocks_apart_is_not_supported(order: str) -> None:
    config = config_of(order, MODELS["attention"])
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT to one of LBHNC, LBNHC"):
        layout_of(config, settings_of())
    with pytest.raises(ConfigError, match="VLLM_KV_CACHE_LAYOUT to one of LBHNC, LBNHC"):
        attach(allocated(config), config, layerwise=False)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_with_one_head_no_order_tears_a_block_apart(order: str) -> None:
    config = config_of(order, MODELS["mla"])
    caches = allocated(config)
    hbm = attach(caches, config, layerwise=False)
    assert hbm.page_bytes == layout_of(config, settings_of()).page_bytes
    fill(caches)
    expected = {name: cache[2].clone() for name, cache in caches.items()}
    hbm.write_layers([5], pages_of(hbm, [2]), 0, 3)
    assert all(torch.equal(cache[5], expected[name]) for name, cache in caches.items())


class _Cuda:
    """A platform that is not here."""

    def __init__(self, major: int) -> None:
        self._major = major

    def is_cuda(self) -> bool:
        return True

    def get_device_capability(self) -> Any:
        return SimpleNamespace(major=self._major)


@pytest.mark.parametrize(
    ("major", "backend", "expected"),
    [
        (9, None, "BLNHC"),
        (10, None, "BLHNC"),
        (12, None, "BLHNC"),
        (9, "TRITON_ATTN", "BLNHC"),
        (9, "FLEX_ATTENTION", None),
        (10, "CPU_ATTN", None),
    ],
)
def test_blocks_side_by_side_are_asked_for_where_a_backend_can(
    major: int, backend: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.setattr(geometry, "current_platform", _Cuda(major))
    settings = settings_of()
    settings.attention_config.backend = AttentionBackendEnum[backend] if backend else None
    assert required_layout(settings) == expected


def test_on_a_cpu_no_order_is_asked_for() -> None:
    assert required_layout(settings_of()) is None


# -- geometry, in a running engine -----------------------------------------------------------------


def attached_to(engine: Any) -> tuple[AttachedHbm, KVCacheConfig]:
    """The tensors of an engine in this process, by the names under which its layers hold them."""
    core = engine.llm_engine.engine_core.engine_core
    config = core.model_executor.driver_worker.worker.model_runner.kv_cache_config
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = {layer.name: layers[layer.name].kv_cache for layer in layers_of(config)}
    hbm = attach(caches, config, layerwise=True)
    for seen in (config, core.scheduler.kv_cache_config):
        assert layout_of(seen, engine.llm_engine.vllm_config).page_bytes == hbm.page_bytes
    return hbm, config


def answer(engine: Any, prompt: Sequence[int], between: Callable[[], None]) -> list[int]:
    """16 greedy tokens; `between` is called after the eighth."""
    parameters = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    engine.llm_engine.add_request("one", {"prompt_token_ids": list(prompt)}, parameters)
    tokens: list[int] = []
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            if len(tokens) == 8:
                between()
    return tokens


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_an_engine_goes_on_with_pages_that_were_taken_out_and_put_back(
    kind: ModelKind, model_of: Callable[..., Path]
) -> None:
    """With junk in its blocks instead, the other half of the answer is another one."""
    (prompt,) = random_prompts(1, 300)
    options: dict[str, Any] = {"kv_bytes": 4 << 20, "max_model_len": 512}
    with open_engine(model_of(kind), enable_prefix_caching=False, **options) as engine:
        expected = answer(engine, prompt, lambda: None)
        hbm, config = attached_to(engine)
        groups = len(config.kv_cache_groups)
        slots = [pack_blocks([block] * groups, hbm.blocks) for block in range(1, hbm.blocks)]
        junk = np.random.default_rng(0).normal(size=hbm.page_bytes // 4).astype(np.float32)

        def put(pages: Sequence[np.ndarray[Any, Any]]) -> None:
            for first, last in hbm.layer_steps:
                hbm.write_layers(slots, pages, first, last)

        def spoil() -> None:
            put([junk.view(np.uint8)] * len(slots))

        def take_out_and_put_back() -> None:
            pages = pages_of(hbm, slots)
            spoil()
            put(pages)

        assert answer(engine, prompt, take_out_and_put_back) == expected
        spoiled = answer(engine, prompt, spoil)
    assert spoiled[:8] == expected[:8]
    assert spoiled[8:] != expected[8:]
