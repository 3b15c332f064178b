"""Slab: aligned, zeroed host memory with one owner."""

from __future__ import annotations

import pytest
import torch

from tiered_kv.errors import CapacityError
from tiered_kv.storage.slab import ALIGNMENT, Slab, align_up


@pytest.mark.parametrize(("n", "aligned"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_align_up_goes_to_the_next_multiple(n: int, aligned: int) -> None:
    assert align_up(n) == aligned


def test_align_up_takes_any_alignment() -> None:
    assert align_up(10, 8) == 16
    assert align_up(16, 8) == 16


@pytest.mark.parametrize("n_bytes", [1, 4096, 100_000, (64 << 20) + 5])
def test_a_slab_is_aligned_zeroed_and_at_least_as_long_as_asked(n_bytes: int) -> None:
    slab = Slab(n_bytes)
    assert slab.n_bytes == slab.array.nbytes == align_up(n_bytes)
    assert slab.array.ctypes.data % ALIGNMENT == 0
    assert not slab.array[-4096:].any()
    assert not slab.array[::4096].any()
    slab.close()


def test_a_slab_can_be_written_through_its_tensor() -> None:
    slab = Slab(8192)
    tensor = slab.tensor()
    assert tensor.dtype == torch.uint8
    tensor[5000] = 7
    assert slab.array[5000] == 7


def test_memory_that_is_not_to_be_had_is_a_capacity_error() -> None:
    with pytest.raises(CapacityError, match="no 4,611,686,018,427,387,904 bytes of host memory"):
        Slab(1 << 62)


def test_an_unpinned_slab_says_so() -> None:
    assert not Slab(4096).is_pinned


def test_close_twice_is_harmless() -> None:
    slab = Slab(4096)
    slab.close()
    slab.close()
    assert slab.array.nbytes == 0


def test_a_view_that_outlives_the_slab_can_still_be_read() -> None:
    """A reader that holds a view while the store closes must not crash the process."""
    slab = Slab(4096)
    view = slab.array[:100]
    view[:] = 3
    slab.close()
    assert view.sum() == 300
