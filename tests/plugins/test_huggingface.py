"""TieredCache against recomputation and against transformers' own cache, on tiny random models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from huggingface_rig import (  # noqa: E402
    MODELS,
    PAGE_TOKENS,
    SIZES,
    VOCABULARY,
    Passes,
    build_model,
    converse,
    generate,
    kept_by,
    logits,
    on_one_thread,
    random_tokens,
    shared_model,
    small_store,
    whole_pages,
)

from tiered_kv.config import StoreConfig  # noqa: E402
from tiered_kv.errors import ConfigError, LayoutMismatchError, TieredKVError  # noqa: E402
from tiered_kv.layout import KVLayout  # noqa: E402
from tiered_kv.plugins import huggingface, huggingface_layer  # noqa: E402
from tiered_kv.plugins.huggingface import (  # noqa: E402
    CACHE_ARGUMENT,
    TieredCache,
    layout_for,
    model_fingerprint,
)
from tiered_kv.plugins.huggingface_model import layer_shapes  # noqa: E402
from tiered_kv.store import TieredStore  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture(params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> Any:
    return shared_model(name)


@pytest.fixture(params=["deepseek_v3", "gemma3", "llama"])
def one_of_a_kind(request: pytest.FixtureRequest) -> Any:
    """One with latents, one with windows, one with neither."""
    return shared_model(request.param)


@pytest.fixture
def llama() -> Any:
    return shared_model("llama")


def test_continuation_of_a_restored_prefix_equals_recomputing_it(model: Any) -> None:
    prefix, rest = random_tokens(100, seed=1), random_tokens(30, seed=2)
    prompt = torch.cat([prefix, rest], dim=1)
    with small_store(model) as store:
        first = TieredCache.restore(store, prefix)
        logits(model, prefix, first)
        assert first.save() == 6
        cache = TieredCache.restore(store, prompt)
        assert cache.restored_tokens == 96
        continued = logits(model, prompt[:, 96:], cache)
        expected = logits(model, prompt)[:, 96:]
        torch.testing.assert_close(continued, expected, rtol=0, atol=1e-5)
        output = generate(model, prompt, TieredCache.restore(store, prompt))
        assert torch.equal(output, generate(model, prompt))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_restored_cache_equals_the_cache_it_was_saved_from_bit_for_bit(
    name: str, dtype: torch.dtype
) -> None:
    """The same kernels run on both, so that not one bit may differ, of K, V and logits."""
    model = build_model(name).to(dtype)
    prefix, rest = random_tokens(96, seed=3), random_tokens(25, seed=4)
    kept = transformers.DynamicCache()  # without a config: every token of sliding layers too
    logits(model, prefix, kept)
    with small_store(model) as store:
        first = TieredCache.restore(store, prefix)
        logits(model, prefix, first)
        first.save()
        cache = TieredCache.restore(store, torch.cat([prefix, rest], dim=1))
    assert cache.restored_tokens == 96
    for ours, theirs in zip(kept_by(cache), kept_by(kept), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(logits(model, rest, cache), logits(model, rest, kept))


def test_turns_of_a_conversation_restore_what_the_turn_before_saved(one_of_a_kind: Any) -> None:
    tokens = random_tokens(40, seed=5)
    saved = 0
    with small_store(one_of_a_kind) as store:
        for turn in range(3):
            cache = TieredCache.restore(store, tokens)
            assert cache.restored_tokens == whole_pages(saved)
            output = generate(one_of_a_kind, tokens, cache)
            assert torch.equal(output, generate(one_of_a_kind, tokens))
            cache.save(output)
            saved = output.shape[1] - 1  # the last token has no K and V yet
            tokens = torch.cat([output, random_tokens(23, seed=10 + turn)], dim=1)


def test_one_cache_serves_several_turns_and_saves_each(llama: Any) -> None:
    prompt = random_tokens(40, seed=5)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache)
        assert cache.save(output) == 3
        longer = torch.cat([output, random_tokens(23, seed=6)], dim=1)
        output = generate(llama, longer, cache)
        assert torch.equal(output, generate(llama, longer))
        assert cache.save(output) == 5 - 3
        assert cache.save(output) == 0


def test_prefix_comes_back_from_disk_after_the_store_was_reopened(
    one_of_a_kind: Any, tmp_path: Path
) -> None:
    prompt = random_tokens(70, seed=7)
    with small_store(one_of_a_kind, tmp_path) as store:
        output = converse(one_of_a_kind, store, prompt)
    longer = torch.cat([output, random_tokens(9, seed=8)], dim=1)
    with small_store(one_of_a_kind, tmp_path) as store:
        cache = TieredCache.restore(store, longer)
        assert cache.restored_tokens == whole_pages(85)
        assert cache.restored_by_tier == {"disk": whole_pages(85)}
        assert torch.equal(generate(one_of_a_kind, longer, cache), generate(one_of_a_kind, longer))


@pytest.mark.parametrize("hbm_pages", [1, 3])
def test_prefix_longer_than_hbm_goes_out_and_comes_back_in_pieces(
    one_of_a_kind: Any, hbm_pages: int
) -> None:
    prompt = random_tokens(150, seed=9)
    with small_store(one_of_a_kind, hbm_pages=hbm_pages) as store:
        output = converse(one_of_a_kind, store, prompt)
        longer = torch.cat([output, random_tokens(9, seed=8)], dim=1)
        cache = TieredCache.restore(store, longer)
        assert cache.restored_tokens == whole_pages(165)
        assert sum(cache.restored_by_tier.values()) == cache.restored_tokens
        assert torch.equal(generate(one_of_a_kind, longer, cache), generate(one_of_a_kind, longer))


def test_nothing_stored_makes_an_ordinary_cache(one_of_a_kind: Any) -> None:
    prompt = random_tokens(40, seed=11)
    with small_store(one_of_a_kind) as store:
        cache = TieredCache.restore(store, prompt)
        assert (cache.restored_tokens, cache.restored_by_tier) == (0, {})
        assert torch.equal(generate(one_of_a_kind, prompt, cache), generate(one_of_a_kind, prompt))


def test_prompts_that_diverge_share_only_their_common_pages(one_of_a_kind: Any) -> None:
    common = random_tokens(50, seed=12)
    with small_store(one_of_a_kind) as store:
        converse(one_of_a_kind, store, torch.cat([common, random_tokens(40, seed=13)], dim=1))
        other = torch.cat([common, random_tokens(40, seed=14)], dim=1)
        cache = TieredCache.restore(store, other)
        assert cache.restored_tokens == 48
        assert torch.equal(generate(one_of_a_kind, other, cache), generate(one_of_a_kind, other))


def test_last_token_of_a_prompt_is_never_restored(llama: Any) -> None:
    prompt = random_tokens(3 * PAGE_TOKENS, seed=15)
    with small_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        assert cache.restored_tokens == 2 * PAGE_TOKENS
        assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))
        assert TieredCache.restore(store, prompt[:, :1]).restored_tokens == 0


def test_page_that_is_not_full_is_not_stored(llama: Any) -> None:
    with small_store(llama) as store:
        prompt = random_tokens(PAGE_TOKENS - 2, seed=16)
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache, max_new_tokens=2)
        assert output.shape[1] == PAGE_TOKENS  # but K and V of one token less
        assert cache.save(output) == 0
        output = generate(llama, output, cache, max_new_tokens=1)
        assert cache.save(output) == 1


def test_damaged_disk_page_ends_the_prefix_and_outputs_stay_right(
    llama: Any, tmp_path: Path
) -> None:
    prompt = random_tokens(150, seed=17)
    with small_store(llama, tmp_path) as store:
        converse(llama, store, prompt)
    flip_a_byte_of_page(llama, tmp_path, prompt, page=5)
    with small_store(llama, tmp_path) as store:
        cache = TieredCache.restore(store, prompt)
        assert cache.restored_tokens == 5 * PAGE_TOKENS
        assert store.stats().checksums_failed == 1
        output = generate(llama, prompt, cache)
        assert torch.equal(output, generate(llama, prompt))
        assert cache.save(output) > 0  # what was lost is stored again
        assert TieredCache.restore(store, prompt).restored_tokens == whole_pages(149)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_stored_kv_that_is_a_little_wrong_gives_other_logits(model: Any, side: str) -> None:
    """The control of all tests here: without it, equal logits would say nothing about the KV.

    Memory carries no checksums, so the pages can be changed there without being missed.
    """
    prompt = random_tokens(100, seed=17)
    with small_store(model) as store:
        converse(model, store, prompt)
        keys = store.keys(prompt[0, :-1])
        with store.get(keys) as load:
            assert load.wait() == 6
            cut = layer_shapes(store.layout)[0]
            for layer in store.hbm.layers:
                page = layer[load.slots[5]].view(torch.float32)
                at = cut.heads * PAGE_TOKENS * cut.key_dim
                wrong = page[:at] if side == "keys" else page[at:]
                wrong += 0.1 * wrong.std() * torch.randn(wrong.shape)
        cache = TieredCache.restore(store, prompt)
        assert cache.restored_tokens == 96
        difference = logits(model, prompt[:, 96:], cache) - logits(model, prompt)[:, 96:]
        assert difference.abs().max() > 1e-3  # a hundred times what the other tests allow


def flip_a_byte_of_page(model: Any, directory: Path, prompt: torch.Tensor, page: int) -> None:
    """Damage a page on disk: find it by the K bytes that recomputing gives for its first head."""
    cache = transformers.DynamicCache()
    logits(model, prompt, cache)
    tokens = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
    pattern = cache.layers[0].keys[0, 0, tokens].contiguous().numpy().tobytes()
    found = 0
    for path in (p for p in directory.rglob("*") if p.is_file()):
        content = bytearray(path.read_bytes())
        at = content.find(pattern)
        if at >= 0:
            content[at + 100] ^= 0xFF
            path.write_bytes(content)
            found += 1
    assert found == 1


def test_save_without_tokens_stores_the_prompt_only(llama: Any) -> None:
    prompt = random_tokens(40, seed=18)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        assert cache.save() == 0  # nothing computed yet
        output = generate(llama, prompt, cache, max_new_tokens=40)
        assert cache.save() == 2
        assert cache.save(output) == 2
        assert cache.save() == 0


def then_raise(error: BaseException, done: torch.Tensor) -> None:
    raise error


def test_cache_as_a_context_saves_its_prompt_on_exit(llama: Any) -> None:
    prompt = random_tokens(50, seed=18)
    with small_store(llama) as store:
        with TieredCache.restore(store, prompt) as cache:
            generate(llama, prompt, cache)
        assert store.match(store.keys(prompt[0])).pages == 3
        longer = torch.cat([prompt, random_tokens(40, seed=19)], dim=1)
        with pytest.raises(KeyboardInterrupt), TieredCache.restore(store, longer) as cache:
            then_raise(KeyboardInterrupt(), logits(llama, longer[:, 48:], cache))
        assert store.match(store.keys(longer[0])).pages == 5


def test_error_in_a_context_is_not_hidden_by_one_of_saving(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise TieredKVError("the bus is gone")

    prompt = random_tokens(50, seed=18)
    with small_store(llama) as store:
        monkeypatch.setattr(store, "put", broken)
        with pytest.raises(RuntimeError, match="mine"), TieredCache.restore(store, prompt) as cache:
            then_raise(RuntimeError("mine"), generate(llama, prompt, cache))
        assert "could not be saved" in caplog.text
        with (
            pytest.raises(TieredKVError, match="bus"),
            TieredCache.restore(store, prompt) as cache,
        ):
            generate(llama, prompt, cache)


def test_token_ids_may_be_a_list_an_array_or_a_tensor(llama: Any) -> None:
    prompt = random_tokens(40, seed=19)
    with small_store(llama) as store:
        output = converse(llama, store, prompt)
        for same in (output, output[0], output[0].tolist(), output.numpy(), output[0].numpy()):
            cache = TieredCache.restore(store, same)
            assert cache.restored_tokens == 48
            assert cache.save(same[:48] if isinstance(same, list) else same[..., :48]) == 0


def test_save_refuses_tokens_that_contradict_the_cache(llama: Any) -> None:
    prompt = random_tokens(40, seed=20)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache)
        other = output.clone()
        other[0, 7] = (other[0, 7] + 1) % VOCABULARY
        with pytest.raises(ValueError, match="differs at token 7 "):
            cache.save(other)
        with pytest.raises(ValueError, match="differs at token 0 "):
            cache.save(output[:, 40:])  # only the reply
        with pytest.raises(ValueError, match="has 57 tokens, the cache holds only 55"):
            cache.save(torch.cat([output, output[:, :1]], dim=1))
        with pytest.raises(ValueError, match="has 2 sequences, this cache was restored for 1"):
            cache.save(output.repeat(2, 1))
        assert store.match(store.keys(output[0])).pages == 0


def test_pages_that_find_no_room_are_not_stored_and_nothing_fails(llama: Any) -> None:
    prompt = random_tokens(150, seed=21)
    with small_store(llama, hbm_pages=2, host_pages=4) as store:
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache)
        assert 0 < cache.save(output) <= 10
        again = TieredCache.restore(store, prompt)
        assert again.restored_tokens < whole_pages(149)
        assert torch.equal(generate(llama, prompt, again), output)


def test_salts_and_adapters_do_not_share_pages(llama: Any) -> None:
    prompt = random_tokens(40, seed=22)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt, salt="a", lora="x")
        cache.save(generate(llama, prompt, cache))
        assert TieredCache.restore(store, prompt, salt="a", lora="x").restored_tokens == 32
        assert TieredCache.restore(store, prompt, salt="b", lora="x").restored_tokens == 0
        assert TieredCache.restore(store, prompt, salt="a").restored_tokens == 0


@pytest.mark.skipif(
    not hasattr(transformers.Cache, "activate_past_recording"), reason="transformers before 5.15"
)
def test_assisted_decoding_is_refused_before_anything_is_computed(llama: Any) -> None:
    prompt = random_tokens(30, seed=23).repeat(1, 3)
    with small_store(llama) as store, Passes(llama) as passes:
        cache = TieredCache.restore(store, prompt)
        with pytest.raises(ConfigError, match="assisted decoding recomputes") as info:
            generate(llama, prompt, cache, prompt_lookup_num_tokens=3, eos_token_id=0)
        assert "\n" not in str(info.value)
        assert passes.columns == []


def test_searches_that_move_rows_of_a_cache_are_refused(llama: Any) -> None:
    with small_store(llama) as store:
        cache = TieredCache.restore(store, random_tokens(40, seed=23))
        refused = pytest.raises(ConfigError, match="takes greedy search and sampling alone")
        with refused:
            cache.reorder_cache(torch.tensor([0]))
        with refused:
            cache.batch_repeat_interleave(2)
        with refused:
            cache.batch_select_indices(torch.tensor([0]))


def test_prompt_computed_again_behind_its_restored_prefix_is_refused(llama: Any) -> None:
    """Assisted decoding in transformers 5.24 feeds the whole prompt, whatever the cache holds.

    With a filled cache, a plain DynamicCache too, its output silently differs from greedy search.
    """
    prompt = random_tokens(30, seed=23).repeat(1, 3)
    with small_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        with pytest.raises(ValueError, match=r"computes 90 tokens, 10 are left .* behind 80"):
            logits(llama, prompt, cache)
        cache = TieredCache.restore(store, prompt)
        with pytest.raises(ValueError, match="computes 11 tokens, 10 are left of the prompt"):
            generate(llama, torch.cat([prompt, prompt[:, :1]], dim=1), cache)
        cache = TieredCache.restore(store, prompt)
        logits(llama, prompt[:, 80:86], cache)  # in chunks, too
        with pytest.raises(ValueError, match=r"computes 6 tokens, 4 are left .* behind 86"):
            logits(llama, prompt[:, 80:86], cache)


def test_cache_filled_with_gradients_is_saved_like_any_other(llama: Any) -> None:
    prompt = random_tokens(50, seed=24)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        llama(prompt[:, :40], **{CACHE_ARGUMENT: cache}).logits.sum().backward()
        logits(llama, prompt[:, 40:], cache)
        assert cache.save() == 3
        assert torch.equal(converse(llama, store, prompt), generate(llama, prompt))


def test_cache_filled_in_inference_mode_can_be_continued_outside(llama: Any) -> None:
    prompt = random_tokens(50, seed=25)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        with torch.inference_mode():
            llama(prompt[:, :40], **{CACHE_ARGUMENT: cache})
        assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))
        assert cache.save() == 3


def test_generation_past_the_room_of_a_layer_keeps_the_prefix(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_layer, "GROWTH_TOKENS", 5)
    prompt = random_tokens(33, seed=26)
    with small_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache, max_new_tokens=40)
        assert torch.equal(output, generate(llama, prompt, max_new_tokens=40))
        assert cache.save(output) == 72 // PAGE_TOKENS - 48 // PAGE_TOKENS


def test_reset_empties_the_cache(llama: Any) -> None:
    prompt = random_tokens(40, seed=27)
    with small_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2}])
def test_more_sequences_than_were_restored_are_refused(llama: Any, options: dict[str, int]) -> None:
    prompt = random_tokens(40, seed=28)
    with small_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        options = {"do_sample": "num_beams" not in options, **options}
        with pytest.raises(ValueError, match=r"sequences, this cache was restored for 1: .*beams"):
            generate(llama, prompt, cache, **options)
        assert cache.get_seq_length() == 0
        assert cache.save() == 0
        with pytest.raises(ValueError, match="token_ids is empty"):
            TieredCache.restore(store, [])


def test_model_that_does_not_fit_the_layout_is_refused(llama: Any) -> None:
    prompt = random_tokens(40, seed=29)
    with small_store(llama) as store:
        with pytest.raises(LayoutMismatchError, match="layer 0 of the model makes 2 heads of 32"):
            generate(shared_model("qwen3"), prompt, TieredCache.restore(store, prompt))
        deeper = build_model("llama", num_hidden_layers=3)
        with pytest.raises(LayoutMismatchError, match="the model has a layer 2"):
            generate(deeper, prompt, TieredCache.restore(store, prompt))
        shallower = build_model("llama", num_hidden_layers=1)
        cache = TieredCache.restore(store, prompt)
        generate(shallower, prompt, cache)
        with pytest.raises(ValueError, match="the layers hold different numbers of tokens"):
            cache.save()


def test_layout_without_heads_is_refused() -> None:
    layout = KVLayout.uniform(4096, PAGE_TOKENS)
    config = StoreConfig.parse(hbm=8192, host="1MiB", device="cpu")
    refused = pytest.raises(LayoutMismatchError, match=r"make it with layout_for\(model\)")
    with TieredStore.open(layout, config) as store, refused:
        TieredCache.restore(store, [1, 2, 3])


UNSUPPORTED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "encoder-decoder": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        "encoder-decoder",
    ),
    "state-space": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1},
        "(not K and V of every token|filled 0 of 1 layers)",  # transformers 5.24, 5.0
    ),
    "positions of columns": (
        "BartForCausalLM",
        "BartConfig",
        {
            "vocab_size": 8,
            "d_model": 8,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "decoder_ffn_dim": 8,
            "forced_eos_token_id": None,
        },
        "its K and V change with the padding",
    ),
    "dynamic-rope": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**SIZES, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "rope_type dynamic",
    ),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_models_with_another_kind_of_cache_are_refused_in_one_line(kind: str) -> None:
    model_class, config_class, settings, reason = UNSUPPORTED[kind]
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config)
    with pytest.raises(ConfigError, match=f"TieredCache does not support this .*{reason}") as info:
        layout_for(model)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3"])
def test_layout_is_that_of_the_config_where_the_two_agree(kind: str) -> None:
    model = shared_model(kind)
    layout = layout_for(model, PAGE_TOKENS)
    config = model.config.to_dict()
    assert layout == KVLayout.from_model_config(config, PAGE_TOKENS, dtype="float32")
    assert layout_for(model).page_tokens == 64


def test_layout_of_a_latent_cache_has_what_transformers_keeps() -> None:
    model = shared_model("deepseek_v3")
    cache = transformers.DynamicCache()
    logits(model, random_tokens(1, seed=1), cache)
    kept = sum(side.nbytes for side in kept_by(cache))
    assert layout_for(model, PAGE_TOKENS).token_bytes == kept


def test_fingerprint_is_that_of_the_weights(llama: Any, tmp_path: Path) -> None:
    fingerprint = model_fingerprint(llama)
    assert fingerprint == model_fingerprint(build_model("llama"))
    assert fingerprint != model_fingerprint(build_model("llama", seed=8))
    assert fingerprint != model_fingerprint(build_model("llama", rms_norm_eps=1e-5))
    llama.save_pretrained(tmp_path)
    assert fingerprint == model_fingerprint(type(llama).from_pretrained(tmp_path))
    tuned = build_model("llama")
    with torch.no_grad():
        tuned.model.layers[1].mlp.down_proj.weight.add_(1e-3)
    assert fingerprint != model_fingerprint(tuned)


def test_models_with_other_weights_never_share_pages(llama: Any, tmp_path: Path) -> None:
    prompt = random_tokens(40, seed=30)
    with small_store(llama, tmp_path) as store:
        converse(llama, store, prompt)
    other = build_model("llama", seed=8)
    with small_store(other, tmp_path) as store:
        assert TieredCache.restore(store, prompt).restored_tokens == 0
        assert torch.equal(converse(other, store, prompt), generate(other, prompt))


def test_every_public_name_can_be_imported() -> None:
    assert all(hasattr(huggingface, name) for name in huggingface.__all__)
