"""Tiny models, made once a run, for the tests inside vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import ModelKind, save_model

ModelOf = Callable[..., Path]


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> ModelOf:
    """`model_of(kind, seed=0)`: the folder of a tiny random model, written at the first call."""
    made: dict[tuple[ModelKind, int], Path] = {}

    def get(kind: ModelKind, seed: int = 0) -> Path:
        if (kind, seed) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{seed}")
            made[kind, seed] = save_model(kind, folder, seed=seed)
        return made[kind, seed]

    return get


@pytest.fixture(scope="session")
def qwen3(model_of: ModelOf) -> Path:
    """Three layers of grouped-query attention: 48 KiB of KV a block of 32 tokens."""
    return model_of("qwen3")
