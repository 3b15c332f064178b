"""Several rows in one TieredCache: padding, different prefixes, one page for equal tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from huggingface_rig import (
    MODELS,
    PAGE_TOKENS,
    Passes,
    build_model,
    converse,
    generate,
    logits,
    on_one_thread,
    padded,
    random_tokens,
    shared_model,
    small_store,
    whole_pages,
)
from store_rig import settle

from tiered_kv.plugins.huggingface import TieredCache
from tiered_kv.plugins.huggingface_layer import TieredLayer
from tiered_kv.plugins.huggingface_model import LayerShape
from tiered_kv.plugins.huggingface_rows import rows_of, shared_columns

LONG, SHORT = random_tokens(100, seed=1), random_tokens(61, seed=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture
def llama() -> Any:
    return shared_model("llama")


def generated(model: Any, ids: torch.Tensor, cache: Any = None, **options: Any) -> Any:
    """Tokens and the logits of every step."""
    return generate(model, ids, cache, return_dict_in_generate=True, output_logits=True, **options)


def assert_same(ours: Any, plain: Any, atol: float = 1e-5) -> None:
    assert torch.equal(ours.sequences, plain.sequences)
    for step, expected in zip(ours.logits, plain.logits, strict=True):
        torch.testing.assert_close(step, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("brings_model", [False, True], ids=["alone", "model"])
def test_rows_with_different_prefixes_and_padding_equal_plain_generate(
    name: str, brings_model: bool
) -> None:
    """Row 0 has six pages stored, row 1 two, row 2 none; rows 1 and 2 are padded."""
    model = shared_model(name)
    prompts = [
        torch.cat([LONG, random_tokens(17, seed=3)], dim=1),
        torch.cat([SHORT[:, :40], random_tokens(50, seed=4)], dim=1),
        random_tokens(50, seed=5),
    ]
    ids, mask = padded(prompts)
    plain = generated(model, ids, attention_mask=mask)
    with small_store(model, hbm_pages=32) as store:
        converse(model, store, LONG)
        converse(model, store, SHORT)
        given = {"model": model} if brings_model else {}
        cache = TieredCache.restore(store, ids, attention_mask=mask, **given)
        assert cache.restored_tokens > 0
        if not brings_model:  # row 1's two pages end in column 59, row 2 has nothing before 67
            assert cache.restored_by_row == (59, 32, 0)
            assert sum(store.stats().hit_pages.values()) == 4 + 2  # what no column needs stays
        assert_same(generated(model, ids, cache, attention_mask=mask), plain)


def test_equal_prefixes_of_all_rows_are_reused_whole(llama: Any) -> None:
    prompts = [torch.cat([LONG, random_tokens(n, seed=n)], dim=1) for n in (20, 20, 20)]
    ids, _ = padded(prompts)
    with small_store(llama) as store:
        converse(llama, store, LONG)
        cache = TieredCache.restore(store, ids)
        assert cache.restored_by_row == (96, 96, 96)
        assert cache.restored_by_tier == {"hbm": 3 * 96}
        with Passes(llama) as passes:
            output = generated(llama, ids, cache)
        assert passes.columns == [(3, 24)] + [(3, 1)] * 15
        assert_same(output, generated(llama, ids))


def test_a_row_that_lacks_much_is_computed_alone_and_holds_nobody_back(llama: Any) -> None:
    """Three rows of 220 tokens, one of them new: 220 tokens are computed instead of 660."""
    known = random_tokens(200, seed=6)
    prompts = [torch.cat([known, random_tokens(20, seed=n)], dim=1) for n in (7, 8)]
    ids, mask = padded([*prompts, random_tokens(200, seed=9)])
    with small_store(llama, hbm_pages=64) as store:
        converse(llama, store, known)
        with Passes(llama) as passes:
            cache = TieredCache.restore(store, ids, attention_mask=mask, model=llama)
            output = generated(llama, ids, cache, attention_mask=mask)
        assert cache.restored_by_row == (192, 192, 0)
        assert cache.computed_tokens == 192 - 20
        assert passes.columns[:2] == [(1, 192 - 20), (3, 220 - 192)]
        assert_same(output, generated(llama, ids, attention_mask=mask))


def test_columns_kept_leave_least_to_compute() -> None:
    rows = rows_of(torch.ones((3, 1000), dtype=torch.long))
    assert shared_columns(rows, [960, 960, 0], can_compute=False) == 0
    assert shared_columns(rows, [960, 960, 0], can_compute=True) == 960
    assert shared_columns(rows, [960, 950, 944], can_compute=True) == 944  # not worth two passes
    assert shared_columns(rows, [960, 300, 600], can_compute=True) == 960
    assert shared_columns(rows, [0, 0, 0], can_compute=True) == 0
    rows = rows_of(torch.ones((2, 100)).long(), torch.tensor([[1] * 100, [0] * 60 + [1] * 40]))
    assert shared_columns(rows, [48, 60], can_compute=False) == 48
    assert shared_columns(rows, [0, 60], can_compute=False) == 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_rows_of_a_batch_are_saved_under_their_own_tokens(name: str) -> None:
    """What a padded batch saved is found by each row alone, and the other way round."""
    model = shared_model(name)
    ids, mask = padded([LONG, SHORT])
    with small_store(model, hbm_pages=32) as store:
        cache = TieredCache.restore(store, ids, attention_mask=mask)
        output = generated(model, ids, cache, attention_mask=mask)
        assert cache.save(output.sequences) == (100 + 15) // PAGE_TOKENS + (61 + 15) // PAGE_TOKENS
        for row, prompt in enumerate((LONG, SHORT)):
            alone = output.sequences[row : row + 1, ids.shape[1] - prompt.shape[1] :]
            assert torch.equal(alone, generate(model, prompt))
            longer = torch.cat([alone, random_tokens(9, seed=10)], dim=1)
            cache = TieredCache.restore(store, longer)
            assert cache.restored_tokens == whole_pages(alone.shape[1] - 1)
            assert_same(generated(model, longer, cache), generated(model, longer))


def test_padding_enters_neither_keys_nor_pages(llama: Any) -> None:
    """Row 1 ends early: `generate` puts padding behind it, which has K and V, but no meaning."""
    ids, mask = padded([LONG, SHORT])
    ends = generate(llama, SHORT)[0, SHORT.shape[1] + 1].item()
    assert ends not in generate(llama, LONG)[0, LONG.shape[1] :]
    options = {"eos_token_id": ends, "attention_mask": mask, "max_new_tokens": 40}
    with small_store(llama, hbm_pages=32) as store:
        cache = TieredCache.restore(store, ids, attention_mask=mask)
        output = generate(llama, ids, cache, **options)
        assert torch.equal(output, generate(llama, ids, **options))
        assert (output[1, -37:] == 0).all()
        cache.save(output, pad_token_id=0)
        with_pads = output[1, ids.shape[1] - SHORT.shape[1] :]
        assert store.match(store.keys(with_pads)).tokens == whole_pages(61 + 2)
        assert store.match(store.keys(output[1])).pages == 0
        resident = store.stats().put_pages
        assert resident == (100 + 39) // PAGE_TOKENS + (61 + 2) // PAGE_TOKENS


def test_nan_left_in_memory_does_not_leak_through_masked_padding(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of zero times NaN is NaN: restored rows are padded with zeros, not leftovers."""
    made = torch.empty

    def full_of_nan(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = made(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    ids, mask = padded([torch.cat([LONG, SHORT], dim=1), torch.cat([SHORT, LONG[:, :60]], dim=1)])
    plain = generated(llama, ids, attention_mask=mask)
    with small_store(llama, hbm_pages=32) as store:
        converse(llama, store, LONG)
        converse(llama, store, SHORT)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", full_of_nan)
            cache = TieredCache.restore(store, ids, attention_mask=mask)
        assert cache.restored_by_row == (88, 48)
        assert_same(generated(llama, ids, cache, attention_mask=mask), plain)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_implementations_agree_with_themselves(attention: str) -> None:
    model = build_model("llama", attn_implementation=attention)
    ids, mask = padded([torch.cat([LONG, SHORT], dim=1), LONG])
    plain = generated(model, ids, attention_mask=mask)
    with small_store(model) as store:
        converse(model, store, LONG)
        cache = TieredCache.restore(store, ids, attention_mask=mask)
        assert cache.restored_by_row == (96, 35)
        assert_same(generated(model, ids, cache, attention_mask=mask), plain)


def test_rows_larger_than_hbm_together_come_in_pieces(llama: Any) -> None:
    prompts = [torch.cat([LONG, random_tokens(9, seed=n)], dim=1) for n in range(3)]
    ids, _ = padded(prompts)
    with small_store(llama, hbm_pages=4) as store:
        converse(llama, store, LONG)
        cache = TieredCache.restore(store, ids)
        assert cache.restored_by_row == (96, 96, 96)
        assert sum(cache.restored_by_tier.values()) == 3 * 96
        assert_same(generated(llama, ids, cache), generated(llama, ids))
        settle(store)
        assert store.hbm.allocate(4) is not None  # no lease is left


def test_each_page_that_is_not_there_is_counted_once(llama: Any) -> None:
    prompt = torch.cat([LONG, SHORT], dim=1)
    with small_store(llama) as store:
        converse(llama, store, LONG)
        before = store.stats().why_miss
        assert before == {"never_stored": 6}
        TieredCache.restore(store, prompt)
        assert store.stats().why_miss == {"never_stored": 6 + 160 // PAGE_TOKENS - 6}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], "row 0 of attention_mask is not zeros, then ones"),
        ([[1, 1, 1, 1], [0, 1, 0, 1]], "row 1 of attention_mask is not zeros, then ones"),
        ([[1, 1, 1, 1], [0, 0, 0, 0]], "at least one token a row"),
        ([[1, 1, 1]], r"attention_mask has shape \[1, 3\], token_ids \[2, 4\]"),
    ],
)
def test_masks_that_are_not_left_padding_are_refused(
    llama: Any, mask: list[list[int]], message: str
) -> None:
    ids = random_tokens(8, seed=1).reshape(2, 4)
    with small_store(llama) as store, pytest.raises(ValueError, match=message):
        TieredCache.restore(store, ids, attention_mask=torch.tensor(mask))


def test_other_rows_than_restored_are_refused(llama: Any) -> None:
    ids, mask = padded([LONG, SHORT])
    with small_store(llama) as store:
        cache = TieredCache.restore(store, ids, attention_mask=mask)
        with pytest.raises(ValueError, match="computes 1 sequences, this cache was restored for 2"):
            logits(llama, LONG, cache)
        output = generate(llama, ids, attention_mask=mask)
        with pytest.raises(ValueError, match="has 1 sequences, this cache was restored for 2"):
            cache.save(output[:1])


def test_a_row_computed_alone_may_have_had_its_tokens_put_elsewhere(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where a layer of the model is on another device than the cache was made on."""
    alone_of = TieredLayer.row

    def elsewhere(self: TieredLayer, row: int, column: int, tokens: int) -> TieredLayer:
        alone = alone_of(self, row, column, tokens)
        assert alone._room is not None
        alone._room = (alone._room[0].clone(), alone._room[1].clone())
        alone.keep(tokens)
        return alone

    monkeypatch.setattr(TieredLayer, "row", elsewhere)
    known = random_tokens(200, seed=6)
    ids, mask = padded([torch.cat([known, random_tokens(20, seed=7)], dim=1), LONG])
    with small_store(llama, hbm_pages=64) as store:
        converse(llama, store, known)
        cache = TieredCache.restore(store, ids, attention_mask=mask, model=llama)
        assert cache.computed_tokens == 192 - 120
        output = generated(llama, ids, cache, attention_mask=mask)
        assert_same(output, generated(llama, ids, attention_mask=mask))


def test_what_a_row_has_computed_in_a_room_of_its_own_is_fetched_back() -> None:
    """Layers of a model over several devices get K and V where the room is not."""
    shape = LayerShape(heads=2, key_dim=4, value_dim=6, dtype=torch.float32)
    layer = TieredLayer(0, shape, rows=2)
    layer.reserve(20, torch.device("cpu"))
    row = layer.row(1, column=3, tokens=0)
    row.reset()  # the room is gone: the next tokens make another
    keys, values = torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 6)
    row.update(keys, values)
    layer.take(1, 3, row)
    layer.keep(12)
    assert layer.keys is not None and layer.values is not None
    assert torch.equal(layer.keys[1:, :, 3:], keys)
    assert torch.equal(layer.values[1:, :, 3:], values)
