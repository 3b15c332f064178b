"""TieredKVConnector when loads, reads or writes fail: right tokens or an error, no wrong ones."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from connector_rig import (
    PAGES,
    Gate,
    add_request,
    cached,
    carrier_of,
    check_quiet,
    core_of,
    decider_of,
    drop_from_host,
    open_connected,
    prompts_of,
    scheduler_side,
    stats_of,
    step_until,
    truth_of,
    wipe_hbm,
)
from engine_rig import BLOCK_TOKENS, external_hits, generate, reset_apc, settle, tokens_of

import tiered_kv.carrier
from tiered_kv.errors import TierIOError
from tiered_kv.plan import DISK, HOST
from tiered_kv.storage.attached import AttachedHbm
from tiered_kv.storage.disk import DiskTier

WAYS = [(load, policy) for load in ("layerwise", "async") for policy in ("recompute", "fail")]
NAMES = (
    *(f"{load}-{policy}" for load, policy in WAYS),
    "corrupt",
    "full",
    "hang",
    "stream",
    "back",
)
PAGE_TOKENS = 9 * BLOCK_TOKENS
Truth = Callable[[str], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def truth(qwen3: Path) -> Truth:
    return lambda name: truth_of(qwen3, name, NAMES)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"disk": str(tmp_path_factory.mktemp("store")), "disk_size": "64MiB"}


def fail_nth_copy(monkeypatch: pytest.MonkeyPatch, nth: int) -> Callable[[], int]:
    """The nth copy of pages into HBM from now on breaks; returns how many there were."""
    write, calls = AttachedHbm.write_layers, [0]

    def breaking(self: AttachedHbm, *args: Any) -> None:
        calls[0] += 1
        if calls[0] == nth:
            raise OSError(errno.EIO, "injected")
        write(self, *args)

    monkeypatch.setattr(AttachedHbm, "write_layers", breaking)
    return lambda: calls[0]


@pytest.mark.parametrize(("load", "policy"), WAYS)
def test_one_failing_load_gives_no_wrong_token(
    load: str,
    policy: str,
    qwen3: Path,
    truth: Truth,
    disk: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows 5 and 6 of the field's faults. Requests share pages, and run in one batch."""
    name = f"{load}-{policy}"
    expected = truth(name)
    with open_connected(qwen3, policy=policy, load=load, **disk) as engine:
        prompts = prompts_of(name)
        assert tokens_of(generate(engine, prompts)) == expected
        reset_apc(engine)
        with monkeypatch.context() as patch:
            calls = fail_nth_copy(patch, 2)
            answers = tokens_of(generate(engine, prompts))
            assert calls() >= 2
        wrong = [at for at in range(4) if answers[at] != expected[at]]
        if policy == "recompute":
            assert wrong == []
        else:
            assert wrong and all(answers[at] == () for at in wrong)
        check_quiet(engine)
        assert stats_of(engine).why_miss["failed"] > 0
        reset_apc(engine)
        assert tokens_of(generate(engine, prompts)) == expected
        check_quiet(engine)


def test_nothing_wrong_was_stored_when_loads_failed(
    qwen3: Path, truth: Truth, disk: dict[str, Any]
) -> None:
    """A fresh engine, after those above: what it finds on disk gives the right tokens."""
    expected = {name: truth(name) for name in NAMES[:4]}
    with open_connected(qwen3, **disk) as engine:
        for name in NAMES[:4]:
            answers = generate(engine, prompts_of(name))
            assert tokens_of(answers) == expected[name]
            assert cached(answers) == [PAGE_TOKENS] * 4
        assert external_hits(engine)[1] >= 4 * PAGES * BLOCK_TOKENS


def test_a_corrupt_page_on_disk_is_computed_again(
    qwen3: Path, truth: Truth, tmp_path: Path
) -> None:
    expected, prompts = truth("corrupt"), prompts_of("corrupt")
    disk: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(qwen3, **disk) as engine:
        generate(engine, prompts)
        settle(engine)
        page = bytes(page_of(engine, prompts[0], 5))
    damage(tmp_path, page)
    with open_connected(qwen3, policy="fail", **disk) as engine:  # found before it is promised
        answers = generate(engine, prompts)
        assert tokens_of(answers) == expected
        assert cached(answers) == [5 * BLOCK_TOKENS] + [PAGE_TOKENS] * 3
        settle(engine)
        assert stats_of(engine).why_miss == {"corrupt": 1, "no_parent": 3}
        assert stats_of(engine).checksums_failed == 1
        reset_apc(engine)  # it was stored again, and so those that hang from it hit again
        answers = generate(engine, prompts)
        assert tokens_of(answers) == expected
        assert cached(answers) == [PAGE_TOKENS] * 4
        check_quiet(engine)


def page_of(engine: Any, prompt: Sequence[int], number: int) -> Any:
    """The host copy of a page of a prompt that was just answered."""
    side, carrier = scheduler_side(engine), carrier_of(engine)
    request = add_request(engine, "probe", prompt, max_tokens=1)
    key = side._tracked[request].keys[number]
    step_until(engine, lambda: not engine.llm_engine.has_unfinished_requests())
    return carrier._host.view(carrier._manifest._host.index(key))


def damage(directory: Path, page: bytes) -> None:
    """Change one byte of a page in a closed store."""
    for segment in sorted((directory / "rank0" / "segments").iterdir()):
        at = segment.read_bytes().find(page)
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at + 1000)
                file.write(bytes([page[1000] ^ 0xFF]))
            return
    raise AssertionError("the page is in no segment")


