"""Requests of unusual kinds: sessions that are given more input, adapters, preemption's edges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from connector_rig import check_quiet, core_of, open_connected, prompts_of
from engine_rig import BLOCK_TOKENS, generate, reset_apc

from tiered_kv.keys import PageKey
from tiered_kv.plugins.vllm.identity import page_key
from tiered_kv.plugins.vllm.tracked import Tracked

ROOT = PageKey(b"r" * 32)


def feed(engine: Any, tokens: Sequence[int] | None, max_tokens: int = 1) -> list[int]:
    """Give a session more input, or end it; the tokens it answers with."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    asked = engine.llm_engine.input_processor.process_inputs(
        "session",
        {"prompt_token_ids": list(tokens or [0])},
        sampling,
        ("generate",),
        resumable=tokens is not None,
    )
    core = engine.llm_engine.engine_core.engine_core
    core.add_request(*core.preprocess_add_request(asked))
    answer: list[int] = []
    for _ in range(max_tokens + 20):
        for outputs in core.step_fn()[0].values():
            for output in outputs.outputs:
                answer += output.new_token_ids
        if len(answer) == max_tokens:
            break
    return answer


def test_a_session_takes_the_last_token_of_an_answer_back(qwen3: Path) -> None:
    """A page that ended in it becomes another page: what is in it then must not get its key."""
    (prompt, other, *_) = prompts_of("session")
    tail = 10 * BLOCK_TOKENS - len(prompt)  # so that the answer ends with a page
    with open_connected(qwen3, load="async") as engine:
        answer = feed(engine, prompt, tail)
        assert len(answer) == tail
        assert len(core_of(engine).requests["session"].block_hashes) == 10
        feed(engine, other[-40:])
        feed(engine, None)
        check_quiet(engine)
        reset_apc(engine)
        prompt = [*prompt, *answer, *range(3, 23)]  # with the token that was taken back
        (warm,) = generate(engine, [prompt])
        assert warm.cached_tokens >= 9 * BLOCK_TOKENS
        reset_apc(engine, reset_connector=True)
        (cold,) = generate(engine, [prompt])
        assert warm.tokens == cold.tokens


def tracked(hashes: list[bytes]) -> Tracked:
    request: Any = SimpleNamespace(block_hashes=hashes, num_computed_tokens=0)
    return Tracked(request, ROOT)


def test_keys_follow_the_hashes_back_and_on() -> None:
    hashes = [b"a", b"b", b"c"]
    own = tracked(hashes)
    own.extend()
    own.given(0, 3, 0)
    assert own.keys == [page_key(ROOT, name) for name in (b"a", b"b", b"c")]
    hashes[2:] = [b"x", b"y"]
    own.extend()
    assert own.keys == [page_key(ROOT, name) for name in (b"a", b"b", b"x", b"y")]
    assert own.next_put == 2
    del hashes[1:]
    own.extend()
    assert own.keys == [page_key(ROOT, b"a")]
    assert own.next_put == 1


def test_pages_that_are_not_taken_are_given_again_less_and_less_often() -> None:
    own = tracked([bytes([at]) for at in range(99)])
    own.extend()
    tries = []
    for end in range(1, 64):
        if end > own.next_try:
            tries.append(end)
            own.given(own.next_put, end, end - own.next_put)
    assert tries == [1, 3, 6, 11, 20, 37]
    assert own.next_put == 0
    own.given(0, 64, 0)
    assert own.next_try == own.next_put == 64


def test_a_part_that_is_not_taken_is_given_again_from_there() -> None:
    own = tracked([bytes([at]) for at in range(9)])
    own.extend()
    own.given(0, 8, 3)
    assert (own.next_put, own.next_try) == (5, 9)
    own.given(5, 9, 4)  # none of it: what it hangs from may be gone
    assert own.next_put == 0
    own.restart()
    assert (own.next_put, own.next_try) == (0, 0)


def save_adapter(folder: Path, seed: int) -> Any:
    """A small random LoRA adapter, large enough to change what is answered."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    folder.mkdir()
    source = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{name}.lora_A.weight"] = torch.randn(8, 64, generator=source) * 0.3
        weights[f"{name}.lora_B.weight"] = torch.randn(64, 8, generator=source) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    return LoRARequest(f"adapter-{seed}", seed, str(folder))


def test_adapters_never_share_pages(qwen3: Path, tmp_path: Path) -> None:
    """Row 19: nor with the bare model."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    (prompt, *_) = prompts_of("adapters")
    adapters = [None, save_adapter(tmp_path / "1", 1), save_adapter(tmp_path / "2", 2)]
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    with open_connected(qwen3, options=options) as engine:

        def ask(adapter: Any) -> tuple[tuple[int, ...], int]:
            reset_apc(engine)
            (output,) = engine.generate(
                [{"prompt_token_ids": prompt}], sampling, lora_request=adapter, use_tqdm=False
            )
            return tuple(output.outputs[0].token_ids), output.num_cached_tokens

        first = [ask(adapter) for adapter in adapters]
        assert [hits for _, hits in first] == [0, 0, 0]
        assert len({tokens for tokens, _ in first}) == 3
        again = [ask(adapter) for adapter in adapters]
        assert again == [(tokens, 9 * BLOCK_TOKENS) for tokens, _ in first]
