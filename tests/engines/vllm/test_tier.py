"""TieredKVTier under vLLM's own tiering, in the real engine: found again, bounded, never wrong."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from engine_rig import (
    MODEL_KINDS,
    Answer,
    ModelKind,
    counter,
    generate,
    open_engine,
    random_prompts,
    reset_apc,
    settle,
    tokens_of,
)

from tiered_kv.disk_store import DiskStore
from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.faulty import FaultyTier

ModelOf = Callable[..., Path]
BLOCK = 32
ROW_BYTES = 48 << 10  # of a block of the tiny Qwen3


def tiering(directory: Path, size: str = "64MiB", host_bytes: int = 16 << 20, **other: Any) -> Any:
    """A `kv_transfer_config`: vLLM's host tier, and ours under it with `other` settings."""
    tier = {
        "type": "TieredKVTier",
        "module_path": "tiered_kv.plugins.vllm",
        "disk": str(directory),
        "disk_size": size,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": host_bytes,
            "secondary_tiers": [tier | other],
        },
    }


def expected(model: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with open_engine(model) as engine:
        return tokens_of(generate(engine, prompts))


def fill(model: Path, prompts: list[list[int]], config: Any) -> list[tuple[int, ...]]:
    """Runs the prompts once, so that their KV is on disk."""
    with open_engine(model, kv_transfer_config=config) as engine:
        tokens = tokens_of(generate(engine, prompts))
        settle(engine)
        return tokens


def from_disk(engine: Any) -> int:
    """Prompt tokens that came from the disk tier, as vLLM counts them."""
    return int(counter(engine, "vllm:prompt_tokens_cached_by_source", source="disk"))


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]


def du_bytes(path: Path) -> int:
    out = subprocess.run(["du", "-s", "-B1", str(path)], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[0])


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_pages_come_back_from_disk_once_the_caches_above_are_empty(
    kind: ModelKind, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of(kind)
    prompts = random_prompts(3, 300, shared_tokens=100)
    wanted = expected(model, prompts)
    with open_engine(model, kv_transfer_config=tiering(tmp_path / "kv")) as engine:
        assert tokens_of(generate(engine, prompts)) == wanted
        assert from_disk(engine) == 0
        reset_apc(engine, reset_connector=True)
        again = generate(engine, prompts)
        assert tokens_of(again) == wanted
        assert cached(again) == [288] * 3
        assert from_disk(engine) > 0


@pytest.mark.parametrize("in_process", [True, False], ids=["one-process", "own-process"])
def test_pages_are_found_again_after_a_restart(
    in_process: bool, qwen3: Path, tmp_path: Path
) -> None:
    prompts = random_prompts(2, 300)
    config = tiering(tmp_path / "kv")
    wanted = fill(qwen3, prompts, config)
    with open_engine(qwen3, kv_transfer_config=config, in_process=in_process) as engine:
        again = generate(engine, prompts)
        assert from_disk(engine) == 2 * 288
        used = counter(engine, "vllm:tiered_kv_tier_used_bytes", disk=str(tmp_path / "kv"))
    assert tokens_of(again) == wanted
    assert cached(again) == [288, 288]
    assert used == 2 * 9 * ROW_BYTES


def test_a_corrupt_page_ends_the_hit_and_is_stored_anew(qwen3: Path, tmp_path: Path) -> None:
    """Row 7: bytes on disk rot. What is before the page is used, what is after it is not."""
    prompts = random_prompts(1, 300)
    config = tiering(tmp_path / "kv")
    wanted = fill(qwen3, prompts, config)
    (segment,) = (tmp_path / "kv" / "segments").glob("*.seg")
    with segment.open("r+b") as file:  # one header block, then the nine pages
        file.seek(4096 + 4 * ROW_BYTES + 1000)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 0x10]))
    with open_engine(qwen3, kv_transfer_config=config) as engine:
        broken = generate(engine, prompts)
        assert counter(engine, "vllm:tiered_kv_tier_corrupt_pages") == 1
        assert counter(engine, "vllm:tiered_kv_tier_missed_pages", why="corrupt") == 1
        reset_apc(engine, reset_connector=True)
        healed = generate(engine, prompts)
    assert tokens_of(broken) == tokens_of(healed) == wanted
    assert cached(broken) == [4 * BLOCK]
    assert cached(healed) == [288]