def test_a_full_disk_costs_hits_and_nothing_else(
    qwen3: Path, truth: Truth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 34: to run out of room is no error; and it does not stay so once there is room again."""
    expected, prompts = truth("full"), prompts_of("full")

    def full(self: DiskTier, slots: object, pages: object) -> None:
        raise TierIOError("no space left (injected)", tier=DISK, errno=errno.ENOSPC)

    with open_connected(qwen3, disk=str(tmp_path), disk_size="64MiB") as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "begin_write", full)
            for _ in range(2):  # the second time from host
                assert tokens_of(generate(engine, prompts)) == expected
                reset_apc(engine)
            assert stats_of(engine).resident_pages == {HOST: PAGES, DISK: 0}
            assert carrier_of(engine).stats().failed_writes > 0
        decider_of(engine).clear()
        assert tokens_of(generate(engine, prompts)) == expected
        reset_apc(engine)
        drop_from_host(engine)
        answers = generate(engine, prompts)
        assert (tokens_of(answers), cached(answers)) == (expected, [PAGE_TOKENS] * 4)
        check_quiet(engine)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch, "read")
    yield gate
    gate.open()


def test_a_disk_that_hangs_holds_up_no_request_for_long(
    qwen3: Path, truth: Truth, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 33: every wait has a deadline; what is late is computed, and the engine can still end."""
    expected, prompts = truth("hang"), prompts_of("hang")
    deadlines: dict[str, Any] = {"prefetch_deadline_s": 0.2, "load_deadline_s": 0.4}
    disk: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(qwen3, **disk) as engine:
        generate(engine, prompts)
    monkeypatch.setattr(tiered_kv.carrier, "CLOSE_S", 0.2)
    with open_connected(qwen3, **disk, **deadlines) as engine:
        answers = generate(engine, prompts)
        assert gate.is_reached.is_set()
        assert tokens_of(answers) == expected
        assert external_hits(engine)[1] == 0
        assert stats_of(engine).why_miss["in_flight"] > 0
        # Now without a prefetch before it: a load is promised, and does not come.
        monkeypatch.setattr("tiered_kv.plugins.vllm.tracked.MAX_PREFETCHES", 0)
        reset_apc(engine)
        drop_from_host(engine)
        assert tokens_of(generate(engine, prompts)) == expected
        reset_apc(engine)


LONG = 1500
LONG_PAGES = (LONG - 1) // BLOCK_TOKENS


def long_prompt() -> list[int]:
    return [token for prompt in prompts_of("stream") for token in prompt * 2][:LONG]


def test_a_hit_longer_than_the_host_tier_streams_through_it(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 40: such a hit was cut to what the host holds. And a load that is aborted leaves right
    pages behind: those that went from disk straight into blocks are not stored from there.
    """
    prompt = long_prompt()
    disk: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(qwen3, host="1MiB", **disk) as engine:
        hits: list[int] = []
        (cold,) = generate(engine, [prompt])
        assert decider_of(engine).capacity_pages[HOST] < LONG_PAGES // 2
        while sum(hits[-1:]) < LONG_PAGES * BLOCK_TOKENS:
            assert len(hits) < 5, hits  # each time at least as much more as the host passes on
            reset_apc(engine)
            (answer,) = generate(engine, [prompt])
            assert answer.tokens == cold.tokens
            hits.append(answer.cached_tokens)
        assert hits == sorted(hits)
        reset_apc(engine)
        wipe_hbm(engine)

        with monkeypatch.context() as patch:
            gate = Gate(patch, "read")
            patch.setattr("tiered_kv.plugins.vllm.tracked.MAX_PREFETCHES", 0)
            request = add_request(engine, "aborted", prompt)
            step_until(engine, gate.is_reached.is_set)
            engine.llm_engine.abort_request(["aborted"])
            assert request in core_of(engine).requests  # its blocks are still being written
            gate.open()
            settle(engine)
        check_quiet(engine)
        (answer,) = generate(engine, [prompt])
        assert (answer.tokens, answer.cached_tokens) == (cold.tokens, LONG_PAGES * BLOCK_TOKENS)
        check_quiet(engine)


def test_pages_on_their_way_from_disk_into_the_blocks_of_an_aborted_request(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host has no copy of them, and the blocks do not hold them yet: they must not be stored.

    The first of two requests takes all of the host, and gives it back; the second is aborted then.
    """
    monkeypatch.setattr("tiered_kv.plugins.vllm.tracked.MAX_PREFETCHES", 0)
    with open_connected(qwen3, host="1MiB", disk=str(tmp_path), disk_size="64MiB") as engine:
        generate(engine, [[3, 4, 5]])  # until its first step, an engine does not know its tiers
        tokens = decider_of(engine).capacity_pages[HOST] * BLOCK_TOKENS + 1
        prompts = [long_prompt()[:tokens], long_prompt()[-tokens:]]
        expected = [tokens_of(generate(engine, [prompt])) for prompt in prompts]
        reset_apc(engine)
        drop_from_host(engine)
        wipe_hbm(engine)
        with monkeypatch.context() as patch:
            gate = Gate(patch, "read", after=1)
            first = add_request(engine, "first", prompts[0])
            add_request(engine, "second", prompts[1])
            step_until(engine, gate.is_reached.is_set)
            step_until(engine, lambda: first not in core_of(engine).requests)
            engine.llm_engine.abort_request(["second"])
            for _ in range(3):  # what is decided at its end, is carried out in the next step
                engine.llm_engine.engine_core.engine_core.step_fn()
            gate.open()
            check_quiet(engine)
        for at in (1, 0):  # the first would drive what is on host of the second out
            assert tokens_of(generate(engine, [prompts[at]])) == expected[at]
        check_quiet(engine)
