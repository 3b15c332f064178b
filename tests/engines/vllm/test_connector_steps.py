"""What the connector asks of vLLM in a step, and says: fences, block tables, lookups, idleness."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from connector_rig import (
    Gate,
    add_request,
    check_quiet,
    core_of,
    decider_of,
    drop_from_host,
    open_connected,
    prompts_of,
    scheduler_side,
    step_until,
    two_batches_in_flight,
    wipe_hbm,
)
from engine_rig import (
    BLOCK_TOKENS,
    generate,
    open_engine,
    random_prompts,
    reset_apc,
    settle,
    tokens_of,
)

import tiered_kv.carrier
from tiered_kv.carrier import Carrier
from tiered_kv.storage.attached import AttachedHbm, unpack_blocks

TIGHT: dict[str, Any] = {"kv_bytes": 640 << 10, "max_model_len": 256}
"""Blocks for one request of 256 tokens: the next one takes what it has left, one after another."""


class Reuse(NamedTuple):
    """VLLM gives out blocks while a put still reads them."""

    put: int
    is_fenced: bool
    goes_to_others: bool
    """All of them to other KV cache groups than those they are read for."""


def watch_reuse(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Reuse]:
    """A list that grows from now on; what is given out, vLLM's pool says, not our connector."""
    side, cache = scheduler_side(engine), core_of(engine).kv_cache_manager
    give, build = cache.block_pool.get_new_blocks, side.build
    given: set[int] = set()
    seen: list[Reuse] = []

    def giving(count: int) -> Any:
        blocks = give(count)
        given.update(block.block_id for block in blocks)
        return blocks

    def building(scheduled: Any) -> Any:
        reading = {number: blocks_of_put(engine, number) for number in side._puts}
        order = build(scheduled)
        tables = [cache.get_block_ids(request) for request in scheduled.num_scheduled_tokens]
        now = {(group, b) for table in tables for group, ids in enumerate(table) for b in ids}
        for number, blocks in reading.items():
            if lost := {(group, block) for group, block in blocks if block in given}:
                seen.append(Reuse(number, number in order.fences, not lost & now))
        given.clear()
        return order

    monkeypatch.setattr(cache.block_pool, "get_new_blocks", giving)
    monkeypatch.setattr(side, "build", building)
    return seen


def blocks_of_put(engine: Any, number: int) -> set[tuple[int, int]]:
    """(group, block) of all that a put reads."""
    side = scheduler_side(engine)
    slots = [move.source_slot for move in decider_of(engine)._jobs[number].plan.store]
    groups, blocks = len(side._groups), side._blocks
    return {pair for slot in slots for pair in enumerate(unpack_blocks(slot, groups, blocks))}