def test_a_full_disk_gives_up_old_pages_and_stays_within_its_size(
    qwen3: Path, tmp_path: Path
) -> None:
    """Rows 21 and 34: a cap that is not enforced, and running out of room that kills the engine."""
    prompts = random_prompts(24, 300)
    wanted = expected(qwen3, prompts)
    config = tiering(tmp_path / "kv", size="5MiB", host_bytes=2 << 20)
    with open_engine(qwen3, kv_transfer_config=config) as engine:
        for at in range(0, len(prompts), 4):
            assert tokens_of(generate(engine, prompts[at : at + 4])) == wanted[at : at + 4]
            settle(engine)
            assert du_bytes(tmp_path / "kv") <= 5 << 20
        reset_apc(engine, reset_connector=True)
        newest, oldest = generate(engine, [prompts[-1]]), generate(engine, [prompts[0]])
    assert tokens_of(newest) == wanted[-1:]
    assert cached(newest) == [288]
    assert tokens_of(oldest) == wanted[:1]
    assert cached(oldest) == [0]
    assert du_bytes(tmp_path / "kv") <= 5 << 20


def test_what_a_request_hits_above_stays_on_disk_too(qwen3: Path, tmp_path: Path) -> None:
    """A prompt that always hits vLLM's own caches must not grow old on disk meanwhile."""
    hot, *others = random_prompts(13, 300)
    config = tiering(tmp_path / "kv", size="5MiB")
    with open_engine(qwen3, kv_transfer_config=config) as engine:
        for other in others:
            generate(engine, [hot])
            generate(engine, [other])
            settle(engine)
        reset_apc(engine, reset_connector=True)
        assert cached(generate(engine, [hot])) == [288]
        assert cached(generate(engine, [others[0]])) == [0]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The next engine's disk; `.tier` fails on command."""
    made = SimpleNamespace(tier=None)

    def open_faulty(
        path: Path, size: int, page_bytes: int, fingerprint: str, *, io_threads: int, policy: str
    ) -> DiskStore:
        made.tier = FaultyTier(DiskTier.open(path, page_bytes, size, fingerprint, io_threads))
        return DiskStore(cast("DiskTier", made.tier), policy)

    monkeypatch.setattr(DiskStore, "open", open_faulty)
    return made


def test_a_disk_that_fails_is_a_miss(faulty: SimpleNamespace, qwen3: Path, tmp_path: Path) -> None:
    """Row 5: the disk fails, the request is served with wrong KV and the metrics say full hit."""
    prompts = random_prompts(2, 300)
    wanted = expected(qwen3, prompts)
    with open_engine(qwen3, kv_transfer_config=tiering(tmp_path / "kv")) as engine:
        faulty.tier.fail_write = lambda slots: True
        unstored = generate(engine, prompts)
        settle(engine)
        reset_apc(engine, reset_connector=True)
        faulty.tier.fail_write = lambda slots: False
        stored = generate(engine, prompts)
        reset_apc(engine, reset_connector=True)
        faulty.tier.fail_read = lambda slot: True
        unread = generate(engine, prompts)
        assert counter(engine, "vllm:tiered_kv_tier_failed_writes") == 18
        assert counter(engine, "vllm:tiered_kv_tier_missed_pages", why="failed") == 18
        assert from_disk(engine) == 0
        faulty.tier.fail_read = lambda slot: False
        reset_apc(engine, reset_connector=True)
        back = generate(engine, prompts)
    assert (
        tokens_of(unstored) == tokens_of(stored) == tokens_of(unread) == tokens_of(back) == wanted
    )
    assert [*cached(unstored), *cached(stored), *cached(unread)] == [0] * 6
    assert cached(back) == [288, 288]


