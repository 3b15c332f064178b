"""KVLayout whatever the model: ranks, dtypes, fingerprints, and layouts of no model's config."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from known_models import (
    DEEPSEEK_V3,
    EVERY,
    FALCON_7B,
    FALCON_H1,
    GEMMA3_27B,
    JAMBA,
    KIB,
    LLAMA_8B,
    MAMBA2,
    MAMBA_130M,
    MIB,
    QWEN3_32B,
    QWEN3_NEXT,
    Config,
    layout_of,
)

from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout, LayerGroup


def test_ranks_share_the_heads() -> None:
    whole, rank = layout_of(QWEN3_32B), layout_of(QWEN3_32B, tp_rank=3, tp_size=4)
    assert rank.token_bytes * 4 == whole.token_bytes
    assert rank.groups[0].kv_heads == 2
    assert (rank.tp_rank, rank.tp_size) == (3, 4)


def test_fewer_heads_than_ranks_are_replicated() -> None:
    """8 KV heads on 16 ranks: one each, so two ranks keep the same."""
    rank = layout_of(QWEN3_32B, tp_rank=15, tp_size=16)
    assert rank.groups[0].kv_heads == 1
    assert rank.token_bytes == layout_of(QWEN3_32B).token_bytes // 8


def test_a_latent_is_replicated_whole() -> None:
    assert layout_of(DEEPSEEK_V3, tp_rank=7, tp_size=8).token_bytes == 70_272


@pytest.mark.parametrize(
    "config", [JAMBA, MAMBA_130M, QWEN3_NEXT, MAMBA2], ids=lambda c: c["model_type"]
)
def test_states_are_split_over_ranks(config: Config) -> None:
    whole, rank = layout_of(config), layout_of(config, tp_rank=1, tp_size=2)
    assert rank.state_bytes * 2 == whole.state_bytes


def test_one_state_group_is_replicated_and_its_heads_are_split() -> None:
    """Falcon-H1 on 2 ranks: 24 heads x 64 + 2 x 256 = 2,048 channels x 8 bytes; state 1.5 MiB."""
    rank = layout_of(FALCON_H1, tp_size=2)
    assert rank.groups[1].layer_state_bytes == 2048 * 8 + 3 * MIB // 2


@pytest.mark.parametrize(
    ("config", "tp_size"), [(QWEN3_32B, 3), (FALCON_7B, 2), (MAMBA2, 3), (DEEPSEEK_V3, 3)]
)
def test_heads_that_do_not_divide_are_refused(config: Config, tp_size: int) -> None:
    with pytest.raises(ConfigError, match=f"tp_size {tp_size} does not divide"):
        layout_of(config, tp_size=tp_size)


@pytest.mark.parametrize(
    ("rank", "ranks"), [(2, 2), (-1, 2), (0, 0), (0, "2"), (None, 2), (0.0, 2.0)]
)
def test_impossible_ranks_are_refused(rank: Any, ranks: Any) -> None:
    with pytest.raises(ConfigError, match="tp_rank"):
        layout_of(LLAMA_8B, tp_rank=rank, tp_size=ranks)


def test_a_path_a_directory_and_a_dict_give_the_same_layout(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GEMMA3_27B))
    expected = KVLayout.from_model_config(GEMMA3_27B)
    assert KVLayout.from_model_config(path) == expected
    assert KVLayout.from_model_config(str(tmp_path)) == expected
    assert expected.page_tokens == 64


def test_dtype_comes_from_the_config_unless_given() -> None:
    assert layout_of(LLAMA_8B).dtype == layout_of(LLAMA_8B, dtype="auto").dtype == "bfloat16"
    newer = {k: v for k, v in LLAMA_8B.items() if k != "torch_dtype"} | {"dtype": "torch.float16"}
    assert layout_of(newer).dtype == "float16"
    halved = layout_of(LLAMA_8B, dtype="float8_e4m3fn")
    assert (halved.dtype, halved.token_bytes) == ("float8_e4m3fn", 64 * KIB)


def test_a_kv_dtype_leaves_states_as_they_are() -> None:
    assert layout_of(JAMBA, dtype="float8_e5m2").state_bytes == layout_of(JAMBA).state_bytes
    assert layout_of(JAMBA, dtype="float8_e5m2").token_bytes == layout_of(JAMBA).token_bytes // 2


@pytest.mark.parametrize("page_tokens", [0, -1, True, 16.0])
def test_page_tokens_below_one_are_refused(page_tokens: Any) -> None:
    for make, source in (
        (KVLayout.from_model_config, LLAMA_8B),
        (KVLayout.uniform, 64 * KIB),
        (KVLayout.from_tensors, [torch.zeros(2, 8)]),
    ):
        with pytest.raises(ConfigError, match="page_tokens must be an integer of at least 1"):
            make(source, page_tokens)  # type: ignore[arg-type]


def test_groups_that_leave_out_a_layer_are_refused() -> None:
    with pytest.raises(ConfigError, match="every layer"):
        KVLayout("x", "uint8", 4, (LayerGroup("full", (0, 2), 8),))
    with pytest.raises(ConfigError, match="every layer"):
        KVLayout("x", "uint8", 4, ())


def test_groups_of_negative_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="zero bytes or more"):
        KVLayout("x", "uint8", 4, (LayerGroup("full", (0,), 16), LayerGroup("full", (1,), -8)))


def test_from_tensors_takes_bytes_as_they_are() -> None:
    """2 x 16 tokens x 4 heads x 8 x 2 bytes = 2 KiB a page; meta tensors: no data is read."""
    tensors = [torch.empty(10, 2, 16, 4, 8, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    layout = KVLayout.from_tensors(tensors, 16)
    assert layout.layer_page_bytes == (2 * KIB,) * 3
    assert (layout.dtype, layout.token_bytes) == ("bfloat16", 3 * 128)
    assert [g.kind for g in layout.groups] == ["full"]


def test_from_tensors_counts_an_indivisible_page_as_state() -> None:
    layout = KVLayout.from_tensors([torch.zeros(5, 16, 8), torch.zeros(5, 33)], 16)
    assert [(g.kind, g.layers) for g in layout.groups] == [("full", (0,)), ("state", (1,))]
    assert layout.layer_page_bytes == (512, 132)


def test_from_tensors_tells_heads_first_from_tokens_first() -> None:
    """Same bytes, other order: as shapes, and as one shape over permuted memory."""
    tokens_first = KVLayout.from_tensors([torch.zeros(4, 2, 16, 8, 32)], 16)
    heads_first = KVLayout.from_tensors([torch.zeros(4, 2, 8, 16, 32)], 16)
    permuted = KVLayout.from_tensors([torch.zeros(4, 2, 8, 16, 32).transpose(2, 3)], 16)
    assert tokens_first.page_bytes == heads_first.page_bytes == permuted.page_bytes
    assert len({x.fingerprint for x in (tokens_first, heads_first, permuted)}) == 3


NOT_PAGES = {
    "none": [],
    "page-counts": [torch.zeros(4, 8), torch.zeros(5, 8)],
    "no-page": [torch.zeros(4)],
    "holes": [torch.zeros(4, 8, 8)[:, :, :4]],
    "pages-second": [torch.zeros(2, 4, 8).transpose(0, 1)],
}


@pytest.mark.parametrize("tensors", NOT_PAGES.values(), ids=NOT_PAGES)
def test_from_tensors_refuses_what_is_not_pages(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="tensors"):
        KVLayout.from_tensors(tensors, 4)


@pytest.mark.parametrize(
    ("page_bytes", "layers", "parts"), [(65536, None, 4), (6, None, 2), (7, None, 1), (60, 3, 3)]
)
def test_uniform_cuts_equal_layers(page_bytes: int, layers: int | None, parts: int) -> None:
    layout = KVLayout.uniform(page_bytes, 4, layers)
    assert layout.page_bytes == page_bytes
    assert layout.layer_page_bytes == (page_bytes // parts,) * parts


@pytest.mark.parametrize(("page_bytes", "layers"), [(0, None), (-4, 2), (10, 3), (10, 0)])
def test_uniform_refuses_layers_that_do_not_divide(page_bytes: int, layers: int | None) -> None:
    with pytest.raises(ConfigError, match="page_bytes"):
        KVLayout.uniform(page_bytes, 4, layers)


@pytest.mark.parametrize("config", EVERY, ids=lambda c: c["model_type"])
def test_whole_pages_are_batch_times_pages_times_page_bytes(config: Config) -> None:
    layout = layout_of(config)
    assert layout.kv_bytes(3, 5 * 64) == 3 * 5 * layout.page_bytes
    assert sum(layout.layer_page_bytes) == layout.page_bytes
    assert layout.page_bytes == 64 * layout.token_bytes + layout.state_bytes
    assert pickle.loads(pickle.dumps(layout)) == layout


GOLDEN = "b97987684ff62807d5412b33b9c3500c04534091c7c4b8c49ec6dc5d9df0afb9"


def test_fingerprint_is_the_same_in_every_process() -> None:
    """Another value makes every store on disk foreign: change it only with the format's version."""
    assert layout_of(GEMMA3_27B).fingerprint == GOLDEN
    code = (
        "import json, sys; from tiered_kv.layout import KVLayout;"
        "print(KVLayout.from_model_config(json.load(sys.stdin)).fingerprint)"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(GEMMA3_27B),
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == GOLDEN


def test_fingerprint_covers_everything() -> None:
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 9}
    variants = [
        layout_of(QWEN3_32B),
        layout_of(QWEN3_32B, 32),
        layout_of(QWEN3_32B, dtype="float16"),
        layout_of(QWEN3_32B, tp_size=2),
        layout_of(QWEN3_32B, tp_rank=1, tp_size=2),
        layout_of({**QWEN3_32B, "model_type": "qwen4"}),
        layout_of({**QWEN3_32B, "num_hidden_layers": 63}),
        layout_of({**QWEN3_32B, "num_key_value_heads": 16, "head_dim": 64}),
        layout_of({**QWEN3_32B, **window}),
    ]
    assert len({v.fingerprint for v in variants}) == len(variants)
