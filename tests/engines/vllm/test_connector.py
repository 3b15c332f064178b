"""TieredKVConnector in vLLM: pages come back, and the tokens are those of a plain engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from connector_rig import (
    PAGES,
    PROMPT_TOKENS,
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
)
from engine_rig import (
    BLOCK_TOKENS,
    counter,
    external_hits,
    generate,
    reset_apc,
    settle,
    tokens_of,
)

from tiered_kv.plan import DISK, HOST

NAMES = ("reset", "again", "answer", "lookup", "salt", "forget", "counted", "bent")
PAGE_TOKENS = 9 * BLOCK_TOKENS
"""Tokens of a prompt that are in whole pages; what is left is computed anyway."""

Truth = Callable[[str], list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def truth(qwen3: Path) -> Truth:
    return lambda name: truth_of(qwen3, name, NAMES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module", params=["layerwise", "async"])
def engine(
    request: pytest.FixtureRequest, qwen3: Path, truth: Truth, directory: Path
) -> Iterator[Any]:
    """One engine for the tests of this module that ask no more of it; each has its own prompts."""
    truth("reset")  # before: there can be one engine at a time
    folder = directory / request.param
    with open_connected(qwen3, load=request.param, disk=str(folder), disk_size="64MiB") as opened:
        yield opened
        check_quiet(opened)


def from_tier(engine: Any, tier: str) -> int:
    """Prompt tokens that vLLM says came from a tier."""
    return int(counter(engine, "vllm:prompt_tokens_cached_by_source", source=tier))


def test_pages_come_back_after_a_reset_of_vllms_cache(engine: Any, truth: Truth) -> None:
    prompts = prompts_of("reset")
    hits, from_host = external_hits(engine)[1], from_tier(engine, "host")
    assert tokens_of(generate(engine, prompts)) == truth("reset")
    assert external_hits(engine)[1] == hits
    reset_apc(engine)
    again = generate(engine, prompts)
    assert tokens_of(again) == truth("reset")
    assert cached(again) == [PAGE_TOKENS] * 4
    # Layer by layer, a page that one request loads is in vLLM's own cache at once, for all others.
    pages = PAGES if scheduler_side(engine)._layerwise else 4 * 9
    assert external_hits(engine)[1] - hits == pages * BLOCK_TOKENS
    assert from_tier(engine, "host") - from_host == pages * BLOCK_TOKENS
    check_quiet(engine)


def test_pages_on_disk_alone_are_fetched_while_the_request_waits(engine: Any, truth: Truth) -> None:
    prompts = prompts_of("again")
    generate(engine, prompts)
    reset_apc(engine)
    drop_from_host(engine)
    from_disk, hits = from_tier(engine, "disk"), stats_of(engine).hit_pages
    assert tokens_of(generate(engine, prompts)) == truth("again")
    fetched = from_tier(engine, "disk") - from_disk
    assert fetched >= PAGES * BLOCK_TOKENS
    settle(engine)
    assert stats_of(engine).hit_pages[HOST] > hits[HOST]
    assert stats_of(engine).checksums_verified == 0  # of the deciding side: ranks have their own
    assert carrier_of(engine).stats().checksums_verified >= PAGES


def test_a_second_turn_hits_the_pages_of_the_answer(engine: Any, truth: Truth) -> None:
    (prompt, *_) = prompts_of("answer")
    (answer,) = generate(engine, [prompt], max_tokens=BLOCK_TOKENS * 2)
    assert answer.tokens[:16] == truth("answer")[0]
    turn = [*prompt, *answer.tokens, *range(3, 40)]
    reset_apc(engine)
    (second,) = generate(engine, [turn])
    computed = PROMPT_TOKENS + 2 * BLOCK_TOKENS - 1  # the last token of an answer is never computed
    assert second.cached_tokens == computed // BLOCK_TOKENS * BLOCK_TOKENS
    reset_apc(engine, reset_connector=True)
    (cold,) = generate(engine, [turn])
    assert cold.cached_tokens == 0
    assert second.tokens == cold.tokens


def test_a_lookup_changes_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 45 of the field's faults: to ask is not to use, and may be done any number of times."""
    prompts = prompts_of("lookup")
    generate(engine, prompts)
    reset_apc(engine)
    side, decider = scheduler_side(engine), decider_of(engine)
    lookups: list[set[tuple[int | None, bool]]] = []

    def thrice(request: Any, computed: int) -> tuple[int | None, bool]:
        before = books_of(decider)
        found: set[tuple[int | None, bool]] = {ask(request, computed) for _ in range(3)}
        assert len(found) == 1
        assert books_of(decider) == before
        lookups.append(found)
        return found.pop()

    ask = side.matched_tokens
    monkeypatch.setattr(side, "matched_tokens", thrice)
    assert cached(generate(engine, prompts)) == [PAGE_TOKENS] * 4
    assert len(lookups) >= 4


