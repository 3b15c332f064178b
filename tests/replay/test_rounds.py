"""Prompts longer than HBM."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.replay.engines.rounds import PromptKeys, load_in_rounds, store_in_rounds
from tiered_kv.replay.requests import Request, as_ids


def chain(pages: int) -> KeyChain:
    """Keys 0, 1, ..., as a prompt's."""
    return KeyChain(PageKey(bytes([page])) for page in range(pages))


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 7))
def test_loading_asks_for_what_is_left_until_nothing_comes(
    pages: int, stored: int, hbm: int
) -> None:
    asked: list[int] = []

    def get(keys: KeyChain) -> list[str]:
        first = keys[0][0] if len(keys) else 0
        asked.extend(key[0] for key in keys)
        return ["disk"] * min(hbm, len(keys), max(0, min(stored, pages) - first))

    def stored_pages(keys: KeyChain) -> int:
        return sum(key[0] < stored for key in keys)

    tiers = load_in_rounds(chain(pages), hbm, stored_pages, get)
    assert tiers == ["disk"] * min(pages, stored)
    assert asked == list(range(pages)), "every page is asked for once"


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 16), st.integers(0, 16))
def test_storing_puts_every_page_once_if_any_room_is_left(
    pages: int, first: int, hbm: int, room: int
) -> None:
    put: list[int] = []

    def put_batch(keys: KeyChain) -> bool:
        if len(keys) > room:
            return False
        put.extend(key[0] for key in keys)
        return True

    store_in_rounds(chain(pages), min(first, pages), hbm, put_batch)
    assert put == (list(range(min(first, pages), pages)) if room else [])


def request(ids: list[int], reply_tokens: int = 5, reply: list[int] | None = None) -> Request:
    """A request with these ids."""
    known = None if reply is None else as_ids(reply)
    return Request(0, 0, 0.0, as_ids(ids), len(ids), reply_tokens, known)


def test_blocks_are_pages_and_tokens_are_grouped() -> None:
    assert len(PromptKeys("x", 1, 512).of_prompt(request([1, 2, 3]))) == 3
    assert len(PromptKeys("x", 2, 2).of_prompt(request([1, 2, 3]))) == 1


def test_an_answer_is_stored_but_for_its_last_token() -> None:
    """The last token of an answer has been drawn, not computed: there is no KV of it."""
    keys = PromptKeys("x", 2, 2)
    asked = request([1, 2, 3])
    prompt = keys.of_prompt(asked)
    assert len(keys.of_answered(asked, prompt, as_ids([4, 5]))) == 2
    assert len(keys.of_answered(asked, prompt, as_ids([4]))) == 1
    assert keys.of_answered(asked, prompt, as_ids([])) is prompt
    blocks = PromptKeys("x", 1, 512)
    assert len(blocks.of_answered(asked, blocks.of_prompt(asked), as_ids([4, 5]))) == 3


def test_a_made_up_answer_follows_from_the_prompt() -> None:
    keys = PromptKeys("x", 2, 2)
    one, again = keys.reply(request([1, 2])), keys.reply(request([1, 2]))
    assert np.array_equal(one, again) and len(one) == 5
    assert not np.array_equal(one, keys.reply(request([1, 3])))
    assert keys.reply(request([1, 2], reply=[9])).tolist() == [9]


def test_a_partly_filled_last_page_counts_its_own_tokens() -> None:
    keys = PromptKeys("x", 1, 512)
    tokens = keys.tokens_by_tier(["hbm", "disk", "host"], 1100)
    assert tokens == {"hbm": 512, "disk": 512, "host": 76}
