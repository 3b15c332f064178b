"""Page content that follows from its key."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.keys import PageKey
from tiered_kv.replay.content import DerivedContent


def key(number: int) -> PageKey:
    """A page key like any other."""
    return PageKey(hashlib.sha256(number.to_bytes(8, "little")).digest())


@pytest.mark.parametrize("page_bytes", [1, 31, 32, 4096, 65536, 65537])
def test_content_is_as_long_as_a_page_and_repeats(page_bytes: int) -> None:
    one = DerivedContent(page_bytes).of(key(1)).copy()
    assert one.nbytes == page_bytes
    assert np.array_equal(one, DerivedContent(page_bytes).of(key(1)))


@given(st.integers(0, 2**32), st.integers(0, 2**32))
def test_two_pages_differ_in_every_word(first: int, second: int) -> None:
    content = DerivedContent(4096)
    one = content.of(key(first)).copy().view(np.uint64)
    two = content.of(key(second)).view(np.uint64)
    assert (one == two).all() if first == second else (one != two).all()


def test_no_word_repeats_within_a_page() -> None:
    """Bytes that were shifted, or taken from another layer, must be seen."""
    words = DerivedContent(65536).of(key(3)).view(np.uint64)
    assert len(np.unique(words)) == len(words)


def test_content_does_not_change_from_release_to_release() -> None:
    """A disk written by an older release is verified by a newer one."""
    digest = hashlib.sha256(DerivedContent(65536).of(key(7)).tobytes()).hexdigest()
    assert digest == "d4ee8122c0ae056aaa14c3172362376b00db7e49a6676154109c296f440b4297"