def books_of(decider: Any) -> Any:
    """All that a lookup could change: counters, use, states and pins, and what is to be moved."""
    index = decider._planner.index
    tiers = [
        (bytes(tier.state), bytes(tier.pins.cast("B")), bytes(tier.slot.cast("B")), tier.resident)
        for tier in index.tiers
    ]
    use = bytes(index.last_use_of.cast("B")), bytes(index.hits_of.cast("B")), index._clock
    return decider.stats(), tiers, use, decider.jobs_in_flight, decider.has_orders


def test_tenants_of_different_salts_never_share(engine: Any, truth: Truth) -> None:
    from vllm import SamplingParams

    (prompt, *_) = prompts_of("salt")
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)

    def ask(salt: str) -> tuple[tuple[int, ...], int]:
        reset_apc(engine)
        asked = {"prompt_token_ids": prompt, "cache_salt": salt}
        (output,) = engine.generate([asked], sampling, use_tqdm=False)
        return tuple(output.outputs[0].token_ids), output.num_cached_tokens

    (expected, *_) = truth("salt")
    assert ask("blue") == (expected, 0)
    assert ask("blue") == (expected, PAGE_TOKENS)
    assert ask("green") == (expected, 0)
    (unsalted,) = generate(engine, [prompt])
    assert unsalted.cached_tokens == 0


def test_a_reset_of_the_connector_forgets_all(engine: Any, truth: Truth) -> None:
    prompts = prompts_of("forget")
    generate(engine, prompts)
    reset_apc(engine, reset_connector=True)
    assert decider_of(engine).stats().resident_pages == {HOST: 0, DISK: 0}
    for expected in (0, PAGE_TOKENS):
        again = generate(engine, prompts[:1])
        assert tokens_of(again) == truth("forget")[:1]
        assert cached(again) == [expected]
        reset_apc(engine)
    check_quiet(engine)


def test_what_a_running_request_computed_before_a_reset_is_not_stored(engine: Any) -> None:
    """The weights may have changed meanwhile: its pages must not get names of the new ones."""
    (prompt, *_) = prompts_of("running")
    request = add_request(engine, "running", prompt, max_tokens=3 * BLOCK_TOKENS)
    running, decider = core_of(engine).requests[request], decider_of(engine)
    step_until(engine, lambda: running.num_output_tokens > 2 and not decider.jobs_in_flight)
    core_of(engine).connector.reset_cache()
    step_until(engine, lambda: not engine.llm_engine.has_unfinished_requests())
    settle(engine)
    assert decider_of(engine).stats().resident_pages == {HOST: 0, DISK: 0}
    reset_apc(engine)
    assert cached(generate(engine, [prompt])) == [0]


def test_every_missed_page_has_its_reason(engine: Any) -> None:
    """Rows 39 and 43: a run whose counts are known beforehand."""
    prompts = prompts_of("counted")
    settle(engine)
    before = stats_of(engine)

    def since() -> tuple[dict[str, int], dict[str, int]]:
        settle(engine)
        now = stats_of(engine)
        why = {name: n - before.why_miss.get(name, 0) for name, n in now.why_miss.items()}
        hits = {name: n - before.hit_pages[name] for name, n in now.hit_pages.items()}
        return {name: n for name, n in why.items() if n}, {name: n for name, n in hits.items() if n}

    generate(engine, prompts[:1])
    assert since() == ({"never_stored": 9}, {})
    reset_apc(engine)
    generate(engine, prompts[:1])
    assert since() == ({"never_stored": 9}, {HOST: 9})
    reset_apc(engine)
    generate(engine, prompts[1:2])  # three pages it shares, six of its own
    assert since() == ({"never_stored": 15}, {HOST: 12})
    decider_of(engine).clear()
    reset_apc(engine)
    generate(engine, prompts[:1])
    assert since() == ({"never_stored": 15, "evicted": 9}, {HOST: 12})


def test_pages_on_host_are_what_attention_reads(engine: Any, truth: Truth) -> None:
    """The negative control: were loaded pages not used, no test here could fail."""
    prompts = prompts_of("bent")
    generate(engine, prompts)
    reset_apc(engine)
    host = carrier_of(engine)._host
    for slot in range(host.capacity_pages):
        page = host.view(slot).view(np.float32)
        page[:] = -page[::-1]
    bent = generate(engine, prompts)
    assert cached(bent) == [PAGE_TOKENS] * 4
    assert all(a != b for a, b in zip(tokens_of(bent), truth("bent"), strict=True))
    reset_apc(engine, reset_connector=True)
    assert tokens_of(generate(engine, prompts)) == truth("bent")
