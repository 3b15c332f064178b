"""Keys: the same in every process and for ever, and different wherever KV would differ."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import subprocess
import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.keys import (
    KEY_BYTES,
    KeyChain,
    Multimodal,
    Namespace,
    PageKey,
    as_token_array,
    page_keys,
)

PLAIN = Namespace("model", "layout")


def hexes(keys: KeyChain) -> list[str]:
    return [key.hex() for key in keys]


def named(*names: int) -> list[PageKey]:
    return [PageKey(bytes([name]) * KEY_BYTES) for name in names]


# -- for ever --------------------------------------------------------------------------------------


def test_the_golden_keys_of_a_plain_prompt() -> None:
    """A store on disk is only worth something while these never change."""
    namespace = Namespace("m", "l")
    assert namespace.root().hex() == (
        "dad2807ca769643d4f287fe0151f62b271e44f035504de847996e73bcde03c07"
    )
    assert hexes(page_keys(list(range(10)), 4, namespace)) == [
        "24fad8d734245541e6ec3d18ee9d0b0e6a5800338c20bc0f8ae6f5d6abb474b9",
        "3cd2866d1e3f22897ea7ff72cbe163035fa99c8f7d2845e2c9e28a090bf760bb",
    ]


def test_the_golden_root_of_a_tenant_with_an_adapter() -> None:
    namespace = Namespace("Qwen3-32B", "layout", salt="tenant", lora="adapter")
    assert namespace.root().hex() == (
        "f70efa63f62d910c6317637826eaebd95542f55c784bfb636f9a9891c4a8fceb"
    )


def test_the_golden_keys_of_a_salted_prompt_with_an_image() -> None:
    keys = page_keys(
        list(range(10)),
        4,
        Namespace("m", "l", salt="t"),
        multimodal=[Multimodal(3, 2, b"cat")],
    )
    assert hexes(keys) == [
        "e424acdf29b097e8994b0c5d6424f030979d8701e3dd39840b2e5a1c0eeaf033",
        "e6fc689c9a72b695916dbc3338ad164fdb948e0974bb4e77aa95948814b15c81",
    ]


def test_keys_are_what_the_documented_formula_gives() -> None:
    """Written out once more with struct and hashlib, so that no slip is in both."""

    def field(tag: bytes, value: bytes) -> bytes:
        return tag + struct.pack("<Q", len(value)) + value

    preimage = b"".join(
        field(tag, value)
        for tag, value in zip(
            (b"v", b"m", b"g", b"s", b"l"),
            (b"tiered-kv/1", b"model", b"layout", b"salt", b"lora"),
            strict=True,
        )
    )
    parent = hashlib.sha256(preimage).digest()
    tokens = [7, 0, 2**32 - 1, 65_536, 1, 2]
    expected = []
    for at in (0, 3):
        parent = hashlib.sha256(parent + struct.pack("<3I", *tokens[at : at + 3])).digest()
        expected.append(parent.hex())
    assert hexes(page_keys(tokens, 3, Namespace("model", "layout", "salt", "lora"))) == expected


def test_processes_with_different_hash_seeds_make_the_same_keys() -> None:
    """LMCache #1139, #2136, #1739: a seed from PYTHONHASHSEED gave 0 % hits between processes."""
    program = (
        "from tiered_kv.keys import *\n"
        "n = Namespace('model', 'layout', salt='tenant', lora='adapter')\n"
        "images = [Multimodal(5, 9, b'cat'), Multimodal(20, 1, b'dog')]\n"
        "keys = page_keys(list(range(1000, 1064)), 8, n, multimodal=images)\n"
        "print(*(key.hex() for key in keys))\n"
    )
    here = " ".join(
        hexes(
            page_keys(
                list(range(1000, 1064)),
                8,
                Namespace("model", "layout", salt="tenant", lora="adapter"),
                multimodal=[Multimodal(5, 9, b"cat"), Multimodal(20, 1, b"dog")],
            )
        )
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("0", "1", "4242", "random")
    ]
    answers = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert answers == [here] * 4


