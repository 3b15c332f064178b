"""A wrong configuration stops the engine's start with one line that says what would be right."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from connector_rig import open_connected, prompts_of, two_batches_in_flight
from engine_rig import generate, settle

from tiered_kv.errors import ConfigError, LayoutMismatchError, TieredKVError
from tiered_kv.storage.disk import DiskTier

ModelOf = Callable[..., Path]


def refusal(model: Path, options: dict[str, Any] | None = None, **settings: Any) -> TieredKVError:
    """What stops an engine from starting, by whatever it is wrapped in."""
    error: BaseException | None = None
    try:
        with open_connected(model, options=options, **settings):
            pass
    except Exception as stopped:
        error = stopped
    assert error is not None, "the engine started"
    stop = error
    while error is not None and not isinstance(error, TieredKVError):
        error = error.__cause__ or error.__context__
    assert error is not None, f"stopped by something else: {stop!r}"
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hots": "1GiB"}, r"no key 'hots' \(did you mean 'host'\?\); its keys are host, disk"),
        ({"disk": "/tmp/x"}, "disk needs disk_size too"),
        ({"host": "many"}, "host"),
        ({"host": "10KiB"}, "host=10240: smaller than 1 page"),
        ({"max_load_tokens": 8, "min_load_tokens": 9}, "max_load_tokens=8 must not be below"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_make_no_sense(settings: dict[str, Any], message: str, qwen3: Path) -> None:
    error = refusal(qwen3, **settings)
    assert isinstance(error, ConfigError)
    assert re.search(message, str(error))


def test_the_line_is_logged_too(qwen3: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stands before the tracebacks of all processes, where it is looked for."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)  # vllm's own do not propagate
    try:
        error = refusal(qwen3, hots="1GiB")
    finally:
        logger.removeHandler(caplog.handler)
    assert f"TieredKVConnector cannot start: {error}" in caplog.messages


def test_a_directory_that_cannot_be_one(qwen3: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("no store")
    error = refusal(qwen3, disk=str(path), disk_size="64MiB")
    assert isinstance(error, ConfigError)
    assert str(path) in str(error)


def test_a_directory_where_nothing_may_be_made(qwen3: Path) -> None:
    error = refusal(qwen3, disk="/proc/tiered-kv", disk_size="64MiB")
    assert isinstance(error, ConfigError)
    assert "/proc/tiered-kv" in str(error)


def test_a_directory_that_another_engine_uses(qwen3: Path, tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "rank0", 49152, 64 << 20, "somebody")
    try:
        error = refusal(qwen3, disk=str(tmp_path), disk_size="64MiB")
    finally:
        tier.close()
    assert isinstance(error, ConfigError)
    assert "in use" in str(error)


def test_a_directory_with_pages_of_another_model(
    qwen3: Path, model_of: ModelOf, tmp_path: Path
) -> None:
    store: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(qwen3, **store) as engine:
        generate(engine, prompts_of("kept")[:1])
        settle(engine)
    error = refusal(model_of("mla"), **store)
    assert isinstance(error, LayoutMismatchError)
    assert str(tmp_path) in str(error)
    error = refusal(qwen3, options={"block_size": 64}, **store)
    assert isinstance(error, LayoutMismatchError)
    with open_connected(qwen3, **store) as engine:  # and nothing in it was touched
        (answer,) = generate(engine, prompts_of("kept")[:1])
        assert answer.cached_tokens > 0


def test_a_vllm_that_was_not_tested(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    error = refusal(qwen3)
    assert isinstance(error, ConfigError)
    assert "0.32.x, and this is 0.33.1" in str(error)


def test_layers_loaded_one_by_one_where_vllm_cannot_take_a_step_back(
    qwen3: Path, model_of: ModelOf
) -> None:
    error = refusal(model_of("sliding"), load="layerwise")
    assert "load='layerwise' does not go with a hybrid model" in str(error)


def test_layers_loaded_one_by_one_with_two_batches_in_flight(qwen3: Path) -> None:
    with two_batches_in_flight():
        error = refusal(qwen3, load="layerwise")
    assert "set async_scheduling=False" in str(error)


def test_the_seed_of_block_hashes_must_outlive_the_process(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 17: rather no start than no hit, ever, and not a word."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    options = {"prefix_caching_hash_algo": "xxhash"}
    error = refusal(qwen3, options=options, disk=str(tmp_path), disk_size="64MiB")
    assert "use sha256, or fix the seed by PYTHONHASHSEED" in str(error)