def copy_only_when_fenced(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies out of vLLM's blocks are made while it waits for one of them, or when this is set."""
    may_copy = threading.Event()
    fence, read = Carrier.fence, AttachedHbm.read

    def fencing(carrier: Carrier, jobs: Any) -> None:
        if jobs:
            may_copy.set()
            fence(carrier, jobs)
            may_copy.clear()

    def reading(hbm: AttachedHbm, *args: Any) -> Any:
        may_copy.wait()
        return read(hbm, *args)

    monkeypatch.setattr(tiered_kv.carrier, "FENCE_S", 60.0)
    monkeypatch.setattr(Carrier, "fence", fencing)
    monkeypatch.setattr(AttachedHbm, "read", reading)
    return may_copy


@pytest.mark.parametrize("kind", ["qwen3", "sliding"])
def test_a_block_is_copied_before_it_is_given_to_another_group(
    kind: Any, model_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1: all KV cache groups have their blocks from one pool. Copies are as late as can be."""
    model, tokens = model_of(kind), 4 * BLOCK_TOKENS
    prompts = [random_prompts(1, length, seed=length)[0] for length in (40, 70, 100)]
    with open_engine(model, enable_prefix_caching=False) as engine:
        expected = tokens_of(generate(engine, prompts, tokens))
    with open_connected(model, options=TIGHT) as engine:
        seen = watch_reuse(engine, monkeypatch)
        with monkeypatch.context() as patch:
            may_copy = copy_only_when_fenced(patch)
            patch.setattr(Carrier, "report", lambda carrier: None)  # no put is known to have ended
            for prompt, answer in zip(prompts, expected, strict=True):
                assert tokens_of(generate(engine, [prompt], tokens)) == [answer]
            may_copy.set()
        assert seen
        assert [reuse for reuse in seen if not reuse.is_fenced] == []
        assert any(reuse.goes_to_others for reuse in seen) == (kind == "sliding")
        for prompt, answer in zip(prompts, expected, strict=True):
            whole = [*prompt, *answer]
            for cut in range(len(prompt), len(whole) - 4, BLOCK_TOKENS):  # each page is in a window
                reset_apc(engine)
                wipe_hbm(engine)
                (rest,) = generate(engine, [whole[:cut]], 4)
                assert list(rest.tokens) == whole[cut : cut + 4]
                assert rest.cached_tokens == (cut - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        check_quiet(engine)


def test_block_tables_are_read_only_where_there_is_something_to_store(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt, *_) = prompts_of("tables")
    with open_connected(qwen3) as engine:
        generate(engine, [[5] * 10])  # until then the store is not there
        side = scheduler_side(engine)
        build, steps, reads = side.build, [0], [0]

        def building(scheduled: Any) -> Any:
            state = scheduled.kv_connector_block_state
            resolve = state.resolve_block_ids

            def reading(request_id: str) -> Any:
                reads[0] += 1
                return resolve(request_id)

            state.resolve_block_ids = reading
            steps[0] += 1
            return build(scheduled)

        monkeypatch.setattr(side, "build", building)
        generate(engine, [prompt], max_tokens=2 * BLOCK_TOKENS)
        assert steps[0] >= 2 * BLOCK_TOKENS
        assert reads[0] == 3  # the prompt's pages, and two that the answer fills
        settle(engine)
        assert sum(decider_of(engine).stats().resident_pages.values()) == 9 + 2


def test_a_request_whose_pages_are_fetched_is_not_looked_up(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in every step, until they are here or it is late: what they are is known."""
    (prompt, *_) = prompts_of("fetched")
    disk: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(qwen3, prefetch_deadline_s=60.0, **disk) as engine:
        generate(engine, [prompt])
        reset_apc(engine)
        drop_from_host(engine)
        decider, asked, matched = decider_of(engine), [0], [0]
        side = scheduler_side(engine)
        ask, match = side.matched_tokens, decider.match

        def asking(*args: Any) -> Any:
            asked[0] += 1
            return ask(*args)

        def matching(*args: Any) -> Any:
            matched[0] += 1
            return match(*args)

        with monkeypatch.context() as patch:
            patch.setattr(side, "matched_tokens", asking)
            patch.setattr(decider, "match", matching)
            gate = Gate(patch, "read")
            request = add_request(engine, "fetched", prompt)
            step_until(engine, gate.is_reached.is_set)
            asked[0] = matched[0] = 0
            step_until(engine, lambda: asked[0] >= 5)
            assert matched[0] == 0
            waiting = side._tracked[request]
            waiting.wait_until = 0.0  # it is late
            step_until(engine, lambda: waiting.is_counted)
            assert matched[0] == 1
            gate.open()
            step_until(engine, lambda: request not in core_of(engine).requests)
        check_quiet(engine)
        assert decider.stats().why_miss["in_flight"] == 9


def test_a_step_is_not_idle_while_another_batch_runs(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last tokens are on their way, and nothing is left to schedule: no time for a pause."""
    with two_batches_in_flight(), open_connected(qwen3) as engine:
        core = core_of(engine)
        build = core.connector.build_connector_meta
        empty: list[tuple[bool, bool]] = []

        def building(scheduled: Any) -> Any:
            meta = build(scheduled)
            if scheduled.total_num_scheduled_tokens == 0:
                empty.append((bool(core.running), meta.is_idle))
            else:
                assert not meta.is_idle
            return meta

        monkeypatch.setattr(core.connector, "build_connector_meta", building)
        generate(engine, prompts_of("idle"))
        settle(engine)
        assert (True, False) in empty
        assert all(is_idle is not runs for runs, is_idle in empty)
        assert (False, True) in empty