def test_sixteen_requests_at_once_get_the_same_tokens_as_alone(qwen3: Path, tmp_path: Path) -> None:
    """Row 3: under concurrency, once offload is on, the same prompt gets another answer.

    vLLM's KV cache holds half of the requests, its host tier half of their KV: blocks are reused,
    requests preempted, pages promoted all the time. What does not fit the host tier is a miss.
    """
    families = [random_prompts(4, 380, shared_tokens=200, seed=seed) for seed in range(4)]
    prompts = [family[at] for at in range(4) for family in families]
    wanted = expected(qwen3, prompts)
    config = tiering(tmp_path / "kv", host_bytes=3 << 20)
    with open_engine(qwen3, kv_transfer_config=config, kv_bytes=6 << 20) as engine:
        for turn in range(3):
            assert tokens_of(generate(engine, prompts)) == wanted, f"round {turn}"
            reset_apc(engine, reset_connector=turn == 1)
        assert from_disk(engine) > 16 * BLOCK
        assert counter(engine, "vllm:num_preemptions") > 0


def test_two_models_in_one_directory_do_not_mix(model_of: ModelOf, tmp_path: Path) -> None:
    """The same shape and the same prompts, other weights: no page of one may serve the other."""
    prompts = random_prompts(1, 300)
    config = tiering(tmp_path / "kv")
    first, second = model_of("qwen3"), model_of("qwen3", seed=1)
    wanted = fill(first, prompts, config)
    others = expected(second, prompts)
    assert others != wanted
    with open_engine(second, kv_transfer_config=config) as engine:
        answers = generate(engine, prompts)
        settle(engine)
        assert (tokens_of(answers), cached(answers)) == (others, [0])
    for model, tokens in ((first, wanted), (second, others)):
        with open_engine(model, kv_transfer_config=config) as engine:
            answers = generate(engine, prompts)
            assert (tokens_of(answers), cached(answers)) == (tokens, [288])


def test_a_directory_of_another_shape_stops_the_start_and_stays_whole(
    model_of: ModelOf, tmp_path: Path
) -> None:
    prompts = random_prompts(1, 300)
    config = tiering(tmp_path / "kv")
    wanted = fill(model_of("qwen3"), prompts, config)
    with (
        pytest.raises(LayoutMismatchError, match=r"\A.*holds pages of .* bytes .*\Z"),
        open_engine(model_of("sliding"), kv_transfer_config=config),
    ):
        pass
    with open_engine(model_of("qwen3"), kv_transfer_config=config) as engine:
        answers = generate(engine, prompts)
    assert (tokens_of(answers), cached(answers)) == (wanted, [288])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"disk_sise": "1GiB"}, r"no key 'disk_sise' \(did you mean 'disk_size'\?\); its keys are"),
        ({"disk_size": "64"}, r"too small|needs at least"),
        ({"disk": "/proc/kv"}, r"/proc/kv"),
    ],
    ids=["unknown-key", "small", "no-rights"],
)
def test_a_wrong_setting_stops_the_start_with_one_line(
    wrong: dict[str, Any], message: str, qwen3: Path, tmp_path: Path
) -> None:
    config = tiering(tmp_path / "kv", **wrong)
    with (
        pytest.raises(ConfigError, match=message) as raised,
        open_engine(qwen3, kv_transfer_config=config),
    ):
        pass
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "kv").exists()


def test_events_say_what_is_stored_and_what_is_gone(qwen3: Path, tmp_path: Path) -> None:
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    class Recorder:
        def __init__(self) -> None:
            self.on_disk: set[Any] = set()
            self.removed = 0

        def publish(self, batch: Any) -> None:
            for event in batch.events:
                if event.medium != "STORAGE":
                    continue
                hashes = set(event.block_hashes)
                if isinstance(event, BlockStored):
                    self.on_disk |= hashes
                elif isinstance(event, BlockRemoved):
                    assert hashes <= self.on_disk
                    self.on_disk -= hashes
                    self.removed += len(hashes)

        def shutdown(self) -> None:
            pass

    config = tiering(tmp_path / "kv", size="5MiB")
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with open_engine(qwen3, kv_transfer_config=config, kv_events_config=events) as engine:
        scheduler = engine.llm_engine.engine_core.engine_core.scheduler
        scheduler.kv_event_publisher = recorder = Recorder()
        for prompt in random_prompts(20, 300):
            generate(engine, [prompt])
            settle(engine)
        tier = scheduler.connector.connector_scheduler.manager.secondary_tiers[0]
        held = tier._store.stats().resident_pages["disk"]
        assert recorder.removed > 9
        assert held <= len(recorder.on_disk) <= held + 9  # those gone last may be told of later
