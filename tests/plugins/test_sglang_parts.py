"""The parts of the SGLang plugin that need no SGLang: hits, ranks, shares, settings, pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiered_kv.plugins.sglang as plugin
from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.plugins.sglang.hits import leading, restorable_hits
from tiered_kv.plugins.sglang.meter import Meter
from tiered_kv.plugins.sglang.pages import HostPages
from tiered_kv.plugins.sglang.rank import Rank
from tiered_kv.plugins.sglang.settings import StorageSettings
from tiered_kv.plugins.sglang.shares import (
    OWN_BYTES,
    RECORD,
    divide,
    least_bytes,
    read_record,
    write_record,
)
from tiered_kv.plugins.sglang.stores import PoolStores
from tiered_kv.plugins.sglang.traffic import Traffic, page_key
from tiered_kv.plugins.sglang.versions import check_version

PAGE_TOKENS = 4


def test_naming_the_plugin_does_not_import_sglang() -> None:
    assert plugin.__all__ == ["TieredKVStorage"]
    with pytest.raises(AttributeError, match="no attribute 'Storage'"):
        _ = plugin.Storage
    assert "sglang" not in sys.modules


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.5.23+cu130"])
def test_versions_that_work(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.5.230", "0.6.0", "1.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=rf"SGLang 0\.5\.23, and this is {version}"):
        check_version(version)


# -- hits ------------------------------------------------------------------------------------------


def transfer(policy: str, keys: int = 1, name: str = "side") -> Any:
    return SimpleNamespace(
        name=name, hit_policy=policy, keys=["k"] * keys, block_pages=4, group_pages=2
    )


@given(
    st.lists(st.booleans(), max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.lists(st.booleans(), min_size=12, max_size=12),
    st.integers(0, 4),
)
def test_a_length_is_restorable_if_and_only_if_all_it_needs_is_there(
    kv: list[bool], every: list[bool], trailing: list[bool], window: int
) -> None:
    """Against the words of SGLang's policies, length by length."""
    pools = {"every": every, "trailing": trailing}

    def present(wanted: Any, pages: int) -> Sequence[bool]:
        return pools[wanted.name][:pages]

    wanted = [
        transfer("all_pages", name="every"),
        transfer("trailing_pages", window, name="trailing"),
    ]
    hits = restorable_hits(kv, wanted, present)
    expected = [
        length
        for length in range(1, len(kv) + 1)
        if all(kv[:length])
        and all(every[:length])
        and all(trailing[max(0, length - max(1, window)) : length])
    ]
    assert hits.restorable == expected
    assert hits.pages == max(expected, default=0)
    assert hits.by_pool.get("kv", 0) == leading(kv)
    assert hits.by_pool.get("every", 0) == leading(every[: leading(kv)])


def test_an_unknown_policy_is_an_error_not_a_hit() -> None:
    with pytest.raises(ValueError, match="'some_pages' of pool side is not known"):
        restorable_hits([True], [transfer("some_pages")], lambda wanted, pages: [True])


def test_groups_of_blocks_count_only_whole() -> None:
    hits = restorable_hits([True] * 3, [transfer("block_groups", 5)], lambda *_: [True] * 3)
    assert (hits.pages, hits.by_pool["side"]) == (3, 4)


# -- ranks -----------------------------------------------------------------------------------------


