"""What the other engine tests stand on: tokens follow from the prompt, and from all of its KV."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import (
    BLOCK_TOKENS,
    MODEL_KINDS,
    ModelKind,
    external_hits,
    generate,
    open_engine,
    random_prompts,
    reset_apc,
    tokens_of,
)


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_tokens_follow_from_the_prompt_whatever_else_is_in_the_batch(
    kind: ModelKind, model_of: Callable[..., Path]
) -> None:
    prompts = random_prompts(4, 200, shared_tokens=96)
    with open_engine(model_of(kind), enable_prefix_caching=False) as engine:
        together = tokens_of(generate(engine, prompts))
        alone = [tokens_of(generate(engine, [prompt]))[0] for prompt in prompts]
    assert alone == together
    assert len(set(together)) == len(prompts)
    with open_engine(model_of(kind), enable_prefix_caching=False) as engine:
        assert tokens_of(generate(engine, prompts[::-1])) == together[::-1]


def test_every_block_of_the_prompt_decides_the_tokens(qwen3: Path) -> None:
    """Otherwise a test that compares tokens could not see that wrong KV was loaded for a block."""
    (prompt,) = random_prompts(1, 5 * BLOCK_TOKENS + 1)
    others = []
    for start in range(0, len(prompt) - 1, BLOCK_TOKENS):
        other = list(prompt)
        other[start : start + BLOCK_TOKENS] = other[start : start + BLOCK_TOKENS][::-1]
        others.append(other)
    with open_engine(qwen3) as engine:
        true, *rest = tokens_of(generate(engine, [prompt, *others]))
    assert true not in rest


def test_a_reset_of_the_prefix_cache_forgets_every_block(qwen3: Path) -> None:
    prompts = random_prompts(1, 10 * BLOCK_TOKENS + 5)
    with open_engine(qwen3) as engine:
        first = generate(engine, prompts)
        again = generate(engine, prompts)
        reset_apc(engine)
        fresh = generate(engine, prompts)
        assert external_hits(engine) == (0, 0)
    assert [a[0].cached_tokens for a in (first, again, fresh)] == [0, 10 * BLOCK_TOKENS, 0]
    assert tokens_of(first) == tokens_of(again) == tokens_of(fresh)


@pytest.mark.parametrize(
    ("kind", "in_process"), [("qwen3", False), ("mla", True)], ids=["qwen3-own-process", "mla"]
)
def test_a_connector_of_vllm_hits_after_a_restart(
    kind: ModelKind, in_process: bool, model_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The rig's way of giving connectors, its counters, its engine core in a process of its own."""
    model = model_of(kind)
    prompts = random_prompts(1, 9 * BLOCK_TOKENS + 5)
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    with open_engine(model, kv_transfer_config=config) as engine:
        stored = generate(engine, prompts)
        assert external_hits(engine) == (len(prompts[0]), 0)
    with open_engine(model, kv_transfer_config=config, in_process=in_process) as engine:
        loaded = generate(engine, prompts)
        assert external_hits(engine) == (len(prompts[0]), 9 * BLOCK_TOKENS)
    assert tokens_of(loaded) == tokens_of(stored)
    assert loaded[0].cached_tokens == 9 * BLOCK_TOKENS


def test_an_engine_that_fails_to_start_leaves_nothing_for_the_next(
    qwen3: Path, tmp_path: Path
) -> None:
    bad = {"kv_connector": "NoSuchConnector", "kv_role": "kv_both"}
    with (
        pytest.raises(ValueError, match="NoSuchConnector"),
        open_engine(qwen3, kv_transfer_config=bad),
    ):
        pass
    with open_engine(qwen3) as engine:
        assert len(generate(engine, random_prompts(2, 40), max_tokens=3)) == 2


def test_engines_give_their_memory_back(qwen3: Path) -> None:
    """Engines of 256 MiB of KV cache, one after another, would otherwise fill a small machine."""
    resident = []
    for _ in range(4):
        with open_engine(qwen3, kv_bytes=256 << 20) as engine:
            generate(engine, random_prompts(1, 40), max_tokens=2)
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE)
    assert resident[-1] - resident[0] < 128 << 20
