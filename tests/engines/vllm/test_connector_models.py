"""TieredKVConnector with other kinds of attention: latent pages, and several KV cache groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from connector_rig import (
    break_next_copy,
    cached,
    check_quiet,
    drop_from_host,
    open_connected,
    prompts_of,
    scheduler_side,
    stats_of,
    truth_of,
)
from engine_rig import ModelKind, counter, generate, reset_apc, tokens_of

PAGE_TOKENS = 288  # in whole blocks of 16 as of 32
ModelOf = Callable[..., Path]


@pytest.mark.parametrize("kind", ["mla", "sliding"])
def test_pages_of_every_kind_come_back_from_host_and_from_disk(
    kind: ModelKind, model_of: ModelOf, tmp_path: Path
) -> None:
    model, prompts = model_of(kind), prompts_of("kinds")
    expected = truth_of(model, "kinds", ["kinds", "broken"])
    store: dict[str, Any] = {"disk": str(tmp_path), "disk_size": "64MiB"}
    with open_connected(model, **store) as engine:
        groups = len(scheduler_side(engine)._groups)
        assert groups == (2 if kind == "sliding" else 1)
        assert tokens_of(generate(engine, prompts)) == expected
        for _ in range(2):
            reset_apc(engine)
            answers = generate(engine, prompts)
            assert tokens_of(answers) == expected
            assert cached(answers) == [PAGE_TOKENS] * 4
            drop_from_host(engine)
        assert counter(engine, "vllm:prompt_tokens_cached_by_source", source="disk") > 0
        (prompt, *_), (answer, *_) = prompts, expected
        turn = [*prompt, *answer, *range(3, 40)]
        (second,) = generate(engine, [turn])
        assert second.cached_tokens >= PAGE_TOKENS
        check_quiet(engine)
    with open_connected(model, **store) as engine:
        answers = generate(engine, [*prompts, turn])
        assert tokens_of(answers) == [*expected, second.tokens]
        assert cached(answers)[:4] == [PAGE_TOKENS] * 4
        check_quiet(engine)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failing_load_of_a_hybrid_model(
    policy: str, model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM cannot be told of blocks here, only of the request whose load failed."""
    model, prompts = model_of("sliding"), prompts_of("broken")
    expected = truth_of(model, "broken", ["kinds", "broken"])
    with open_connected(model, policy=policy) as engine:
        generate(engine, prompts)
        reset_apc(engine)
        break_next_copy(monkeypatch)
        answers = tokens_of(generate(engine, prompts))
        wrong = [at for at in range(4) if answers[at] != expected[at]]
        assert [answers[at] for at in wrong] == ([] if policy == "recompute" else [()])
        check_quiet(engine)
        assert stats_of(engine).why_miss["failed"] > 0
        reset_apc(engine)
        assert tokens_of(generate(engine, prompts)) == expected
        check_quiet(engine)
