"""Requests that end before their time, and steps that go wrong: no block lost, no page wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from connector_rig import (
    Gate,
    add_request,
    break_next_copy,
    cached,
    check_quiet,
    core_of,
    drop_from_host,
    open_connected,
    prompts_of,
    step_until,
)
from engine_rig import BLOCK_TOKENS, Answer, external_hits, generate, reset_apc

from tiered_kv.storage.attached import AttachedHbm

PAGE_TOKENS = 9 * BLOCK_TOKENS


@pytest.fixture(scope="module")
def engine(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("store")
    with open_connected(
        qwen3,
        load="layerwise",
        disk=str(directory),
        disk_size="64MiB",
        options={"max_num_batched_tokens": 512, "long_prefill_token_threshold": 128},
    ) as opened:
        yield opened


def cold(engine: Any, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """What is answered without any page of the store; forgets them again."""
    reset_apc(engine, reset_connector=True)
    _, hits = external_hits(engine)
    answers = generate(engine, prompts)
    assert external_hits(engine)[1] == hits
    reset_apc(engine, reset_connector=True)
    return answers


def abort(engine: Any, name: str) -> None:
    engine.llm_engine.abort_request([name])


def test_abort_while_its_pages_are_fetched(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt, *_) = prompts_of("fetched")
    (expected,) = cold(engine, [prompt])
    generate(engine, [prompt])
    reset_apc(engine)
    drop_from_host(engine)
    with monkeypatch.context() as patch:
        gate = Gate(patch, "read")
        add_request(engine, "fetched", prompt)
        step_until(engine, gate.is_reached.is_set)
        abort(engine, "fetched")
        gate.open()
        check_quiet(engine)
    (answer,) = generate(engine, [prompt])
    assert (answer.tokens, answer.cached_tokens) == (expected.tokens, PAGE_TOKENS)
    check_quiet(engine)


def test_abort_while_its_pages_are_stored(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are free at once and given to others, while its pages are still being copied."""
    prompts = prompts_of("stored")
    expected = cold(engine, prompts)
    with monkeypatch.context() as patch:
        gate = Gate(patch, "write")
        request = add_request(engine, "stored", prompts[0], max_tokens=64)
        running = core_of(engine).requests[request]
        step_until(engine, lambda: running.num_output_tokens > 3)
        abort(engine, "stored")
        assert [a.tokens for a in generate(engine, prompts[1:])] == [a.tokens for a in expected[1:]]
        gate.open()
        check_quiet(engine)
    reset_apc(engine)
    answers = generate(engine, prompts)
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    assert cached(answers) == [PAGE_TOKENS] * 4


@pytest.mark.parametrize("is_aborted", [False, True], ids=["recomputed", "aborted"])
def test_pages_computed_over_a_load_that_failed_are_not_stored(
    engine: Any, is_aborted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 6: they would have right keys and wrong bytes. An abort comes before the failure does."""
    (head, other, *_) = prompts_of(f"over-{is_aborted}")
    prompt = head + other[-100:]
    (expected,) = cold(engine, [prompt])
    generate(engine, [head])
    reset_apc(engine)
    core = engine.llm_engine.engine_core.engine_core
    request = add_request(engine, "over", prompt)
    queue = core.aborts_queue.put_nowait if is_aborted else lambda requests: None
    break_next_copy(monkeypatch, lambda: queue([request]))
    step_until(engine, lambda: request not in core_of(engine).requests)
    assert AttachedHbm.write_layers.__name__ == "write_layers", "nothing was loaded"
    abort(engine, "over")  # for the front end, which has not asked for it
    check_quiet(engine)
    (answer,) = generate(engine, [prompt])  # nor are they hit where they are, in vLLM's own cache
    assert answer.tokens == expected.tokens
    reset_apc(engine)
    (answer,) = generate(engine, [prompt])
    assert answer.tokens == expected.tokens
    assert answer.cached_tokens == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    check_quiet(engine)


def test_who_shares_blocks_that_failed_waits_until_they_are_computed(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a failed load stay in vLLM's own cache while they are computed again, over
    several steps if they are many: a request that comes meanwhile must not take them for good.
    """
    head = [token for prompt in prompts_of("shares") for token in prompt]
    prompts = [head + list(range(3, 40)), head + list(range(40, 80))]
    expected = cold(engine, prompts)
    generate(engine, [head])
    reset_apc(engine)
    first = add_request(engine, "first", prompts[0])
    requests = core_of(engine).requests
    break_next_copy(monkeypatch)
    running = requests[first]
    step_until(engine, lambda: AttachedHbm.write_layers.__name__ == "write_layers")
    assert running.num_computed_tokens < len(head) // 2
    answers = generate_beside(engine, prompts[1])
    assert answers["first"] == expected[0].tokens
    assert answers["second"] == expected[1].tokens
    check_quiet(engine)


def generate_beside(engine: Any, prompt: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Add a request to those that run; answers of all."""
    add_request(engine, "second", prompt)
    answers: dict[str, tuple[int, ...]] = {}
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            answers[output.request_id] = tuple(output.outputs[0].token_ids)
    return answers
