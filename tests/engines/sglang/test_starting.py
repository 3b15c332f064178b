"""A wrong configuration stops the engine's start with one line; a right one divides the disk."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_parallel
from sglang_rig import Loaded, Opener, device_pool, host_pool, make_storage

from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.plugins.sglang import storage as storage_module
from tiered_kv.plugins.sglang import versions


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"direktory": "/x"}, r"no key 'direktory' \(did you mean 'directory'\?\); its keys are"),
        ({"colour": "red"}, r"no key 'colour'; its keys are directory, size, policy, io_threads"),
        ({"directory": None}, "needs 'directory': where the pages go"),
        ({"size": None}, "needs 'size': bytes"),
        ({"size": "much"}, "size='much': could not parse value"),
        ({"size": -1}, "size=-1: "),
        ({"policy": "best"}, "policy='best': Input should be 'lru' or 'fifo'"),
        ({"io_threads": 0}, "io_threads=0: "),
        ({"size": "1KiB"}, "size is too small: a rank has 1024 bytes of it and needs at least"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_setting_is_one_line(open_cache: Opener, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as error:
        open_cache(**given)
    one_line(error)
    assert not list(open_cache.directory.glob("*")), "nothing is left behind"


@pytest.mark.parametrize("kind", ["mha", "dsa"])
def test_sglangs_own_keys_are_not_taken_for_ours(open_cache: Opener, kind: str) -> None:
    """What SGLang takes out itself, and what it leaves in."""
    cache = open_cache(kind=kind, allocator="default", prefetch_threshold=256, file_storage_path="")
    assert cache.backup(cache.prompt(1, 3)) == 3


def test_a_directory_that_cannot_be_made_stops_the_start(
    open_cache: Opener, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"file.* cannot be used") as error:
            open_cache(directory=directory)
        one_line(error)


def test_a_directory_of_something_else_stops_the_start(open_cache: Opener) -> None:
    open_cache.directory.mkdir()
    (open_cache.directory / "thesis.tex").write_text("\\end")
    with pytest.raises(
        ValueError, match=r"kv holds thesis.tex, and the pages .* go to tp1"
    ) as error:
        open_cache()
    one_line(error)
    assert [path.name for path in open_cache.directory.iterdir()] == ["thesis.tex"]


def test_a_directory_in_use_stops_the_start(open_cache: Opener) -> None:
    cache = open_cache()
    cache.backup(cache.prompt(1, 3))
    with pytest.raises(ValueError, match="is in use by another process") as error:
        open_cache()
    one_line(error)
    assert cache.prefetch(cache.prompt(1, 3)) == Loaded(3, 3)


def test_what_failed_to_start_leaves_the_directory_free(open_cache: Opener) -> None:
    cache = open_cache()
    cache.backup(cache.prompt(1, 3))
    open_cache.close()
    with pytest.raises(LayoutMismatchError):
        open_cache(model="models/other")
    assert open_cache().prefetch(cache.prompt(1, 3)) == Loaded(3, 3)


@pytest.mark.parametrize(
    "other",
    [
        {"model": "models/other"},
        {"dtype": torch.float16},
        {"layout": "page_first_direct"},
        {"layout": "layer_first"},
        {"kind": "mla"},
    ],
    ids=str,
)
def test_two_models_dtypes_or_layouts_never_share_a_directory(
    open_cache: Opener, other: dict[str, Any]
) -> None:
    """SGLang's file backend has neither dtype nor layout in its names, and reads the old bytes."""
    cache = open_cache()
    prompt = cache.prompt(1, 5)
    cache.backup(prompt)
    open_cache.close()
    with pytest.raises(LayoutMismatchError, match="one directory for each model") as error:
        open_cache(**other)
    one_line(error)
    assert open_cache().prefetch(prompt) == Loaded(5, 5)


