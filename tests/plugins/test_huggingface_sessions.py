"""Sessions with an attached model: a turn needs only what is new of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from huggingface_rig import (
    Passes,
    on_one_thread,
    random_tokens,
    shared_model,
    small_store,
    whole_pages,
)

from tiered_kv.errors import ConfigError, TierIOError
from tiered_kv.plugins.huggingface import CACHE_ARGUMENT, TieredCache, attach
from tiered_kv.session import Session

OPTIONS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
SAID = [random_tokens(count, seed=count) for count in (60, 25, 31)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture
def llama() -> Any:
    return shared_model("llama")


def without_a_store(model: Any, turns: list[torch.Tensor]) -> list[torch.Tensor]:
    """What plain generate makes of a conversation, turn by turn."""
    conversation, outputs = torch.zeros((1, 0), dtype=torch.long), []
    for said in turns:
        prompt = torch.cat([conversation, said], dim=1)
        conversation = model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS)
        outputs.append(conversation)
    return outputs


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3", "llama"])
def test_turns_of_a_session_need_only_new_tokens_and_equal_the_whole_conversation(
    name: str,
) -> None:
    model = shared_model(name)
    expected = without_a_store(model, SAID)
    with small_store(model) as store, attach(model, store) as attached:
        known = 0
        for said, whole in zip(SAID, expected, strict=True):
            session = store.session("user-42")
            with Passes(model) as passes:
                output = model.generate(said, session=session, **OPTIONS)
            assert torch.equal(output, whole)
            assert session.tokens.tolist() == whole[0].tolist()
            assert attached.last is not None and attached.last.restored_tokens == known
            assert passes.columns[0] == (1, whole.shape[1] - 16 - known)
            known = whole_pages(whole.shape[1] - 1)


def test_a_session_goes_on_after_a_restart(llama: Any, tmp_path: Path) -> None:
    expected = without_a_store(llama, SAID)
    for said, whole in zip(SAID, expected, strict=True):
        with small_store(llama, tmp_path) as store, attach(llama, store) as attached:
            session = store.session("user-42")
            assert torch.equal(llama.generate(said, session=session, **OPTIONS), whole)
            assert attached.last is not None
            restored = whole_pages(max(0, whole.shape[1] - said.shape[1] - 17))
            assert attached.last.restored_by_tier == ({"disk": restored} if restored else {})


def test_sessions_that_begin_alike_share_pages_unless_salts_differ(llama: Any) -> None:
    with small_store(llama) as store, attach(llama, store) as attached:
        llama.generate(SAID[0], session=store.session("one"), **OPTIONS)
        llama.generate(SAID[0], session=store.session("two"), **OPTIONS)
        assert attached.last is not None and attached.last.restored_tokens == 48
        assert attached.last.saved_pages == 0
        llama.generate(SAID[0], session=store.session("one", salt="tenant"), **OPTIONS)
        assert attached.last.restored_tokens == 0


def test_a_session_works_with_a_cache_of_ones_own_too(llama: Any) -> None:
    """What attach does, spelled out."""
    expected = without_a_store(llama, SAID)
    with small_store(llama) as store:
        session = store.session("user-42", salt="tenant")
        for said, whole in zip(SAID, expected, strict=True):
            prompt = torch.from_numpy(session.prompt(said[0]).astype("int64"))[None]
            cache = TieredCache.restore(store, prompt, salt=session.salt, lora=session.lora)
            given = {"attention_mask": torch.ones_like(prompt), CACHE_ARGUMENT: cache}
            output = llama.generate(prompt, **given, **OPTIONS)
            cache.save(output)
            session.keep(output[0])
            assert torch.equal(output, whole)
        assert store.match(session.keys()).tokens == whole_pages(whole.shape[1] - 1)


def test_a_turn_that_was_broken_off_is_not_part_of_the_conversation(llama: Any) -> None:
    class BreaksOff:
        count = 0

        def put(self, value: torch.Tensor) -> None:
            self.count += 1
            if self.count == 9:
                raise KeyboardInterrupt

        def end(self) -> None:
            raise AssertionError("not reached")

    expected = without_a_store(llama, SAID[:2])
    with small_store(llama) as store, attach(llama, store) as attached:
        session = store.session("user-42")
        llama.generate(SAID[0], session=session, **OPTIONS)
        with pytest.raises(KeyboardInterrupt):
            llama.generate(SAID[1], session=session, streamer=BreaksOff(), **OPTIONS)
        assert store.session("user-42").tokens.tolist() == expected[0][0].tolist()
        again = llama.generate(SAID[1], session=session, **OPTIONS)
        assert torch.equal(again, expected[1])
        assert attached.last is not None  # but what it had computed is reused
        assert attached.last.restored_tokens == whole_pages(76 + 25 - 1)


def test_an_evicted_session_is_computed_again_and_nothing_is_lost(llama: Any) -> None:
    expected = without_a_store(llama, SAID)
    with small_store(llama, hbm_pages=4, host_pages=8) as store, attach(llama, store) as attached:
        for turn, said in enumerate(SAID):
            output = llama.generate(said, session=store.session("user-42"), **OPTIONS)
            assert torch.equal(output, expected[turn])
            noise = random_tokens(150, seed=100 + turn)
            llama.generate(noise, attention_mask=torch.ones_like(noise), max_new_tokens=2)
            assert attached.last is not None
        assert store.match(store.session("user-42").keys()).tokens < output.shape[1] - 16


def test_new_tokens_may_be_a_list_or_one_dimension(llama: Any) -> None:
    (expected,) = without_a_store(llama, SAID[:1])
    with small_store(llama) as store, attach(llama, store):
        for at, said in enumerate((SAID[0], SAID[0][0], SAID[0][0].tolist())):
            output = llama.generate(said, session=store.session(str(at)), **OPTIONS)
            assert torch.equal(output, expected)
        given = {"input_ids": SAID[0], "attention_mask": torch.ones_like(SAID[0])}
        output = llama.generate(**given, session=store.session("tokenizer"), **OPTIONS)
        assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": SAID[0].repeat(2, 1)}, "with 2 rows: a session is one conversation"),
        ({"attention_mask": torch.tensor([[0] + [1] * 59])}, "new tokens without padding"),
        ({"salt": "b"}, "has salt='b', lora='', the model was attached with salt='a'"),
        ({"lora": "x"}, "they must be the same"),
        ({"num_beams": 2}, "greedy search and sampling alone"),
        ({"inputs": torch.zeros((1, 0), dtype=torch.long)}, "needs at least one token"),
    ],
)
def test_what_does_not_fit_a_session_is_refused_in_one_line(
    llama: Any, arguments: dict[str, Any], message: str
) -> None:
    names = {"salt": "a", "lora": ""}
    names |= {key: arguments[key] for key in names if key in arguments}
    call = {"inputs": SAID[0], **OPTIONS, **{k: v for k, v in arguments.items() if k not in names}}
    with (
        small_store(llama) as store,
        attach(llama, store, salt="a"),
        Passes(llama) as passes,
        pytest.raises(ConfigError, match=message) as info,
    ):
        llama.generate(**call, session=store.session("user-42", **names))
    assert "\n" not in str(info.value)
    assert passes.columns == []


def test_an_answer_that_cannot_be_kept_is_an_error_and_the_session_what_it_was(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silence here would make the next turn one of a conversation that lacks this one."""

    def full(self: Session, token_ids: Any) -> None:
        raise TierIOError("writing a transcript failed: no space left", tier="disk", errno=28)

    with small_store(llama) as store, attach(llama, store):
        session = store.session("user-42")
        llama.generate(SAID[0], session=session, **OPTIONS)
        before = session.tokens.tolist()
        with monkeypatch.context() as patch:
            patch.setattr(Session, "keep", full)
            with pytest.raises(TierIOError, match="no space left"):
                llama.generate(SAID[1], session=session, **OPTIONS)
        assert session.tokens.tolist() == store.session("user-42").tokens.tolist() == before
