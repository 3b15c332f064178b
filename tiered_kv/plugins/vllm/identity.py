"""Identity: the root of all page keys, which binds everything that makes KV equal.

vLLM hashes a block from its tokens, what comes before them, LoRA name, images and cache salt, but
not from the model. A key of ours is that hash under a root made of the model, how it is loaded and
run, and the page's layout, so that a directory outlives restarts and never serves foreign KV.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform

from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.layout import KVLayout
from tiered_kv.plugins.vllm.settings import TieredKVSettings

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SETTINGS = ("config.json", "params.json", "adapter_config.json")
# What a model config says of its own file or of the run, not of the weights.
_NOT_THE_MODEL = ("transformers_version", "use_cache")
_MODEL_FIELDS = (
    "code_revision",
    "disable_sliding_window",
    "model_class_overrides",
    "model_impl",
    "quantization",
    "quantization_config",
)
_LONG_ROPES = ("dynamic", "longrope")  # rotations that follow the longest context allowed


def namespace_root(
    vllm_config: VllmConfig,
    layout: KVLayout,
    settings: TieredKVSettings,
    generation: str = "",
) -> PageKey:
    """The parent of every first page of this engine; equal after a restart with equal settings.

    Reads names, sizes and times of the weight files of a local model, never their content.

    Args:
        layout: of the scheduler's `KVCacheConfig`; every rank then has its share of the same page.
        generation: changes when the weights do while the engine runs; none of the old pages hits.

    Raises:
        ConfigError: KV is to outlive the engine, but nothing says which weights made it.
    """
    model, draft = _model_facts(vllm_config.model_config), _draft_facts(vllm_config)
    if settings.disk is not None and not settings.model_name:
        for weights in (model, draft):
            _refuse_unknown(weights["source"] if weights else None)
    cache = vllm_config.cache_config
    facts = {
        "format": "tiered-kv/vllm/1",
        "vllm": vllm.__version__,
        "device": _device_facts(vllm_config),
        "model": model,
        "draft": draft,
        "random_weights": vllm_config.load_config.load_format == "dummy",
        "cache_dtype": [cache.cache_dtype, cache.kv_cache_dtype_skip_layers],
        "layout": replace(layout, tp_rank=0).fingerprint,
        "block_hash": cache.prefix_caching_hash_algo,
        "model_name": settings.model_name,
        "generation": generation,
    }
    return PageKey(hashlib.sha256(_json(facts)).digest())


def adapter_root(root: PageKey, lora_request: LoRARequest | None) -> PageKey:
    """The root of pages computed with an adapter: its name is in vLLM's hashes, its weights not.

    Looks at the adapter's files when it has some here, else binds its path alone.
    """
    if lora_request is None:
        return root
    path = Path(lora_request.lora_path)
    facts = [lora_request.lora_name, lora_request.lora_path, model_files(path)]
    return PageKey(hashlib.sha256(root + _json(facts)).digest())


def page_key(root: PageKey, block_hash: bytes) -> PageKey:
    """The key of the page that a block hash of vLLM's names; the hash covers all before it."""
    return PageKey(hashlib.sha256(root + block_hash).digest())


def check_hash_seed(vllm_config: VllmConfig) -> None:
    """Refuse a disk whose pages nobody would ever find again.

    Raises:
        ConfigError: a disk is configured and block hashes differ from process to process.
    """
    transfer = vllm_config.kv_transfer_config
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if transfer is None or transfer.get_from_extra_config("disk", None) is None:
        return
    if not algorithm.startswith("sha256") and os.getenv("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm}: its seed is random in every process, so no "
            "page on disk would hit after a restart: use sha256, or fix the seed by PYTHONHASHSEED"
        )


def _model_facts(config: ModelConfig) -> dict[str, Any]:
    """A model in a local directory by its files, wherever it lies; one of a hub by its commit."""
    source = config.model_weights or config.model
    settings = _of_the_model(config.hf_config.to_dict())
    text = _json(settings)
    follows_length = any(f'"{name}"'.encode() in text for name in _LONG_ROPES)
    return {
        **{name: getattr(config, name) for name in _MODEL_FIELDS},
        "source": model_files(Path(source)) or {"hub": source, "commit": _commit(config)},
        "dtype": config.dtype,
        "config": settings,
        "multimodal": _multimodal_facts(config),
        "max_model_len": config.max_model_len if follows_length else None,
    }


def _refuse_unknown(source: Any) -> None:
    if isinstance(source, dict) and source["commit"] is None:
        raise ConfigError(
            f"disk: nothing says which weights {source['hub']} stands for (no local files, no "
            "commit): give model_name in kv_connector_extra_config, a new one when they change"
        )


def _commit(config: ModelConfig) -> str | None:
    """The commit on the hub that was resolved when the engine started."""
    resolved = getattr(config.revision, "resolved", None)
    return resolved or getattr(config.hf_config, "_commit_hash", None)


def model_files(path: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of the files that hold weights or say how to read them."""
    if path.is_file():
        found: Iterable[Path] = [path]
    elif path.is_dir():
        found = (
            file
            for file in path.iterdir()
            if file.suffix in _WEIGHTS or file.name in _SETTINGS or "quant" in file.name
        )
    else:
        return []
    stats = [(file.name, file.stat()) for file in found]
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _of_the_model(config: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _of_the_model(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not str(key).startswith("_") and key not in _NOT_THE_MODEL
    }


def _multimodal_facts(config: ModelConfig) -> dict[str, Any]:
    names = ("language_model_only", "video_pruning_rate", "video_pruning_method")
    return {name: getattr(config.multimodal_config, name, None) for name in names}


def _draft_facts(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """A draft model keeps KV in the same pages."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.draft_model_config is None:
        return None
    return {"method": speculative.method, **_model_facts(speculative.draft_model_config)}


def _device_facts(vllm_config: VllmConfig) -> list[Any]:
    """What decides which kernels write the KV, and so how a block is packed inside."""
    attention = vllm_config.attention_config
    backends = {"": attention.backend, **attention.backend_per_kind}
    named = {kind: backend.name for kind, backend in backends.items() if backend is not None}
    if current_platform.is_cpu():
        machine = current_platform.get_cpu_architecture().name
        kind = f"{machine} {torch.backends.cpu.get_cpu_capability()}"
        amx = machine == "X86" and torch.cpu._is_amx_tile_supported()
        return ["cpu", kind, "amx" if amx else "", named]
    capability = current_platform.get_device_capability()
    return [current_platform.device_type, list(capability) if capability else None, named]


def _json(facts: Any) -> bytes:
    """One encoding of equal facts, in every process."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """What JSON does not know, without a repr that may hold an address."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
