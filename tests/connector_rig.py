"""Our connector in a real vLLM engine: its configuration, its two sides, what the answers must be.

vllm is imported inside the functions, as in `engine_rig`.
"""

from __future__ import annotations

import errno
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_rig import (
    BLOCK_TOKENS,
    SETTLE_S,
    Answer,
    generate,
    open_engine,
    random_prompts,
    settle,
    tokens_of,
)

from tiered_kv.counters import StoreStats
from tiered_kv.plan import HOST
from tiered_kv.storage.attached import AttachedHbm
from tiered_kv.storage.disk import DiskTier

PROMPT_TOKENS = 300
SHARED_TOKENS = 3 * BLOCK_TOKENS
PAGES = 3 + 4 * 6
"""Pages of a set of four prompts: three that all share, and six of each; the tail is no page."""

Tokens = list[tuple[int, ...]]
_truths: dict[Path, dict[str, Tokens]] = {}


def prompts_of(name: str) -> list[list[int]]:
    """Four prompts of 300 tokens, the first 96 of them the same; other names, other tokens."""
    seed = zlib.crc32(name.encode())
    return random_prompts(4, PROMPT_TOKENS, shared_tokens=SHARED_TOKENS, seed=seed)


def truth_of(model: Path, name: str, names: Sequence[str] = ()) -> Tokens:
    """What a plain engine answers to `prompts_of(name)`; one engine answers all `names` at once."""
    known = _truths.setdefault(model, {})
    if name not in known:
        with open_engine(model, enable_prefix_caching=False) as engine:
            for each in dict.fromkeys((name, *names)):
                known[each] = tokens_of(generate(engine, prompts_of(each)))
    return known[name]


def connector(policy: str = "recompute", **settings: Any) -> dict[str, Any]:
    """A `KVTransferConfig` with our connector."""
    return {
        "kv_connector": "TieredKVConnector",
        "kv_connector_module_path": "tiered_kv.plugins.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"host": "16MiB"} | settings,
        "kv_load_failure_policy": policy,
    }


@contextmanager
def open_connected(
    model: Path,
    *,
    policy: str = "recompute",
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Any]:
    """An engine with our connector. Its keyword arguments are the connector's settings."""
    config = connector(policy, **settings)
    with open_engine(model, kv_transfer_config=config, **options or {}) as engine:
        yield engine


@contextmanager
def two_batches_in_flight(is_wanted: bool = True) -> Iterator[None]:
    """Engines opened inside schedule the next step before they know how the last one went.

    So does vLLM on a GPU; on a CPU it leaves it off, for its model runner cannot leave tokens on
    the device. The runner here still takes one step after the other, its scheduler does not.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    settle_config = CpuPlatform.check_and_update_config.__func__
    make_runner = CPUModelRunner.__init__

    def with_async_scheduling(cls: Any, vllm_config: Any) -> None:
        settle_config(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def without_it(self: Any, *args: Any, **settings: Any) -> None:
        make_runner(self, *args, **settings)
        self.use_async_scheduling = False

    with pytest.MonkeyPatch.context() as patch:
        if is_wanted:
            check = classmethod(with_async_scheduling)
            patch.setattr(CpuPlatform, "check_and_update_config", check)
            patch.setattr(CPUModelRunner, "__init__", without_it)
        yield


def core_of(engine: Any) -> Any:
    """vLLM's scheduler, of an engine in this process."""
    return engine.llm_engine.engine_core.engine_core.scheduler


def scheduler_side(engine: Any) -> Any:
    return core_of(engine).connector.scheduler


def worker_side(engine: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def carrier_of(engine: Any) -> Any:
    return worker_side(engine)._carrier


def decider_of(engine: Any) -> Any:
    return scheduler_side(engine)._decider


def stats_of(engine: Any) -> StoreStats:
    stats: StoreStats = scheduler_side(engine).stats()
    return stats


def check_quiet(engine: Any) -> None:
    """Nothing is under way, nothing has leaked, and the books are in order."""
    settle(engine)
    side, pool = scheduler_side(engine), core_of(engine).kv_cache_manager.block_pool
    assert side._decider.jobs_in_flight == 0
    assert side._decider.check() == []
    assert not (side._tracked or side._wanted or side._fetches or side._puts or side._readers)
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # all but the null block
    carrier = carrier_of(engine)
    assert not (carrier._queued or carrier._flights or carrier._running or carrier._waiting)
    assert not (carrier._mover.arrivals or carrier._mover.wanted)


def step_until(engine: Any, is_reached: Any) -> None:
    """Step an in-process engine until something is so."""
    deadline = time.monotonic() + SETTLE_S
    while not is_reached():
        assert time.monotonic() < deadline, "it never came to that"
        engine.llm_engine.step()


def add_request(engine: Any, number: str, prompt: Sequence[int], max_tokens: int = 16) -> str:
    """Queue a request; returns the id that the engine core knows it by."""
    from vllm import SamplingParams

    before = set(core_of(engine).requests)
    engine.llm_engine.add_request(
        number,
        {"prompt_token_ids": list(prompt)},
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
    )
    (own,) = set(core_of(engine).requests) - before
    return str(own)


def drop_from_host(engine: Any) -> None:
    """Host gives up all pages that are on disk too, as under pressure."""
    settle(engine)
    planner = decider_of(engine)._planner
    host = planner.index.by_name[HOST]
    while victims := planner.index.victims(host, max(1, host.resident)):
        planner.room.free(HOST, planner.index.evict(host, victims))


def break_next_copy(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object] = int) -> None:
    """The next copy of pages into HBM does something first, and breaks."""
    write = AttachedHbm.write_layers

    def breaking(self: AttachedHbm, *args: Any) -> None:
        monkeypatch.setattr(AttachedHbm, "write_layers", write)
        then()
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(AttachedHbm, "write_layers", breaking)


class Gate:
    """Holds up every read, or write, of disk tiers until it is opened.

    Args:
        verb: "read" or "write".
        after: so many calls go through before.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, verb: str, *, after: int = 0) -> None:
        self.is_reached = threading.Event()
        self._open = threading.Event()
        self._calls = 0
        self._after = after
        through = getattr(DiskTier, f"begin_{verb}")

        def held_up(tier: DiskTier, *args: Any) -> Any:
            self._pass()
            return through(tier, *args)

        def held_up_later(tier: DiskTier, *args: Any) -> Any:
            return lambda: held_up(tier, *args)()

        monkeypatch.setattr(DiskTier, f"begin_{verb}", held_up_later)

    def _pass(self) -> None:
        self._calls += 1
        if self._calls > self._after:
            self.is_reached.set()
            self._open.wait()

    def open(self) -> None:
        """Let all through from now on."""
        self._open.set()


def wipe_hbm(engine: Any) -> None:
    """Overwrite vLLM's KV cache, which must hold nothing that counts: what is right then came."""
    for layer in carrier_of(engine)._hbm.layers:
        layer.fill_(0x3F)


def cached(answers: Sequence[Answer]) -> list[int]:
    return [answer.cached_tokens for answer in answers]