# -- what a prompt may be --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "as_given",
    [
        list,
        tuple,
        np.array,
        lambda ids: np.array(ids, dtype=np.int32),
        lambda ids: np.array(ids, dtype=np.uint16),
        lambda ids: np.array(ids, dtype=">u4"),
        lambda ids: np.array(ids + ids)[::-1][len(ids) :][::-1],
        lambda ids: np.repeat(np.array(ids), 2)[::2],
        lambda ids: [np.int64(token) for token in ids],
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32),
        lambda ids: torch.tensor(ids).float().requires_grad_().long(),
    ],
    ids=[
        "list",
        "tuple",
        "int64",
        "int32",
        "uint16",
        "big-endian",
        "reversed-view",
        "strided",
        "list-of-numpy",
        "torch",
        "torch-int32",
        "torch-after-autograd",
    ],
)
def test_the_same_ids_make_the_same_keys_in_whatever_they_come(as_given: Any) -> None:
    ids = [5, 1, 60_000, 0, 9, 9, 2, 3]
    assert page_keys(as_given(ids), 4, PLAIN) == page_keys([5, 1, 60_000, 0, 9, 9, 2, 3], 4, PLAIN)


def test_a_tail_shorter_than_a_page_has_no_key() -> None:
    for tokens, pages in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2)):
        assert len(page_keys(list(range(tokens)), 4, PLAIN)) == pages


@pytest.mark.parametrize("empty", [[], (), np.array([]), torch.tensor([])])
def test_an_empty_prompt_has_no_keys_and_no_parent(empty: Any) -> None:
    keys = page_keys(empty, 4, PLAIN)
    assert len(keys) == 0
    assert keys.parent is None


def test_ids_up_to_32_bits_are_told_apart() -> None:
    ids = [0, 1, 255, 256, 65_535, 65_536, 2**31, 2**32 - 1]
    assert len({page_keys([token], 1, PLAIN)[0] for token in ids}) == len(ids)