class Parallel:
    """SGLang's parallel context: raises for what nobody has set."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} has not been written in this process")


def rank(parallel: Any, **changes: int) -> Rank:
    fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0}
    fields |= {"attn_cp_rank": 0, "attn_cp_size": 1}
    return Rank.of(SimpleNamespace(**(fields | changes)), parallel)


def test_every_process_has_a_directory_of_its_own_and_a_share() -> None:
    assert rank(Parallel()) == Rank("tp1", "tp0", 1)
    assert rank(Parallel(tp_size=8, nnodes=2), tp_rank=3, tp_size=8) == Rank("tp8", "tp3", 4)
    two_stages = rank(Parallel(tp_size=2), tp_rank=1, tp_size=2, pp_rank=1, pp_size=2)
    assert two_stages == Rank("tp2-pp2", "tp1-pp1", 4)
    attention = rank(Parallel(tp_size=8, attn_dp_size=4), tp_rank=1, tp_size=2, dp_rank=3)
    assert attention == Rank("tp2-dp4", "tp1-dp3", 8)
    replica = rank(Parallel(tp_size=2, dp_size=3, dp_rank=2), tp_size=2)
    assert replica == Rank("tp2-replica3", "tp0-replica2", 6)
    context = rank(Parallel(tp_size=4), tp_rank=1, tp_size=2, attn_cp_rank=1, attn_cp_size=2)
    assert context == Rank("tp2-cp2", "tp1-cp1", 4)
    assert rank(Parallel(dp_size=1, dp_rank=None)) == Rank("tp1", "tp0", 1)


def test_the_pages_of_another_topology_are_not_left_beside_ours(tmp_path: Path) -> None:
    mine = Rank("tp2", "tp1", 2)
    assert mine.directory(tmp_path / "new") == tmp_path / "new" / "tp2" / "tp1"
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "tp2").mkdir()
    assert mine.directory(tmp_path) == tmp_path / "tp2" / "tp1"
    (tmp_path / "tp4").mkdir()
    with pytest.raises(ConfigError, match="holds tp4, and the pages of this engine go to tp2"):
        mine.directory(tmp_path)


# -- shares ----------------------------------------------------------------------------------------


@given(
    st.integers(0, 1 << 40),
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 1 << 30), min_size=1),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1 << 30), min_size=1),
)
def test_shares_never_exceed_the_total_nor_fall_below_the_least(
    left: int, weights: dict[str, int], least: dict[str, int]
) -> None:
    total = sum(least.values()) + left
    shares = divide(total, weights, least)
    assert sum(shares.values()) <= total
    assert all(shares[name] >= n_bytes for name, n_bytes in least.items())
    assert divide(total, weights, shares).keys() == shares.keys()


def test_the_record_comes_back_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    assert read_record(tmp_path) == {}
    write_record(tmp_path, {"kv": 5, "mamba": 7})
    assert read_record(tmp_path) == {"kv": 5, "mamba": 7}
    for text in ("", "{}", '{"pool_bytes": [1]}', '{"pool_bytes": {"kv": "x"}}'):
        (tmp_path / RECORD).write_text(text)
        with pytest.raises(ConfigError, match="is not a record of tiered-kv"):
            read_record(tmp_path)
    (tmp_path / RECORD).unlink()
    (tmp_path / RECORD).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_record(tmp_path)


# -- settings, meter -------------------------------------------------------------------------------


def test_settings_read_sizes_and_leave_sglangs_keys_alone() -> None:
    mine = {"directory": "/kv", "size": "2GiB", "backend_name": "x", "tp_lcm_size": 4}
    settings = StorageSettings.parse(mine)
    assert (settings.directory, settings.size) == (Path("/kv"), 2 << 30)
    assert (settings.policy, settings.io_threads) == ("lru", 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "1GiB"}, "needs 'directory': where the pages go"),
        ({"directory": "/kv", "siz": 1}, r"no key 'siz' \(did you mean 'size'\?\); its keys are d"),
        ({"directory": "/kv", "size": 1, "z": 1}, r"'z'; its keys are .*and SGLang's own backend_"),
        ({"directory": "/kv", "size": 0}, "size=0: .*greater than 0"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_one_line_that_says_what_would_be_right(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        StorageSettings.parse(given)
    assert str(raised.value).startswith("hicache-storage-backend-extra-config: TieredKVStorage")
    assert "\n" not in str(raised.value)


def test_the_meter_tells_each_batch_once_and_why_prompts_ended() -> None:
    meter = Meter()
    meter.moved("read", 3, 3 << 20, 0.001)
    meter.moved("read", 0, 0, 0.001)
    meter.moved("written", 5, 5 << 20, 0.0)
    read, written = meter.collect()
    assert (list(read.pages), list(written.pages)) == ([3], [5])
    assert read.gb_per_s[0] == pytest.approx(3.1457, rel=1e-3)
    assert not meter.collect()[0].pages
    meter.asked(10, 10, "")
    meter.asked(10, 4, "evicted")
    assert meter.questions() == {"asked_pages": 20, "there_pages": 14, "evicted": 1}
    assert not meter.is_due()


# -- pages and traffic -----------------------------------------------------------------------------


class Pool:
    """Stands for a host pool of SGLang's: K and V of 2,048 bytes a token, in two regions."""

    layout = "page_first"
    dtype = torch.uint8
    page_size = PAGE_TOKENS
    size = 64

    def __init__(self, *, has_pointers: bool = True, has_flat: bool = True) -> None:
        self._has_pointers = has_pointers
        self._has_flat = has_flat
        self.kv = torch.zeros(2, self.size, 2048, dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if not self._has_pointers:
            raise ValueError("Unsupported layout: layer_first")
        firsts = indices.tolist()[:: self.page_size]
        pointers = [half.data_ptr() + at * 2048 for at in firsts for half in self.kv]
        return pointers, [2048 * self.page_size] * len(pointers)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        if not self._has_flat:
            raise NotImplementedError("no flat pages")
        return torch.zeros(2 * self.page_size * 2048, dtype=torch.uint8)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv[:, index : index + self.page_size].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv[:, index : index + self.page_size] = page.reshape(2, self.page_size, 2048)


def open_traffic(tmp_path: Path, pool: Pool, model: str = "m") -> tuple[Traffic, PoolStores]:
    stores = PoolStores(tmp_path / "rank", 4 << 20, [model], 2, "lru")
    stores.add(HostPages("kv", pool))
    stores.open()
    return Traffic(stores), stores


@pytest.mark.parametrize("has_pointers", [True, False], ids=["pointers", "flat"])
def test_pages_go_to_disk_and_come_back_to_another_place(
    tmp_path: Path, has_pointers: bool
) -> None:
    pool = Pool(has_pointers=has_pointers)
    pool.kv.random_(0, 256)
    before = pool.kv.clone()
    traffic, stores = open_traffic(tmp_path, pool)
    keys = [f"{at:064x}" for at in range(3)]
    there = torch.tensor([4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15])
    assert traffic.save("kv", keys, there) == [True] * 3
    pool.kv.zero_()
    elsewhere = torch.tensor([40, 41, 42, 43, 0, 1, 2, 3, 8, 9, 10, 11])
    assert traffic.load("kv", [*keys[:2], "f" * 64], elsewhere) == [True, True, False]
    assert torch.equal(pool.kv[:, 40:44], before[:, 4:8])
    assert torch.equal(pool.kv[:, 0:4], before[:, 20:24])
    assert not pool.kv[:, 8:12].any()
    assert traffic.hits([*keys, "f" * 64], []).pages == 3
    stores.close()


def test_a_pool_without_any_access_says_what_to_choose() -> None:
    with pytest.raises(ConfigError, match=r"page_first \(no flat pages\): choose page_first"):
        HostPages("kv", Pool(has_pointers=False, has_flat=False))


def test_a_fingerprint_tells_apart_all_that_bytes_depend_on() -> None:
    pool = Pool()
    first = HostPages("kv", pool)
    prints = {first.fingerprint("model"), first.fingerprint("other model")}
    prints.add(HostPages("draft", pool).fingerprint("model"))
    prints.add(HostPages("kv", Pool(has_pointers=False)).fingerprint("model"))
    changes = {"layout": "page_head", "dtype": torch.int8, "page_size": 8, "head_num": 3}
    for name, value in changes.items():
        changed = Pool()
        setattr(changed, name, value)
        prints.add(HostPages("kv", changed).fingerprint("model"))
    assert len(prints) == 8
    assert HostPages("kv", Pool()).fingerprint("model") == first.fingerprint("model")


def test_keys_are_sglangs_hash_or_a_hash_of_any_text() -> None:
    assert page_key("ab" * 32) == bytes.fromhex("ab" * 32)
    assert len({page_key(key) for key in ("ab" * 31, "", "zz" * 32, "ab" * 33)}) == 4
    assert all(len(page_key(key)) == 32 for key in ("ab" * 31, "", "no hex"))


def test_another_model_and_another_pool_set_are_refused(tmp_path: Path) -> None:
    traffic, stores = open_traffic(tmp_path, Pool())
    with pytest.raises(ConfigError, match="in use by another process"):
        open_traffic(tmp_path, Pool())
    assert traffic.save("kv", ["a"], torch.arange(PAGE_TOKENS)) == [True]
    stores.close()
    with pytest.raises(LayoutMismatchError):
        open_traffic(tmp_path, Pool(), model="other")
    more = PoolStores(tmp_path / "rank", 4 << 20, ["m"], 2, "lru")
    more.add(HostPages("kv", Pool()))
    more.add(HostPages("mamba", Pool()))
    with pytest.raises(ConfigError, match="divided among the pools kv, and now there is mamba too"):
        more.open()
    traffic, stores = open_traffic(tmp_path, Pool())
    assert traffic.contains("kv", [page_key("a")]) == [True]
    stores.close()


def test_a_rank_too_small_leaves_nothing_behind(tmp_path: Path) -> None:
    least = least_bytes({"kv": 2 * 2048 * PAGE_TOKENS})["kv"] + OWN_BYTES
    for size, fits in ((least - 1, False), (least, True)):
        stores = PoolStores(tmp_path / "tp1" / "tp0", size, ["m"], 2, "lru")
        stores.add(HostPages("kv", Pool()))
        if fits:
            stores.open()
            assert Traffic(stores).save("kv", ["a"], torch.arange(PAGE_TOKENS)) == [True]
            stores.close()
            continue
        with pytest.raises(ConfigError, match=f"needs at least {least} for its pools kv"):
            stores.open()
        assert not (tmp_path / "tp1").exists()


def test_flat_pages_and_pages_in_parts_are_kept_apart_where_their_order_differs(
    tmp_path: Path,
) -> None:
    pool = Pool()
    pool.layout = "layer_first"
    traffic, stores = open_traffic(tmp_path, pool)
    page = torch.arange(2 * 2048 * PAGE_TOKENS, dtype=torch.int32).to(torch.uint8)
    assert traffic.save_flat(["a"], [page]) == [True]
    assert traffic.hits(["a"], []).pages == 0
    (came,) = traffic.load_flat(["a"], None)
    assert came is not None and torch.equal(came, page)
    assert traffic.flat_key("a") != page_key("a")
    stores.close()
