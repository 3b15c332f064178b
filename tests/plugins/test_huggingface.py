"""TieredCache against recomputation and against transformers' own cache, on tiny random models."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from tiered_kv.config import StoreConfig  # noqa: E402
from tiered_kv.errors import ConfigError, LayoutMismatchError  # noqa: E402
from tiered_kv.layout import KVLayout  # noqa: E402
from tiered_kv.plugins import huggingface, huggingface_layer  # noqa: E402
from tiered_kv.plugins.huggingface import (  # noqa: E402
    CACHE_ARGUMENT,
    TieredCache,
    layout_for,
    model_fingerprint,
)
from tiered_kv.store import TieredStore  # noqa: E402

transformers.logging.set_verbosity_error()

PAGE_TOKENS = 16
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
}
WINDOW = {"sliding_window": 24}  # much shorter than any context below
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOW),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
}


def build_model(name: str, seed: int = 7, **changes: Any) -> Any:
    model_class, config_class, extra = MODELS[name]
    config = getattr(transformers, config_class)(**{**SIZES, **extra, **changes})
    torch.manual_seed(seed)
    return getattr(transformers, model_class)(config).eval()


shared_model = functools.cache(build_model)


def open_store(
    model: Any, directory: Path | None = None, *, hbm_pages: int = 16, host_pages: int = 64
) -> TieredStore:
    layout = layout_for(model, PAGE_TOKENS)
    config = StoreConfig.parse(
        hbm=hbm_pages * layout.page_bytes,
        host=host_pages * layout.page_bytes,
        disk=directory,
        disk_size=None if directory is None else "64MiB",
        device="cpu",
        model_name=model_fingerprint(model),
    )
    return TieredStore.open(layout, config)


def random_tokens(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (1, count), generator=generator)


def generate(model: Any, prompt: torch.Tensor, cache: Any = None, **options: Any) -> torch.Tensor:
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    output: torch.Tensor = model.generate(prompt, **given, **options)
    return output


@torch.no_grad()
def logits(model: Any, tokens: torch.Tensor, cache: Any = None) -> torch.Tensor:
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    output: torch.Tensor = model(tokens, **given).logits
    return output


def converse(model: Any, store: TieredStore, prompt: torch.Tensor) -> torch.Tensor:
    """One turn: restore, generate, save all of it."""
    cache = TieredCache.restore(store, prompt)
    output = generate(model, prompt, cache)
    cache.save(output)
    return output


def kept_by(cache: Any) -> list[torch.Tensor]:
    return [side for layer in cache.layers for side in (layer.keys, layer.values)]


def whole_pages(tokens: int) -> int:
    return tokens // PAGE_TOKENS * PAGE_TOKENS


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small lose time on a second thread, and much of it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(name: str) -> Any:
    return shared_model(name)


@pytest.fixture
def llama() -> Any:
    return shared_model("llama")


def test_continuation_of_a_restored_prefix_equals_recomputing_it(model: Any) -> None:
    prefix, rest = random_tokens(100, seed=1), random_tokens(30, seed=2)
    prompt = torch.cat([prefix, rest], dim=1)
    with open_store(model) as store:
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
    with open_store(model) as store:
        first = TieredCache.restore(store, prefix)
        logits(model, prefix, first)
        first.save()
        cache = TieredCache.restore(store, torch.cat([prefix, rest], dim=1))
    assert cache.restored_tokens == 96
    for ours, theirs in zip(kept_by(cache), kept_by(kept), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(logits(model, rest, cache), logits(model, rest, kept))


def test_turns_of_a_conversation_restore_what_the_turn_before_saved(model: Any) -> None:
    tokens = random_tokens(40, seed=5)
    saved = 0
    with open_store(model) as store:
        for turn in range(3):
            cache = TieredCache.restore(store, tokens)
            assert cache.restored_tokens == whole_pages(saved)
            output = generate(model, tokens, cache)
            assert torch.equal(output, generate(model, tokens))
            cache.save(output)
            saved = output.shape[1] - 1  # the last token has no K and V yet
            tokens = torch.cat([output, random_tokens(23, seed=10 + turn)], dim=1)


def test_one_cache_serves_several_turns_and_saves_each(llama: Any) -> None:
    prompt = random_tokens(40, seed=5)
    with open_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache)
        assert cache.save(output) == 3
        longer = torch.cat([output, random_tokens(23, seed=6)], dim=1)
        output = generate(llama, longer, cache)
        assert torch.equal(output, generate(llama, longer))
        assert cache.save(output) == 5 - 3
        assert cache.save(output) == 0


def test_prefix_comes_back_from_disk_after_the_store_was_reopened(
    model: Any, tmp_path: Path
) -> None:
    prompt = random_tokens(70, seed=7)
    with open_store(model, tmp_path) as store:
        output = converse(model, store, prompt)
    longer = torch.cat([output, random_tokens(9, seed=8)], dim=1)
    with open_store(model, tmp_path) as store:
        cache = TieredCache.restore(store, longer)
        assert cache.restored_tokens == whole_pages(85)
        assert cache.restored_by_tier == {"disk": whole_pages(85)}
        assert torch.equal(generate(model, longer, cache), generate(model, longer))


@pytest.mark.parametrize("hbm_pages", [1, 3])
def test_prefix_longer_than_hbm_goes_out_and_comes_back_in_pieces(
    model: Any, hbm_pages: int
) -> None:
    prompt = random_tokens(150, seed=9)
    with open_store(model, hbm_pages=hbm_pages) as store:
        output = converse(model, store, prompt)
        longer = torch.cat([output, random_tokens(9, seed=8)], dim=1)
        cache = TieredCache.restore(store, longer)
        assert cache.restored_tokens == whole_pages(165)
        assert sum(cache.restored_by_tier.values()) == cache.restored_tokens
        assert torch.equal(generate(model, longer, cache), generate(model, longer))


def test_nothing_stored_makes_an_ordinary_cache(model: Any) -> None:
    prompt = random_tokens(40, seed=11)
    with open_store(model) as store:
        cache = TieredCache.restore(store, prompt)
        assert (cache.restored_tokens, cache.restored_by_tier) == (0, {})
        assert torch.equal(generate(model, prompt, cache), generate(model, prompt))


def test_prompts_that_diverge_share_only_their_common_pages(model: Any) -> None:
    common = random_tokens(50, seed=12)
    with open_store(model) as store:
        converse(model, store, torch.cat([common, random_tokens(40, seed=13)], dim=1))
        other = torch.cat([common, random_tokens(40, seed=14)], dim=1)
        cache = TieredCache.restore(store, other)
        assert cache.restored_tokens == 48
        assert torch.equal(generate(model, other, cache), generate(model, other))


def test_last_token_of_a_prompt_is_never_restored(llama: Any) -> None:
    prompt = random_tokens(3 * PAGE_TOKENS, seed=15)
    with open_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        assert cache.restored_tokens == 2 * PAGE_TOKENS
        assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))
        assert TieredCache.restore(store, prompt[:, :1]).restored_tokens == 0


def test_page_that_is_not_full_is_not_stored(llama: Any) -> None:
    with open_store(llama) as store:
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
    with open_store(llama, tmp_path) as store:
        converse(llama, store, prompt)
    flip_a_byte_of_page(llama, tmp_path, prompt, page=5)
    with open_store(llama, tmp_path) as store:
        cache = TieredCache.restore(store, prompt)
        assert cache.restored_tokens == 5 * PAGE_TOKENS
        assert store.stats().checksums_failed == 1
        output = generate(llama, prompt, cache)
        assert torch.equal(output, generate(llama, prompt))
        assert cache.save(output) > 0  # what was lost is stored again
        assert TieredCache.restore(store, prompt).restored_tokens == whole_pages(149)


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
    with open_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        assert cache.save() == 0  # nothing computed yet
        output = generate(llama, prompt, cache, max_new_tokens=40)
        assert cache.save() == 2
        assert cache.save(output) == 2
        assert cache.save() == 0


def test_token_ids_may_be_a_list_an_array_or_a_tensor(llama: Any) -> None:
    prompt = random_tokens(40, seed=19)
    with open_store(llama) as store:
        output = converse(llama, store, prompt)
        for same in (output, output[0], output[0].tolist(), output.numpy(), output[0].numpy()):
            cache = TieredCache.restore(store, same)
            assert cache.restored_tokens == 48
            assert cache.save(same[:48] if isinstance(same, list) else same[..., :48]) == 0


def test_save_refuses_tokens_that_contradict_the_cache(llama: Any) -> None:
    prompt = random_tokens(40, seed=20)
    with open_store(llama) as store:
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
        with pytest.raises(ValueError, match="one sequence, not a batch of 2"):
            cache.save(output.repeat(2, 1))
        assert store.match(store.keys(output[0])).pages == 0


def test_pages_that_find_no_room_are_not_stored_and_nothing_fails(llama: Any) -> None:
    prompt = random_tokens(150, seed=21)
    with open_store(llama, hbm_pages=2, host_pages=4) as store:
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache)
        assert 0 < cache.save(output) <= 10
        again = TieredCache.restore(store, prompt)
        assert again.restored_tokens < whole_pages(149)
        assert torch.equal(generate(llama, prompt, again), output)


def test_salts_and_adapters_do_not_share_pages(llama: Any) -> None:
    prompt = random_tokens(40, seed=22)
    with open_store(llama) as store:
        cache = TieredCache.restore(store, prompt, salt="a", lora="x")
        cache.save(generate(llama, prompt, cache))
        assert TieredCache.restore(store, prompt, salt="a", lora="x").restored_tokens == 32
        assert TieredCache.restore(store, prompt, salt="b", lora="x").restored_tokens == 0
        assert TieredCache.restore(store, prompt, salt="a").restored_tokens == 0


def test_assisted_decoding_crops_the_cache_it_fills(llama: Any) -> None:
    prompt = random_tokens(30, seed=23).repeat(1, 3)
    with open_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        options = {"max_new_tokens": 40, "eos_token_id": 0}  # 5.0 cannot do it without an end
        output = generate(llama, prompt, cache, prompt_lookup_num_tokens=3, **options)
        assert torch.equal(output, generate(llama, prompt, **options))
        cache.save(output)
        longer = torch.cat([output, prompt], dim=1)
        again = TieredCache.restore(store, longer)
        assert again.restored_tokens == whole_pages(output.shape[1] - 1)
        assert torch.equal(generate(llama, longer, again), generate(llama, longer))


def test_prompt_computed_again_behind_its_restored_prefix_is_refused(llama: Any) -> None:
    """Assisted decoding in transformers 5.24 feeds the whole prompt, whatever the cache holds.

    With a filled cache, a plain DynamicCache too, its output silently differs from greedy search.
    """
    prompt = random_tokens(30, seed=23).repeat(1, 3)
    with open_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        with pytest.raises(ValueError, match="computes 90 tokens, 10 are left of the prompt"):
            logits(llama, prompt, cache)
        cache = TieredCache.restore(store, prompt)
        with pytest.raises(ValueError, match="computes 11 tokens, 10 are left of the prompt"):
            generate(llama, torch.cat([prompt, prompt[:, :1]], dim=1), cache)


def test_cache_filled_with_gradients_is_saved_like_any_other(llama: Any) -> None:
    prompt = random_tokens(50, seed=24)
    with open_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        llama(prompt[:, :40], **{CACHE_ARGUMENT: cache}).logits.sum().backward()
        logits(llama, prompt[:, 40:], cache)
        assert cache.save() == 3
        assert torch.equal(converse(llama, store, prompt), generate(llama, prompt))


def test_cache_filled_in_inference_mode_can_be_continued_outside(llama: Any) -> None:
    prompt = random_tokens(50, seed=25)
    with open_store(llama) as store:
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
    with open_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        output = generate(llama, prompt, cache, max_new_tokens=40)
        assert torch.equal(output, generate(llama, prompt, max_new_tokens=40))
        assert cache.save(output) == 72 // PAGE_TOKENS - 48 // PAGE_TOKENS


def test_reset_empties_the_cache(llama: Any) -> None:
    prompt = random_tokens(40, seed=27)
    with open_store(llama) as store:
        converse(llama, store, prompt)
        cache = TieredCache.restore(store, prompt)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(generate(llama, prompt, cache), generate(llama, prompt))


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2}])
def test_more_than_one_sequence_is_refused(llama: Any, options: dict[str, int]) -> None:
    prompt = random_tokens(40, seed=28)
    with open_store(llama) as store:
        cache = TieredCache.restore(store, prompt)
        options = {"do_sample": "num_beams" not in options, **options}
        with pytest.raises(ValueError, match="one sequence, not a batch of"):
            generate(llama, prompt, cache, **options)
        with pytest.raises(ValueError, match="one sequence, not a batch of 2"):
            TieredCache.restore(store, prompt.repeat(2, 1))
        with pytest.raises(ValueError, match="token_ids is empty"):
            TieredCache.restore(store, [])


def test_model_that_does_not_fit_the_layout_is_refused(llama: Any) -> None:
    prompt = random_tokens(40, seed=29)
    with open_store(llama) as store:
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
    with open_store(llama, tmp_path) as store:
        converse(llama, store, prompt)
    other = build_model("llama", seed=8)
    with open_store(other, tmp_path) as store:
        assert TieredCache.restore(store, prompt).restored_tokens == 0
        assert torch.equal(converse(other, store, prompt), generate(other, prompt))


def test_every_public_name_can_be_imported() -> None:
    assert all(hasattr(huggingface, name) for name in huggingface.__all__)
