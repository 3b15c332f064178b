"""What a real engine publishes of the pages below the GPU: every page that comes, and that goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from connector_rig import (
    PAGES,
    core_of,
    drop_from_host,
    open_connected,
    prompts_of,
    scheduler_side,
)
from engine_rig import BLOCK_TOKENS, generate, reset_apc, settle
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
)

from tiered_kv.carrier import Carrier


class Listener:
    """Keeps what it is told as a router does: the blocks of each medium, and their tokens."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks: dict[str, set[Any]] = {MEDIUM_CPU: set(), MEDIUM_STORAGE: set()}
        self.tokens: dict[Any, tuple[int, ...]] = {}
        monkeypatch.setattr(core_of(engine).kv_event_publisher, "publish", self._hear)

    def _hear(self, batch: Any) -> None:
        for event in batch.events:
            if getattr(event, "medium", "") not in self.blocks:
                continue  # vLLM's own, of the GPU's blocks
            if isinstance(event, BlockStored):
                assert not self.blocks[event.medium].intersection(event.block_hashes)
                self.blocks[event.medium].update(event.block_hashes)
                self._keep_tokens(event)
            else:
                assert isinstance(event, BlockRemoved)
                assert self.blocks[event.medium].issuperset(event.block_hashes)
                self.blocks[event.medium].difference_update(event.block_hashes)

    def _keep_tokens(self, event: BlockStored) -> None:
        for at, block in enumerate(event.block_hashes):
            tokens = event.token_ids[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS]
            if tokens:
                self.tokens[block] = tuple(tokens)


def test_a_router_knows_every_page(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = prompts_of("events")
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with open_connected(
        qwen3, disk=str(tmp_path), disk_size="64MiB", options={"kv_events_config": events}
    ) as engine:
        listener = Listener(engine, monkeypatch)
        generate(engine, prompts)
        settle(engine)
        stored = set(listener.blocks[MEDIUM_CPU])
        assert len(stored) == PAGES
        assert listener.blocks[MEDIUM_STORAGE] == stored
        request = prompts[0][: 9 * BLOCK_TOKENS]
        told = {listener.tokens[block] for block in stored}
        assert len(told) == PAGES
        for first in range(0, len(request), BLOCK_TOKENS):
            assert tuple(request[first : first + BLOCK_TOKENS]) in told

        reset_apc(engine)
        drop_from_host(engine)
        generate(engine, prompts[:1])
        settle(engine)
        assert len(listener.blocks[MEDIUM_CPU]) == 9
        assert listener.blocks[MEDIUM_STORAGE] == stored

        reset_apc(engine, reset_connector=True)
        generate(engine, [[5] * 10])  # events go out with the next step
        settle(engine)
        assert listener.blocks == {MEDIUM_CPU: set(), MEDIUM_STORAGE: set()}


def test_hashes_are_those_of_vllms_own_events(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a router can tell that a page on host is the block it knew on the GPU."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with open_connected(qwen3, options={"kv_events_config": events}) as engine:
        own: set[Any] = set()
        listener = Listener(engine, monkeypatch)
        hear = listener._hear

        def both(batch: Any) -> None:
            for event in batch.events:
                if isinstance(event, BlockStored) and event.medium == MEDIUM_GPU:
                    own.update(event.block_hashes)
            hear(batch)

        monkeypatch.setattr(core_of(engine).kv_event_publisher, "publish", both)
        generate(engine, prompts_of("events"))
        settle(engine)
        assert listener.blocks[MEDIUM_CPU] == own != set()


def test_tokens_that_are_taken_back_while_their_page_is_stored(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is given more input does so: of that page nothing is said."""
    (prompt, *_) = prompts_of("events")
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with open_connected(qwen3, options={"kv_events_config": events}) as engine:
        listener = Listener(engine, monkeypatch)
        generate(engine, [[5] * 10])  # until then the store is not there
        with monkeypatch.context() as patch:
            patch.setattr(Carrier, "report", lambda carrier: None)  # the put has not ended
            generate(engine, [prompt])
            (put,) = scheduler_side(engine)._puts.values()
            assert (put.first, put.end) == (0, 9)
            request = put.tracked.request
            del request._all_token_ids[8 * BLOCK_TOKENS + 5 :]
            del request.block_hashes[8:]
        settle(engine)
        stored = [tuple(prompt[at : at + BLOCK_TOKENS]) for at in range(0, 256, BLOCK_TOKENS)]
        assert sorted(listener.tokens.values()) == sorted(stored)
        assert listener.blocks[MEDIUM_CPU] == listener.tokens.keys()
