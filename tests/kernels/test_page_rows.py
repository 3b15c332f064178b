"""page_copy in batches: rows of one matrix against pages one by one, however both lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.kernels.page_copy import cpu
from tiered_kv.kernels.page_copy.api import Run, gather_pages, scatter_pages
from tiered_kv.kernels.page_copy.rows import Bytes, Rows, selected, shapes_of

PAGES = 24


def random_bytes(*size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def pool_of(layers: int, layer_bytes: int, gap: int, seed: int) -> torch.Tensor:
    """A pool of random bytes, `gap` bytes between one page of a layer and the next."""
    whole = torch.from_numpy(random_bytes(layers, PAGES, layer_bytes + gap, seed=seed))
    return whole[:, :, :layer_bytes]


def runs_of(shape: Sequence[tuple[int, int, int]]) -> tuple[list[Run], int]:
    runs, first, offset = [], 0, 0
    for number, (layers, layer_bytes, gap) in enumerate(shape):
        runs.append(Run(first, offset, pool_of(layers, layer_bytes, gap, seed=number)))
        first, offset = first + layers, offset + layers * layer_bytes
    return runs, offset


shapes = st.sampled_from(
    [
        ((4, 16, 0),),
        ((1, 33, 0),),
        ((3, 1001, 0),),
        ((4, 16, 5),),
        ((2, 128, 0), (1, 7, 3), (3, 33, 0)),
        ((2, 64, 0), (3, 0, 0), (1, 64, 0)),
    ]
)
limits = st.sampled_from([1, 200, 5000, 1 << 30])  # so that small pages take every way


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Slots of the pool and rows of the matrix, one to one: in stretches, apart, in any order."""
    count = draw(st.integers(0, PAGES))

    def places() -> list[int]:
        if draw(st.booleans()):
            return draw(st.permutations(range(PAGES)))[:count]
        first = draw(st.integers(0, PAGES - count))
        numbers = list(range(first, first + count))
        return numbers[::-1] if draw(st.booleans()) else numbers

    return places(), places()


@settings(deadline=None)
@given(shapes, batches(), st.integers(0, 9), limits, limits, limits)
def test_a_batch_moves_what_pages_one_by_one_move(
    shape: tuple[tuple[int, int, int], ...],
    batch: tuple[list[int], list[int]],
    padding: int,
    stretch: int,
    buffer: int,
    long: int,
) -> None:
    slots, numbers = batch
    runs, page_bytes = runs_of(shape)
    matrix = random_bytes(PAGES, page_bytes + padding, seed=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_STRETCH_BYTES", stretch)
        patch.setattr(cpu, "_BUFFER_BYTES", buffer)
        patch.setattr(cpu, "_LONG_BYTES", long)
        expected = matrix.copy()
        gather_pages(runs, slots, [expected[number] for number in numbers])
        found = matrix.copy()
        gather_pages(runs, slots, Rows(found, numbers))
        assert np.array_equal(found, expected)
        layers = sum(layers for layers, _, _ in shape)
        for first in range(layers + 1):
            ours, theirs = runs_of(shape)[0], runs_of(shape)[0]
            scatter_pages(ours, slots, Rows(matrix, numbers), first, layers)
            scatter_pages(theirs, slots, [matrix[number] for number in numbers], first, layers)
            for our, their in zip(ours, theirs, strict=True):
                assert torch.equal(our.pool, their.pool)


def test_rows_are_views_of_the_matrix_in_the_order_given() -> None:
    matrix = random_bytes(5, 8)
    rows = Rows(matrix, [4, 0, 3])
    assert [row.tobytes() for row in rows] == [matrix[at].tobytes() for at in (4, 0, 3)]
    assert [row.tobytes() for row in rows[1:]] == [matrix[at].tobytes() for at in (0, 3)]
    assert [row.tobytes() for row in rows.select([2, 0])] == [matrix[at].tobytes() for at in (3, 4)]
    assert isinstance(selected(rows, [2]), Rows)
    assert isinstance(selected(list(rows), [2]), list)
    for pages in (rows, list(rows)):
        assert [row.tobytes() for row in selected(pages, [2])] == [matrix[3].tobytes()]
        assert shapes_of(pages) == {matrix.shape[1:]}
    rows[1][:] = 9
    assert matrix[0].tolist() == [9] * 8


@pytest.mark.parametrize("wrong", [-1, 5])
def test_a_row_or_a_slot_out_of_range_is_refused_before_anything_moves(wrong: int) -> None:
    """numpy's batch copies clip such a number: page 5 of 5 would silently be page 4."""
    matrix = random_bytes(5, 64)
    with pytest.raises(IndexError, match=rf"{wrong} is outside 0\.\.4"):
        Rows(matrix, [0, wrong])
    run = Run(0, 0, torch.from_numpy(random_bytes(4, 5, 16)))
    before = matrix.copy()
    with pytest.raises(IndexError, match=rf"{wrong} is outside 0\.\.4"):
        gather_pages([run], [0, wrong], Rows(matrix, [0, 1]))
    with pytest.raises(IndexError, match=rf"{wrong} is outside 0\.\.4"):
        scatter_pages([run], [0, wrong], Rows(matrix, [0, 1]), 0, 4)
    assert np.array_equal(matrix, before)


def test_rows_too_short_for_the_runs_are_refused() -> None:
    run = Run(0, 0, torch.from_numpy(random_bytes(4, 5, 16)))
    with pytest.raises(ValueError, match="a page of 63 bytes where 64 are needed"):
        gather_pages([run], [0], Rows(random_bytes(5, 63), [0]))
