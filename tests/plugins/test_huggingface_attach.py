"""attach: `generate` that restores and saves by itself, and a model left as it was."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from huggingface_rig import (  # noqa: E402
    MODELS,
    PAGE_TOKENS,
    Passes,
    build_model,
    on_one_thread,
    padded,
    random_tokens,
    shared_model,
    small_store,
    whole_pages,
)
from store_rig import settle  # noqa: E402

from tiered_kv.config import StoreConfig  # noqa: E402
from tiered_kv.errors import ConfigError, StoreClosedError, TieredKVError  # noqa: E402
from tiered_kv.plugins.huggingface import (  # noqa: E402
    CACHE_ARGUMENT,
    attach,
    layout_for,
    model_fingerprint,
    open_store,
)
from tiered_kv.plugins.huggingface_restore import Restore  # noqa: E402
from tiered_kv.store import TieredStore  # noqa: E402

PROMPT = random_tokens(70, seed=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture
def llama() -> Any:
    return shared_model("llama")


class Collected:
    """A streamer that keeps what it is given, and may break off."""

    def __init__(self, stop_after: int | None = None, error: BaseException | None = None) -> None:
        self.values: list[torch.Tensor] = []
        self.has_ended = False
        self._stop_after = stop_after
        self._error = error

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value)
        if self._error is not None and len(self.values) == self._stop_after:
            raise self._error

    def end(self) -> None:
        self.has_ended = True

    @property
    def tokens(self) -> torch.Tensor:
        return torch.cat([value.reshape(-1) for value in self.values])


def reply(model: Any, prompt: torch.Tensor, **options: Any) -> torch.Tensor:
    """`generate`, with nothing of ours in the call."""
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    if prompt.shape[0] == 1:  # a reply may hold the pad token: no padding is to be guessed
        options.setdefault("attention_mask", torch.ones_like(prompt))
    output: torch.Tensor = model.generate(prompt, **options)
    return output


@pytest.mark.parametrize("name", sorted(MODELS))
def test_turns_of_an_attached_model_equal_plain_generate_and_compute_what_is_new(name: str) -> None:
    model = shared_model(name)
    prompts = [PROMPT]
    for turn in range(2):
        output = reply(model, prompts[-1])
        prompts.append(torch.cat([output, random_tokens(20, seed=turn)], dim=1))
    plain = [reply(model, prompt) for prompt in prompts]
    known = 0
    with small_store(model) as store, attach(model, store) as attached:
        for prompt, expected in zip(prompts, plain, strict=True):
            with Passes(model) as passes:
                assert torch.equal(reply(model, prompt), expected)
            assert attached.last is not None
            assert attached.last.restored_tokens == known
            assert passes.columns[0] == (1, prompt.shape[1] - known)  # restored means not computed
            known = whole_pages(expected.shape[1] - 1)
            assert attached.last.saved_pages * PAGE_TOKENS == known - attached.last.restored_tokens


def test_a_batch_of_an_attached_model_is_restored_and_saved_by_row(llama: Any) -> None:
    ids, mask = padded([PROMPT, random_tokens(50, seed=2)])
    ends = int(reply(llama, ids, attention_mask=mask)[1, -14])
    options = {"attention_mask": mask, "eos_token_id": ends}
    expected = reply(llama, ids, **options)
    assert (expected[1, -13:] == 0).all()  # padding behind a row that ended
    with small_store(llama) as store, attach(llama, store) as attached:
        assert torch.equal(reply(llama, ids, **options), expected)
        assert attached.last is not None and attached.last.prompt_tokens == 120
        row = expected[1, 20:]
        assert store.match(store.keys(row)).tokens == whole_pages(53)
        assert torch.equal(reply(llama, ids, **options), expected)
        assert attached.last.restored_by_row == (64, 44)
        again = reply(llama, ids, eos_token_id=ends)  # the mask is guessed as transformers does
        assert torch.equal(again, expected)
        assert attached.last.restored_by_row == (64, 44)


def test_end_token_that_is_the_pad_token_is_saved_once(llama: Any) -> None:
    ids, mask = padded([PROMPT, random_tokens(61, seed=2)])
    ends = int(reply(llama, ids, attention_mask=mask)[1, -14])
    options = {"attention_mask": mask, "eos_token_id": ends, "pad_token_id": ends}
    with small_store(llama) as store, attach(llama, store):
        output = reply(llama, ids, max_new_tokens=40, **options)
        row = output[1, 9:]
        assert (row[61 + 2 :] == ends).sum() >= 2
        assert store.match(store.keys(row)).tokens == whole_pages(64)


def test_streamed_tokens_are_those_returned_and_are_saved(llama: Any) -> None:
    expected = reply(llama, PROMPT)
    with small_store(llama) as store, attach(llama, store) as attached:
        for known in (0, 64):
            streamer = Collected()
            output = reply(llama, PROMPT, streamer=streamer)
            assert torch.equal(output, expected)
            assert torch.equal(streamer.tokens, output[0])
            assert streamer.has_ended
            assert attached.last is not None and attached.last.restored_tokens == known
        assert store.match(store.keys(output[0])).tokens == whole_pages(85)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the client has gone")])
def test_a_call_that_is_broken_off_saves_what_it_has_and_the_model_is_detached(
    llama: Any, error: BaseException
) -> None:
    expected = reply(llama, PROMPT, max_new_tokens=40)
    with small_store(llama) as store:
        streamer = Collected(stop_after=1 + 30, error=error)
        with pytest.raises(type(error)), attach(llama, store):
            reply(llama, PROMPT, max_new_tokens=40, streamer=streamer)
        assert "generate" not in vars(llama)
        assert store.match(store.keys(expected[0])).tokens == whole_pages(70 + 29)
        output = reply(llama, PROMPT, max_new_tokens=40)
        assert torch.equal(output, expected)


def test_a_call_that_dies_in_its_first_pass_saves_nothing_and_leaves_no_lease(llama: Any) -> None:
    def die(*args: Any) -> None:
        raise RuntimeError("out of memory")

    longer = torch.cat([PROMPT, random_tokens(40, seed=3)], dim=1)
    expected = reply(llama, longer)
    with small_store(llama) as store, attach(llama, store):
        reply(llama, PROMPT)
        hook = llama.model.layers[0].register_forward_hook(die)
        try:
            with pytest.raises(RuntimeError, match="out of memory"):
                reply(llama, longer)
        finally:
            hook.remove()
        assert store.match(store.keys(longer[0])).pages == 4
        settle(store)
        slots = store.hbm.allocate(store.hbm.capacity_pages)
        assert slots is not None
        store.hbm.release(slots)
        assert torch.equal(reply(llama, longer), expected)


def test_the_model_is_what_it_was_whatever_happens() -> None:
    model = build_model("llama")
    before = dict(vars(model))
    with small_store(model) as store:
        with attach(model, store) as attached:
            assert model.generate.attachment is attached
            kept = model.generate
        assert vars(model) == before
        attached.detach()
        assert torch.equal(kept(PROMPT, max_new_tokens=3), model.generate(PROMPT, max_new_tokens=3))
        assert attached.last is None  # a detached model's generate is its own
        with pytest.raises(ConfigError, match="the model is no longer attached"):
            kept(PROMPT, session=store.session("user-42"))
        model.generate = own = lambda *args, **kwargs: "mine"
        with attach(model, store):
            assert model.generate is not own
        assert model.generate is own
        with attach(model, store):
            model.generate = other = lambda *args, **kwargs: "theirs"
        assert model.generate is other  # not ours to remove


def test_attaching_twice_or_to_another_models_store_is_refused(llama: Any, tmp_path: Path) -> None:
    with small_store(llama) as store:
        with attach(llama, store), pytest.raises(ConfigError, match="attached already"):
            attach(llama, store).__enter__()
        other = build_model("llama", seed=8)
        with pytest.raises(ConfigError, match="another model's pages would be taken") as info:
            attach(other, store).__enter__()
        assert "\n" not in str(info.value)
        assert "generate" not in vars(other)
    config = StoreConfig.parse(hbm="1MiB", host="1MiB", device="cpu", model_name="mine")
    with pytest.raises(ConfigError, match="open_store names the model by its weights"):
        open_store(llama, config)
    layout = layout_for(build_model("llama", num_hidden_layers=3), PAGE_TOKENS)
    named = StoreConfig.parse(
        hbm="1MiB", host="1MiB", device="cpu", model_name=model_fingerprint(llama)
    )
    with (
        TieredStore.open(layout, named) as store,
        pytest.raises(ConfigError, match=r"open it with open_store\(model, config\)"),
    ):
        attach(llama, store).__enter__()


REFUSED: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several replies": {"num_return_sequences": 2, "do_sample": True},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "assisted decoding": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
    "a loop of one's own": {"custom_generate": lambda model, input_ids, **kwargs: input_ids},
    "another cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "healed tokens": {"token_healing": True},
    "embeddings": {"inputs_embeds": torch.zeros(1, 3, 64)},
    "positions": {"position_ids": torch.arange(70)[None]},
    "images": {"pixel_values": torch.zeros(1, 3, 8, 8)},
    "token types": {"token_type_ids": torch.ones(1, 70)},
    "a mask with a hole": {"attention_mask": torch.tensor([[1] * 30 + [0] + [1] * 39])},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_cache_cannot_serve_is_refused_in_one_line_before_anything_is_computed(
    llama: Any, what: str
) -> None:
    with small_store(llama) as store, attach(llama, store) as attached, Passes(llama) as passes:
        with pytest.raises(ConfigError, match=r"^generate\(") as info:
            reply(llama, PROMPT, **REFUSED[what])
        assert "\n" not in str(info.value)
        assert passes.columns == []
        assert attached.last is None
        assert store.stats().missed_pages == 0


def test_settings_of_the_model_itself_are_looked_at_too() -> None:
    model = build_model("llama")
    model.generation_config.num_beams = 3
    with small_store(model) as store, attach(model, store):
        with pytest.raises(ConfigError, match="num_beams=3"):
            reply(model, PROMPT)
        config = transformers.GenerationConfig(num_beams=2)
        with pytest.raises(ConfigError, match="num_beams=2"):
            model.generate(PROMPT, config)
        assert torch.equal(reply(model, PROMPT, num_beams=1), reply(shared_model("llama"), PROMPT))


def test_prompts_whose_padding_cannot_be_told_are_refused(llama: Any) -> None:
    ids, _ = padded([PROMPT, random_tokens(50, seed=2)])
    with small_store(llama) as store, attach(llama, store):
        with pytest.raises(ConfigError, match="needs attention_mask"):
            reply(llama, ids, eos_token_id=0)
        hole = PROMPT.clone()
        hole[0, 7] = 0
        with pytest.raises(ConfigError, match="wherever the pad token stands is taken for padding"):
            llama.generate(hole)
        output = reply(llama, hole)
        assert store.match(store.keys(output[0])).pages == 5
        with pytest.raises(ConfigError, match="no input_ids"):
            llama.generate(max_new_tokens=3)


def test_inputs_may_come_as_a_tokenizer_gives_them(llama: Any) -> None:
    expected = reply(llama, PROMPT)
    given = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    options = {"max_new_tokens": 16, "do_sample": False}
    with small_store(llama) as store, attach(llama, store) as attached:
        assert torch.equal(llama.generate(**given, **options), expected)
        config = transformers.GenerationConfig(**options, return_dict_in_generate=True)
        output = llama.generate(PROMPT, config)
        assert torch.equal(output.sequences, expected)
        assert attached.last is not None and attached.last.restored_tokens == 64


def test_prompts_in_chunks_are_restored_where_transformers_can(llama: Any) -> None:
    """Before 5.24 it computes the whole prompt on top of a filled cache, and other tokens."""
    expected = reply(llama, PROMPT)
    with small_store(llama) as store, attach(llama, store):
        reply(llama, PROMPT)
        if CACHE_ARGUMENT == "cache":
            assert torch.equal(reply(llama, PROMPT, prefill_chunk_size=3), expected)
        else:
            with pytest.raises(ConfigError, match="a newer one"):
                reply(llama, PROMPT, prefill_chunk_size=3)


def test_calls_in_inference_mode_and_with_gradients_are_served(llama: Any) -> None:
    expected = reply(llama, PROMPT)
    with small_store(llama) as store, attach(llama, store) as attached:
        for mode in (torch.inference_mode(), torch.enable_grad(), torch.inference_mode()):
            with mode:
                assert torch.equal(reply(llama, PROMPT), expected)
        assert attached.last is not None and attached.last.restored_tokens == 64


def test_sampling_draws_the_same_tokens(llama: Any) -> None:
    options = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 20}
    torch.manual_seed(3)
    expected = reply(llama, PROMPT, **options)
    with small_store(llama) as store, attach(llama, store):
        for _ in range(2):
            torch.manual_seed(3)
            assert torch.equal(reply(llama, PROMPT, **options), expected)


def test_a_cache_of_the_callers_own_is_left_alone(llama: Any) -> None:
    with small_store(llama) as store, attach(llama, store) as attached:
        own = transformers.DynamicCache()
        output = reply(llama, PROMPT, **{CACHE_ARGUMENT: own})
        assert own.get_seq_length() == 85
        assert attached.last is None
        assert store.match(store.keys(output[0])).pages == 0


def test_calls_from_several_threads_do_not_meet(llama: Any) -> None:
    prompts = [torch.cat([PROMPT, random_tokens(9 + n, seed=n)], dim=1) for n in range(4)]
    expected = [reply(llama, prompt) for prompt in prompts]
    found: dict[tuple[int, int], torch.Tensor] = {}

    def ask(turn: int, n: int) -> None:
        found[turn, n] = reply(llama, prompts[n])

    with small_store(llama) as store, attach(llama, store):
        for turn in range(3):
            threads = [threading.Thread(target=ask, args=(turn, n)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert len(found) == 12
    assert all(torch.equal(output, expected[n]) for (_, n), output in found.items())


def test_salt_and_adapter_of_an_attachment_enter_the_keys(llama: Any) -> None:
    with small_store(llama) as store:
        with attach(llama, store, salt="a", lora="x"):
            output = reply(llama, PROMPT)
        assert store.match(store.keys(output[0], salt="a", lora="x")).pages == 5
        assert store.match(store.keys(output[0])).pages == 0
        with attach(llama, store, salt="b", lora="x") as attached:
            reply(llama, PROMPT)
            assert attached.last is not None and attached.last.restored_tokens == 0


def test_late_pages_make_one_more_attempt_and_a_streamer_sees_one_answer(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reply(llama, PROMPT)

    def late(self: Restore, index: int, pieces: Any) -> None:
        if index == 1:
            raise TieredKVError("not before the deadline")

    with small_store(llama) as store, attach(llama, store) as attached:
        reply(llama, PROMPT)
        monkeypatch.setattr(Restore, "_copy_layer", late)
        streamer = Collected()
        with caplog.at_level(logging.WARNING):
            output = reply(llama, PROMPT, streamer=streamer)
        assert torch.equal(output, expected)
        assert torch.equal(streamer.tokens, expected[0])
        assert "generating once more" in caplog.text
        assert attached.last is not None and attached.last.restored_tokens == 64


def test_a_store_that_fails_costs_the_reuse_but_not_the_answer(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = reply(llama, PROMPT)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise TieredKVError("a copy broke: the bus is gone")

    with small_store(llama) as store, attach(llama, store) as attached:
        with monkeypatch.context() as patch:
            patch.setattr(store, "put", broken)
            assert torch.equal(reply(llama, PROMPT), expected)
        assert "could not be saved" in caplog.text
        assert attached.last is not None and attached.last.saved_pages == 0
        reply(llama, PROMPT)
        with monkeypatch.context() as patch:
            patch.setattr(store, "get", broken)
            assert torch.equal(reply(llama, PROMPT), expected)
        assert "nothing restored" in caplog.text
        assert torch.equal(reply(llama, PROMPT), expected)


def test_a_store_closed_too_early_is_said_so(llama: Any) -> None:
    store = small_store(llama)
    with attach(llama, store):
        store.close()
        with pytest.raises(StoreClosedError, match="the store is closed"):
            reply(llama, PROMPT)


def test_pages_saved_by_an_attached_model_survive_a_restart(llama: Any, tmp_path: Path) -> None:
    with small_store(llama, tmp_path) as store, attach(llama, store):
        output = reply(llama, PROMPT)
    longer = torch.cat([output, random_tokens(9, seed=8)], dim=1)
    expected = reply(llama, longer)
    with small_store(llama, tmp_path) as store, attach(llama, store) as attached:
        assert torch.equal(reply(llama, longer), expected)
        assert attached.last is not None
        assert attached.last.restored_by_tier == {"disk": whole_pages(85)}