def test_the_array_of_ids_is_little_endian_and_what_was_given_is_left_alone() -> None:
    given = np.array([1, 2], dtype=">i8")
    assert as_token_array(given).tobytes() == struct.pack("<2I", 1, 2)
    assert given.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([-1], r"must lie in \[0, 2\*\*32\), found -1"),
        ([0, 2**32], r"found 4294967296"),
        (np.array([3, -7]), r"found -7"),
        ([1.0], r"must be integers, not float64"),
        (np.array([1.5]), r"must be integers, not float64"),
        (torch.tensor([0.5]), r"must be integers, not float32"),
        (np.array([True]), r"must be integers, not bool"),
        (["a"], r"must be integers, not <U1"),
        ([2**70], r"must be integers, not object"),
        ([[1, 2], [3, 4]], r"one dimension, not shape \(2, 2\)"),
        (torch.zeros(1, 4, dtype=torch.long), r"one dimension, not shape \(1, 4\)"),
        (7, r"one dimension, not shape \(\)"),
    ],
)
def test_what_is_no_prompt_is_refused_with_what_was_found(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        page_keys(ids, 1, PLAIN)


@pytest.mark.parametrize("page_tokens", [0, -4])
def test_a_page_has_at_least_one_token(page_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"page_tokens must be at least 1, not {page_tokens}"):
        page_keys([1, 2], page_tokens, PLAIN)


# -- what must be told apart -----------------------------------------------------------------------


def test_a_key_is_32_bytes() -> None:
    assert {len(key) for key in page_keys(list(range(40)), 4, PLAIN)} == {32}


def test_an_equal_tail_after_a_different_head_has_different_keys() -> None:
    """aibrix #2329: a key that compares only the last block's tokens served another prompt's KV."""
    head, other, tail = [1, 2, 3, 4], [1, 2, 3, 5], [9, 9, 9, 9] * 3
    ours, theirs = page_keys(head + tail, 4, PLAIN), page_keys(other + tail, 4, PLAIN)
    assert not set(ours) & set(theirs)


def test_equal_pages_in_one_prompt_have_different_keys() -> None:
    keys = page_keys([7] * 40, 4, PLAIN)
    assert len(set(keys)) == 10


def test_an_equal_head_shares_exactly_the_keys_of_its_full_pages() -> None:
    head = list(range(10))
    ours = page_keys([*head, 1, 1, 1, 1, 1, 1], 4, PLAIN)
    theirs = page_keys([*head, 2, 2, 2, 2, 2, 2], 4, PLAIN)
    assert ours[:2] == theirs[:2]
    assert not set(ours[2:]) & set(theirs[2:])


def test_a_longer_prompt_begins_with_the_keys_of_the_shorter() -> None:
    ids = list(range(64))
    assert page_keys(ids, 4, PLAIN)[:9] == page_keys(ids[:37], 4, PLAIN)


def test_the_page_size_is_not_hidden_by_equal_bytes() -> None:
    """The first page of 8 tokens starts with the first page of 4, and is not it."""
    ids = list(range(16))
    assert not set(page_keys(ids, 4, PLAIN)) & set(page_keys(ids, 8, PLAIN))


def test_model_layout_salt_and_adapter_each_separate() -> None:
    spaces = [
        Namespace("a", "b"),
        Namespace("c", "b"),
        Namespace("a", "c"),
        Namespace("a", "b", salt="c"),
        Namespace("a", "b", lora="c"),
        Namespace("a", "b", salt="c", lora="c"),
    ]
    for one, other in combinations(spaces, 2):
        assert not set(page_keys([1] * 8, 4, one)) & set(page_keys([1] * 8, 4, other))


def test_a_name_cannot_move_from_one_field_into_another() -> None:
    """vllm #44701: an adapter's name and a tenant's salt shared one namespace."""
    spaces = [
        Namespace("m", "l", salt="ab", lora=""),
        Namespace("m", "l", salt="", lora="ab"),
        Namespace("m", "l", salt="a", lora="b"),
        Namespace("m", "la", salt="b"),
        Namespace("ml", "", salt="ab"),
        Namespace("m", "l", salt="a\0b"),
        Namespace("m", "l", salt="al\x01\0\0\0\0\0\0\0b"),  # looks like the next field
    ]
    assert len({space.root() for space in spaces}) == len(spaces)


def test_names_are_told_apart_beyond_ascii() -> None:
    roots = {Namespace("m", "l", salt=salt).root() for salt in ("\u00e9", "e\u0301", "e", "")}
    assert len(roots) == 4


def test_two_images_behind_the_same_placeholder_ids_have_different_keys() -> None:
    ids = [99] * 12
    cat, dog = (
        page_keys(ids, 4, PLAIN, multimodal=[Multimodal(4, 4, name)]) for name in (b"cat", b"dog")
    )
    assert cat[0] == dog[0] == page_keys(ids, 4, PLAIN)[0]
    assert not set(cat[1:]) & set(dog[1:])


def test_an_image_enters_every_page_it_touches() -> None:
    """Changed content must change the page where it begins even if it begins on its last token."""
    ids = [99] * 20
    plain = page_keys(ids, 4, PLAIN)
    for start, length, first in ((7, 1, 1), (7, 2, 1), (8, 1, 2), (0, 20, 0), (3, 10, 0)):
        with_image = page_keys(ids, 4, PLAIN, multimodal=[Multimodal(start, length, b"x")])
        assert hexes(with_image[:first]) == hexes(plain[:first])
        assert not set(with_image[first:]) & set(plain[first:])


def test_where_an_image_stands_in_a_page_matters() -> None:
    ids = [99] * 8
    places = [(0, 1), (1, 1), (0, 2), (1, 2), (2, 2), (3, 2)]
    keys = {page_keys(ids, 4, PLAIN, multimodal=[Multimodal(*at, b"x")])[0] for at in places}
    assert len(keys) == len(places)


def test_the_order_in_which_images_are_listed_does_not_matter() -> None:
    images = [Multimodal(1, 2, b"cat"), Multimodal(5, 3, b"dog"), Multimodal(1, 2, b"ant")]
    ids = [99] * 12
    assert page_keys(ids, 4, PLAIN, multimodal=images) == page_keys(
        ids, 4, PLAIN, multimodal=images[::-1]
    )


def test_two_images_in_a_page_are_not_one_that_looks_like_both() -> None:
    ids = [99] * 4
    both = page_keys(ids, 4, PLAIN, multimodal=[Multimodal(0, 1, b"a"), Multimodal(0, 1, b"b")])
    one = page_keys(ids, 4, PLAIN, multimodal=[Multimodal(0, 1, b"ab")])
    assert both != one


def test_an_image_beyond_the_last_full_page_changes_nothing() -> None:
    ids = [99] * 6
    assert page_keys(ids, 4, PLAIN, multimodal=[Multimodal(4, 2, b"x")]) == page_keys(ids, 4, PLAIN)


@pytest.mark.parametrize("item", [Multimodal(-1, 2, b"x"), Multimodal(0, 0, b"x")])
def test_an_image_that_stands_nowhere_is_refused(item: Multimodal) -> None:
    with pytest.raises(ValueError, match="start >= 0 and length >= 1"):
        page_keys([1] * 8, 4, PLAIN, multimodal=[item])


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    ours=st.lists(st.integers(0, 3), max_size=12),
    theirs=st.lists(st.integers(0, 3), max_size=12),
    page_tokens=st.integers(1, 4),
)
def test_two_prompts_share_a_key_exactly_where_their_prefixes_are_equal(
    ours: list[int], theirs: list[int], page_tokens: int
) -> None:
    left, right = (page_keys(ids, page_tokens, PLAIN) for ids in (ours, theirs))
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        end = (at + 1) * page_tokens
        assert (one == other) == (ours[:end] == theirs[:end])