def test_two_kinds_of_fp8_never_share_a_directory(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To SGLang's pools both are bytes: the engine's own setting tells them apart."""
    told = SimpleNamespace(kv_cache_dtype="fp8_e4m3")
    monkeypatch.setattr(storage_module, "get_model", lambda: told)
    open_cache(dtype=torch.uint8)
    open_cache.close()
    told.kv_cache_dtype = "fp8_e5m2"
    with pytest.raises(LayoutMismatchError):
        open_cache(dtype=torch.uint8)


def test_a_size_may_grow_and_not_shrink(open_cache: Opener) -> None:
    cache = open_cache(size="8MiB")
    prompt = cache.prompt(1, 5)
    cache.backup(prompt)
    room = cache.storage._stores["kv"][1].capacity_pages
    open_cache.close()
    with pytest.raises(ValueError, match="cannot shrink to 4194304: give a larger size") as error:
        open_cache(size="4MiB")
    one_line(error)
    cache = open_cache(size="16MiB")
    assert cache.storage._stores["kv"][1].capacity_pages > 1.5 * room
    assert cache.prefetch(prompt) == Loaded(5, 5)


def test_the_size_is_for_all_ranks_together(open_cache: Opener, tmp_path: Path) -> None:
    """LMCache/LMCache#1399: a limit that was meant for the machine was taken by each of 8 ranks."""
    pool = host_pool(device_pool("mha"), "page_first")
    ranks = []
    with get_parallel().override(tp_size=2, attn_tp_size=2):
        for rank in range(2):
            config = {"tp_rank": rank, "tp_size": 2}
            ranks.append(make_storage(open_cache.directory, pool, config, size="8MiB")[0])
    indices = torch.arange(64 * 16)
    for round_ in range(5):
        for number, storage in enumerate(ranks):
            keys = [f"{number:02x}{round_:02x}{at:060x}" for at in range(64)]
            assert storage.batch_set_v1(keys, indices) == [True] * 64
    command = ["du", "-s", "-B1", str(open_cache.directory)]
    for storage in ranks:  # each is full, in less than its half: emptied segments are filled first
        _, store = storage._stores["kv"]
        assert store.stats().resident_pages["disk"] == store.capacity_pages
    assert 5 << 20 <= int(subprocess.check_output(command).split()[0]) <= 8 << 20
    for storage in ranks:
        storage.close()
    with pytest.raises(ValueError, match=r"holds tp2, and the pages of this engine go to tp1"):
        open_cache(size="8MiB")


def test_an_sglang_of_another_version_is_refused_before_it_is_imported(
    open_cache: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda package: "0.6.0")
    with pytest.raises(
        ValueError, match=r"works with SGLang 0\.5\.23, and this is 0\.6\.0"
    ) as error:
        open_cache()
    one_line(error)


def test_the_pages_of_a_pool_that_sglang_hides_stop_the_start(open_cache: Opener) -> None:
    with pytest.raises(ValueError, match=r"layout page_unified .* choose page_first"):
        open_cache(layout="page_unified")


def test_pools_that_hold_others_pages_are_refused(open_cache: Opener) -> None:
    for attribute, says in (("shard_size", "shards the pages"), ("_is_dummy", "first rank alone")):
        pool = host_pool(device_pool("mha"), "page_first")
        setattr(pool, attribute, 2)
        with pytest.raises(ConfigError, match=says):
            make_storage(open_cache.directory, pool, {})


def test_it_is_what_sglang_asks_for() -> None:
    """Every method of the interface is ours, and takes what SGLang's own takes."""
    import inspect

    ours = storage_module.TieredKVStorage
    inherited = [
        name
        for name, method in vars(HiCacheStorage).items()
        if inspect.isfunction(method) and name not in vars(ours)
    ]
    assert inherited == []
    for name, method in vars(HiCacheStorage).items():
        if inspect.isfunction(method):
            theirs = list(inspect.signature(method).parameters)
            assert list(inspect.signature(getattr(ours, name)).parameters) == theirs, name
