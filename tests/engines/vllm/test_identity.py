"""What page keys bind: everything that makes KV equal, and nothing that changes at a restart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from tiered_kv.errors import ConfigError
from tiered_kv.keys import PageKey
from tiered_kv.layout import KVLayout
from tiered_kv.plugins.vllm.identity import (
    adapter_root,
    check_hash_seed,
    namespace_root,
    page_key,
)
from tiered_kv.plugins.vllm.settings import TieredKVSettings

LAYOUT = KVLayout.uniform(page_bytes=4096, page_tokens=32)
IN_MEMORY = TieredKVSettings()
ON_DISK = TieredKVSettings.from_extra_config({"disk": "/kv", "disk_size": "1GiB"})


def config_of(model: Path | str, **options: Any) -> VllmConfig:
    """As an engine of these options would have it; no engine is started."""
    chosen = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 32} | options
    return EngineArgs(model=str(model), **chosen).create_engine_config()


def root_of(
    model: Path | str,
    settings: TieredKVSettings = ON_DISK,
    layout: KVLayout = LAYOUT,
    generation: str = "",
    **options: Any,
) -> PageKey:
    return namespace_root(config_of(model, **options), layout, settings, generation)


@pytest.fixture
def own(qwen3: Path, tmp_path: Path) -> Path:
    """A copy of the model that a test may change; times of change are copied too."""
    return Path(shutil.copytree(qwen3, tmp_path / "own"))


def change_config(model: Path, **settings: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


# -- the root --------------------------------------------------------------------------------------


def test_the_root_is_a_key_and_the_same_every_time(qwen3: Path) -> None:
    assert len(root_of(qwen3)) == 32
    assert root_of(qwen3) == root_of(qwen3)


def test_the_root_is_the_same_in_another_process(qwen3: Path) -> None:
    """With another hash seed: sets and dicts there come in another order."""
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1])\n"
        "import test_identity; print('root', test_identity.root_of(sys.argv[2]).hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "31337", "VLLM_LOGGING_LEVEL": "ERROR"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", program, str(Path(__file__).parent), str(qwen3)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert f"root {root_of(qwen3).hex()}" in done.stdout.splitlines()


def test_what_a_restart_may_change_is_not_in_the_root(qwen3: Path) -> None:
    engine: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": 3,
        "seed": 5,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "served_model_name": "other",
    }
    bigger = TieredKVSettings.from_extra_config(
        {"host": "9GiB", "disk": "/elsewhere", "disk_size": "2TiB", "policy": "fifo"}
    )
    assert root_of(qwen3, bigger, **engine) == root_of(qwen3) == root_of(qwen3, IN_MEMORY)


def test_a_model_may_move_to_another_directory(qwen3: Path, own: Path) -> None:
    assert root_of(own) == root_of(qwen3)


def test_ranks_of_one_engine_share_the_root(qwen3: Path) -> None:
    ranks = [KVLayout("m", "float32", 32, LAYOUT.groups, rank, 2) for rank in range(2)]
    assert root_of(qwen3, layout=ranks[0]) == root_of(qwen3, layout=ranks[1])
    assert root_of(qwen3, layout=ranks[0]) != root_of(qwen3, layout=LAYOUT)


def rewrite_weights(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes())


def append_a_byte(model: Path) -> None:
    (weights,) = model.glob("*.safetensors")
    stat = weights.stat()
    weights.write_bytes(weights.read_bytes() + b"\0")
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def add_a_shard(model: Path) -> None:
    (model / "more.safetensors").write_bytes(b"")


def change_rope(model: Path) -> None:
    change_config(model, rope_parameters={"rope_type": "default", "rope_theta": 5e5})


@pytest.mark.parametrize("change", [rewrite_weights, append_a_byte, add_a_shard, change_rope])
def test_other_weights_or_another_config_make_another_root(
    change: Callable[[Path], None], qwen3: Path, own: Path
) -> None:
    change(own)
    assert root_of(own) != root_of(qwen3)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"load_format": "dummy"},
        {"model_impl": "transformers"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_way_to_run_the_model_makes_another_root(
    options: dict[str, Any], qwen3: Path
) -> None:
    assert root_of(qwen3, **options) != root_of(qwen3)


def test_name_generation_and_layout_are_in_the_root(qwen3: Path) -> None:
    named = TieredKVSettings.from_extra_config({"model_name": "v2"})
    roots = [
        root_of(qwen3),
        root_of(qwen3, named),
        root_of(qwen3, generation="1"),
        root_of(qwen3, generation="2"),
        root_of(qwen3, layout=KVLayout.uniform(4096, 32, layers=2)),
    ]
    assert len(set(roots)) == len(roots)


def test_the_longest_context_is_in_the_root_where_rotations_follow_it(
    qwen3: Path, own: Path
) -> None:
    change_config(own, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    assert root_of(own, max_model_len=1024) != root_of(own, max_model_len=512)
    assert root_of(qwen3, max_model_len=1024) == root_of(qwen3, max_model_len=512)


def test_a_draft_model_is_in_the_root(qwen3: Path, own: Path) -> None:
    """Its KV lies in the same pages."""
    draft = {"method": "draft_model", "model": str(own), "num_speculative_tokens": 2}
    alone, drafted = root_of(qwen3), root_of(qwen3, speculative_config=draft)
    rewrite_weights(own)
    assert len({alone, drafted, root_of(qwen3, speculative_config=draft)}) == 3


# -- a model of a hub ------------------------------------------------------------------------------


class Revision(str):
    """As huggingface_hub resolves one: what was asked for, and the commit that it is."""

    __slots__ = ("resolved",)


def hub_config(qwen3: Path, commit: str | None, revision: str = "main") -> VllmConfig:
    config = config_of(qwen3)
    config.model_config.model = "someone/some-model"
    if commit is not None:
        config.model_config.revision = Revision(revision)
        config.model_config.revision.resolved = commit
    return config


def test_of_a_hub_the_commit_counts_not_the_branch(qwen3: Path) -> None:
    first, same, other = (
        namespace_root(hub_config(qwen3, commit, branch), LAYOUT, ON_DISK)
        for commit, branch in (("a" * 40, "main"), ("a" * 40, "v1"), ("b" * 40, "main"))
    )
    assert first == same != other


def test_a_disk_for_weights_that_nothing_names_is_refused(qwen3: Path) -> None:
    """A branch moves on; KV of the old weights would hit under the new ones."""
    config = hub_config(qwen3, None)
    with pytest.raises(ConfigError, match=r"someone/some-model .*give model_name") as error:
        namespace_root(config, LAYOUT, ON_DISK)
    assert "\n" not in str(error.value)
    named = ON_DISK.model_copy(update={"model_name": "some-model 2026-11"})
    assert namespace_root(config, LAYOUT, named) != namespace_root(config, LAYOUT, IN_MEMORY)


# -- keys and adapters -----------------------------------------------------------------------------


def test_a_key_binds_root_and_block_hash() -> None:
    roots = [PageKey(bytes([n]) * 32) for n in range(2)]
    keys = {page_key(root, block) for root in roots for block in (b"x" * 32, b"y" * 32, b"x" * 16)}
    assert len(keys) == 6
    assert {len(key) for key in keys} == {32}


def test_an_adapter_is_its_files_not_its_name_alone(tmp_path: Path) -> None:
    root = PageKey(b"r" * 32)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    request = LoRARequest("tuned", 1, str(tmp_path))
    first = adapter_root(root, request)
    assert adapter_root(root, None) == root != first == adapter_root(root, request)
    weights.write_bytes(b"three")
    assert adapter_root(root, request) != first
    of_hub = adapter_root(root, LoRARequest("tuned", 1, "someone/adapter"))
    assert of_hub != adapter_root(root, LoRARequest("tuned", 1, "someone/other"))


# -- the seed of block hashes ----------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_a_disk_is_refused_where_hashes_differ_from_process_to_process(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page would be written and none ever found again, without a word."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(ConfigError, match=rf"prefix_caching_hash_algo={algorithm}: .*use sha256"):
        check_hash_seed(_seeded(algorithm, {"disk": "/kv"}))
    check_hash_seed(_seeded(algorithm, {}))  # within one process it is one seed
    check_hash_seed(_seeded("sha256", {"disk": "/kv"}))
    check_hash_seed(_seeded("sha256_cbor", {"disk": "/kv"}))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    check_hash_seed(_seeded(algorithm, {"disk": "/kv"}))


def _seeded(algorithm: str, extra: dict[str, Any]) -> Any:
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=extra.get),
    )


def test_the_rule_of_the_seed_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        hash_fn = get_hash_fn_by_name(name)
        is_stable = resolve_none_hash_seed(hash_fn) == resolve_none_hash_seed(hash_fn)
        assert is_stable == name.startswith("sha256")


def test_torch_dtypes_enter_by_name() -> None:
    from tiered_kv.plugins.vllm.identity import _json

    assert _json({"dtype": torch.bfloat16}) == b'{"dtype":"torch.bfloat16"}'
    assert _json([object(), object]) == b'["object","object"]'  # no address of an object
