"""StoreConfig: sizes as people write them, and one clear line for what cannot be."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError

GIB = 2**30


@pytest.mark.parametrize(
    ("size", "n_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("64KiB", 65_536),
        ("1.5GiB", 3 * GIB // 2),
        ("8 GiB", 8 * GIB),
        ("8gib", 8 * GIB),
        ("1MB", 1_000_000),
        ("1TiB", 1024 * GIB),
    ],
)
def test_sizes_are_bytes_or_text_with_a_unit(size: Any, n_bytes: int) -> None:
    assert int(StoreConfig.parse(hbm=size, host=1).hbm) == n_bytes


def test_without_a_disk_there_is_none_and_the_rest_has_its_defaults() -> None:
    config = StoreConfig.parse(hbm="1GiB", host="2GiB")
    assert config.disk is None
    assert config.disk_size is None
    assert (config.policy, config.write_policy, config.device) == ("lru", "back", "auto")
    assert config.min_load_tokens == 0
    assert config.prefill_tokens_per_s is None


def test_every_wait_has_a_deadline_unless_it_is_taken_away() -> None:
    """LMCache #2942: a wait without a deadline looped for ever."""
    assert StoreConfig.parse(hbm=1, host=1).deadline_s == 60.0
    assert StoreConfig.parse(hbm=1, host=1, deadline_s=None).deadline_s is None


def test_a_disk_is_a_directory_and_a_size() -> None:
    config = StoreConfig.parse(hbm=1, host=1, disk="/mnt/kv", disk_size="1GiB")
    assert config.disk == Path("/mnt/kv")
    assert config.disk_size is not None
    assert int(config.disk_size) == GIB


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": 1}, r"^hbm=.*[Ff]ield required"),
        ({"hbm": 0, "host": 1}, r"^hbm=0: .*greater than 0"),
        ({"hbm": 1, "host": -5}, r"^host=-5: "),
        ({"hbm": "8 parsecs", "host": 1}, r"^hbm='8 parsecs': "),
        ({"hbm": 1, "host": 1, "disk": "/d"}, r"^disk needs disk_size too"),
        ({"hbm": 1, "host": 1, "disk_size": 1}, r"^disk_size needs disk too"),
        ({"hbm": 1, "host": 1, "policy": "mru"}, r"^policy='mru': .*'lru' or 'fifo'"),
        ({"hbm": 1, "host": 1, "write_policy": "never"}, r"'back' or 'through'"),
        ({"hbm": 1, "host": 1, "deadline_s": 0}, r"^deadline_s=0: .*greater than 0"),
        ({"hbm": 1, "host": 1, "io_threads": 0}, r"^io_threads=0: "),
        ({"hbm": 1, "host": 1, "io_threads": 65}, r"^io_threads=65: "),
        ({"hbm": 1, "host": 1, "min_load_tokens": -1}, r"^min_load_tokens=-1: "),
        ({"hbm": 1, "host": 1, "prefill_tokens_per_s": 0}, r"^prefill_tokens_per_s=0: "),
        ({"hbm": 1, "host": 1, "hots": 1}, r"^hots=1: "),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        StoreConfig.parse(**settings)
    assert "\n" not in str(caught.value)


def test_a_config_cannot_be_changed() -> None:
    config = StoreConfig.parse(hbm=1, host=1)
    with pytest.raises(ValidationError, match="frozen"):
        config.hbm = 2  # type: ignore[assignment]


def test_a_config_survives_pickling_and_json() -> None:
    config = StoreConfig.parse(hbm="1GiB", host="2GiB", disk="/mnt/kv", disk_size="1GiB")
    assert pickle.loads(pickle.dumps(config)) == config
    assert StoreConfig.model_validate_json(config.model_dump_json()) == config


def test_every_setting_says_what_it_is_for() -> None:
    assert all(field.description for field in StoreConfig.model_fields.values())