# -- KeyChain --------------------------------------------------------------------------------------


def test_a_tail_of_a_chain_knows_what_it_hangs_from() -> None:
    chain = KeyChain(named(1, 2, 3, 4))
    assert chain.parent is None
    assert chain[2:].parent == chain[1]
    assert list(chain[2:]) == named(3, 4)
    assert chain[:2].parent is None
    assert chain[1:3].parent == chain[0]


def test_a_slice_of_a_slice_still_knows_its_parent() -> None:
    chain = KeyChain(named(1, 2, 3, 4, 5))
    assert chain[1:][1:] == chain[2:]
    assert chain[2:][0:2] == chain[2:4]
    assert chain[2:][0:0].parent == chain[1]


def test_an_empty_slice_at_the_end_hangs_from_the_last_key() -> None:
    chain = KeyChain(named(1, 2))
    assert len(chain[2:]) == 0
    assert chain[2:].parent == chain[1]
    assert chain[9:].parent == chain[1]


def test_negative_bounds_count_from_the_end() -> None:
    chain = KeyChain(named(1, 2, 3))
    assert chain[-1] == chain[2]
    assert chain[-2:] == chain[1:]
    assert chain[:-1] == chain[:2]


@pytest.mark.parametrize("step", [2, -1])
def test_a_chain_cannot_be_sliced_with_holes_or_backwards(step: int) -> None:
    with pytest.raises(ValueError, match="step 1"):
        KeyChain(named(1, 2, 3))[::step]


def test_chains_are_equal_when_keys_and_parent_are() -> None:
    one, other = KeyChain(named(2), named(1)[0]), KeyChain(named(2), None)
    assert one == KeyChain(named(1, 2))[1:]
    assert hash(one) == hash(KeyChain(named(1, 2))[1:])
    assert one != other
    assert one != named(2)


def test_a_chain_is_a_sequence() -> None:
    chain = KeyChain(named(1, 2, 3))
    assert list(chain) == named(1, 2, 3)
    assert named(2)[0] in chain
    assert chain.index(named(3)[0]) == 2
    with pytest.raises(IndexError):
        chain[3]


def test_a_chain_survives_pickling() -> None:
    chain = KeyChain(named(1, 2, 3))[1:]
    assert pickle.loads(pickle.dumps(chain)) == chain


def test_a_chain_shows_how_long_it_is_and_where_it_starts() -> None:
    assert repr(KeyChain(named(1, 2))) == "KeyChain(2 pages from 01010101)"
    assert repr(KeyChain([])) == "KeyChain(0 pages from -)"
