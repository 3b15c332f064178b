"""The settings of the vLLM connector: defaults, shares, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError
from tiered_kv.plugins.vllm.settings import TieredKVSettings

parse = TieredKVSettings.from_extra_config


def test_nothing_need_be_said() -> None:
    settings = parse({})
    assert settings.host == 4 << 30
    assert (settings.disk, settings.disk_size) == (None, None)
    assert settings.write_policy == "through"
    assert (settings.store, settings.load) == ("all", "auto")
    assert (settings.prefetch_deadline_s, settings.load_deadline_s) == (2.0, 30.0)


def test_what_is_said_is_taken() -> None:
    settings = parse(
        {
            "host": "8GiB",
            "disk": "/mnt/nvme/kv",
            "disk_size": "1TiB",
            "write_policy": "back",
            "policy": "fifo",
            "io_threads": 8,
            "store": "prompt",
            "load": "async",
            "max_load_tokens": 4096,
            "min_load_tokens": 256,
            "prefill_tokens_per_s": 12_000,
            "model_name": "mine-v2",
        }
    )
    assert (settings.host, settings.disk_size) == (8 << 30, 1 << 40)
    assert settings.disk == Path("/mnt/nvme/kv")
    assert (settings.max_load_tokens, settings.prefill_tokens_per_s) == (4096, 12_000.0)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"hosts": "1GiB"}, r"no key 'hosts' \(did you mean 'host'\?\); its keys are host, disk, "),
        ({"zzz": 1}, r"no key 'zzz'; its keys are host, disk, disk_size, "),
        ({7: 1}, r"no key 7; its keys are host, "),
        ({"host": "much"}, r"host='much': could not parse"),
        ({"host": 0}, r"host=0: .*greater than 0"),
        ({"disk": "/kv"}, r"disk needs disk_size too: give both for a disk tier, or neither"),
        ({"disk_size": "1GiB"}, r"disk_size needs disk too"),
        ({"write_policy": "around"}, r"write_policy='around': .*'back' or 'through'"),
        ({"policy": "mru"}, r"policy='mru': .*'lru' or 'fifo'"),
        ({"io_threads": 0}, r"io_threads=0: "),
        ({"store": "none"}, r"store='none': .*'all' or 'prompt'"),
        ({"load": "sync"}, r"load='sync': .*'auto', 'layerwise' or 'async'"),
        ({"max_load_tokens": 0}, r"max_load_tokens=0: "),
        ({"min_load_tokens": -1}, r"min_load_tokens=-1: "),
        (
            {"max_load_tokens": 31, "min_load_tokens": 32},
            r"max_load_tokens=31 must not be below min_load_tokens=32",
        ),
        ({"prefill_tokens_per_s": 0}, r"prefill_tokens_per_s=0: "),
        ({"prefetch_deadline_s": 0}, r"prefetch_deadline_s=0: "),
        ({"load_deadline_s": "inf"}, r"load_deadline_s='inf': .*finite"),
        ({"load_deadline_s": None}, r"load_deadline_s=None: "),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_that_names_it(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse(extra)
    assert "\n" not in str(error.value)
    assert "kv_connector_extra_config" in str(error.value)


def test_a_rank_has_its_share_of_every_size_and_the_whole_of_all_else() -> None:
    whole = parse({"host": 1000, "disk": "/kv", "disk_size": 3001, "io_threads": 7})
    share = whole.per_rank(3)
    assert (share.host, share.disk_size) == (333, 1000)
    assert share.model_copy(update={"host": 1000, "disk_size": 3001}) == whole
    assert whole.per_rank(1) == whole


def test_a_rank_of_an_engine_without_disk_has_none_either() -> None:
    share = parse({"host": "1GiB"}).per_rank(4)
    assert (share.host, share.disk_size) == (256 << 20, None)


def test_settings_do_not_change() -> None:
    settings = parse({})
    with pytest.raises(ValidationError, match="frozen"):
        settings.host = 1  # type: ignore[assignment]


def test_what_the_store_has_too_is_called_and_bounded_alike() -> None:
    """The same word means the same in Python, on the command line and in the engine."""
    ours, theirs = TieredKVSettings.model_fields, StoreConfig.model_fields
    shared = ours.keys() & theirs.keys()
    assert shared >= {"host", "disk", "disk_size", "write_policy", "policy", "io_threads"}
    for name in shared:
        assert ours[name].annotation == theirs[name].annotation, name
        assert ours[name].metadata == theirs[name].metadata, name


def test_the_page_lists_every_setting_with_its_default() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/plugins/vllm.md").read_text()
    for name, field in TieredKVSettings.model_fields.items():
        shown = {None: "none", "": "empty"}.get(field.default, f"`{field.default}`")
        shown = "`4GiB`" if name == "host" else shown
        assert f"| `{name}` | {shown} |" in text, name
