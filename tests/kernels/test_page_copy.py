"""page_copy: the fast path against the reference, over shapes even and odd."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tiered_kv.kernels.page_copy import reference
from tiered_kv.kernels.page_copy.api import Run, gather_pages, scatter_pages
from tiered_kv.kernels.page_copy.rows import Bytes

# One entry a run: (layers, bytes a layer).
SHAPES = {
    "one-layer": ((1, 64),),
    "L4-B4096": ((4, 4096),),
    "odd-L3-B1001": ((3, 1001),),
    "one-byte-layers": ((5, 1),),
    "three-runs": ((2, 128), (1, 7), (3, 33)),
    "layers-of-nothing": ((2, 64), (3, 0), (1, 64)),
}
PAGES = 7

shapes = pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))


def random_bytes(*size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def runs_of(shape: Sequence[tuple[int, int]], seed: int = 0) -> list[Run]:
    """A pool of random bytes cut into runs."""
    runs, first, offset = [], 0, 0
    for number, (layers, n_bytes) in enumerate(shape):
        pool = torch.from_numpy(random_bytes(layers, PAGES, n_bytes, seed=seed + number))
        runs.append(Run(first, offset, pool))
        first, offset = first + layers, offset + layers * n_bytes
    return runs


def page_bytes_of(shape: Sequence[tuple[int, int]]) -> int:
    return sum(layers * n_bytes for layers, n_bytes in shape)


def by_reference(runs: Sequence[Run], slot: int) -> bytes:
    parts = []
    for run in runs:
        part = torch.empty(run.pool.shape[0] * run.pool.shape[2], dtype=torch.uint8)
        reference.gather_run(run.pool, slot, part)
        parts.append(part.numpy().tobytes())
    return b"".join(parts)


@shapes
def test_gather_gives_what_the_reference_gives(shape: tuple[tuple[int, int], ...]) -> None:
    runs, slots = runs_of(shape), [5, 0, 3]
    into = [np.zeros(page_bytes_of(shape), dtype=np.uint8) for _ in slots]
    gather_pages(runs, slots, into)
    assert [page.tobytes() for page in into] == [by_reference(runs, slot) for slot in slots]


@shapes
def test_scatter_gives_what_the_reference_gives(shape: tuple[tuple[int, int], ...]) -> None:
    slots, n_bytes = [6, 2], page_bytes_of(shape)
    pages = [random_bytes(n_bytes, seed=9 + at) for at in range(2)]
    ours, theirs = runs_of(shape), runs_of(shape)
    scatter_pages(ours, slots, pages, 0, sum(layers for layers, _ in shape))
    for run in theirs:
        end = run.page_offset + run.pool.shape[0] * run.pool.shape[2]
        parts = [torch.from_numpy(page[run.page_offset : end]) for page in pages]
        reference.scatter_run(run.pool, slots, parts)
    for our, their in zip(ours, theirs, strict=True):
        assert torch.equal(our.pool, their.pool)


@shapes
def test_gather_after_scatter_gives_the_pages_back(shape: tuple[tuple[int, int], ...]) -> None:
    runs, slots, n_bytes = runs_of(shape), [4, 1, 0], page_bytes_of(shape)
    pages = [random_bytes(n_bytes, seed=at) for at in range(3)]
    scatter_pages(runs, slots, pages, 0, sum(layers for layers, _ in shape))
    into = [np.zeros(n_bytes, dtype=np.uint8) for _ in slots]
    gather_pages(runs, slots, into)
    for page, found in zip(pages, into, strict=True):
        assert np.array_equal(page, found)


@shapes
def test_scatter_leaves_other_slots_alone(shape: tuple[tuple[int, int], ...]) -> None:
    runs, before = runs_of(shape), runs_of(shape)
    pages = [random_bytes(page_bytes_of(shape), seed=3)]
    scatter_pages(runs, [2], pages, 0, sum(layers for layers, _ in shape))
    others = [slot for slot in range(PAGES) if slot != 2]
    for run, old in zip(runs, before, strict=True):
        assert torch.equal(run.pool[:, others], old.pool[:, others])


def test_scatter_of_some_layers_leaves_the_others_alone() -> None:
    shape = SHAPES["three-runs"]
    sizes = [n_bytes for layers, n_bytes in shape for _ in range(layers)]
    page = random_bytes(page_bytes_of(shape), seed=5)
    for first in range(len(sizes)):
        for last in range(first, len(sizes) + 1):
            runs = runs_of(shape)
            expected = bytearray(by_reference(runs, 3))
            low, high = sum(sizes[:first]), sum(sizes[:last])
            expected[low:high] = page[low:high].tobytes()
            scatter_pages(runs, [3], [page], first, last)
            assert by_reference(runs, 3) == bytes(expected), (first, last)


def test_a_page_may_be_longer_than_the_runs() -> None:
    """A host slot is padded to a block; what lies behind the page is neither read nor written."""
    runs = runs_of(SHAPES["odd-L3-B1001"])
    wide = np.full(4096, 0xEE, dtype=np.uint8)
    gather_pages(runs, [1], [wide])
    assert wide[:3003].tobytes() == by_reference(runs, 1)
    assert set(wide[3003:].tolist()) == {0xEE}


def test_a_page_may_start_anywhere_in_memory() -> None:
    runs = runs_of(SHAPES["odd-L3-B1001"])
    room = np.zeros(3003 + 5, dtype=np.uint8)
    gather_pages(runs, [1], [room[5:]])
    assert room[5:].tobytes() == by_reference(runs, 1)


def test_a_page_that_is_too_short_is_refused_before_anything_is_written() -> None:
    runs, before = runs_of(SHAPES["three-runs"]), runs_of(SHAPES["three-runs"])
    short = [random_bytes(362), random_bytes(361)]
    with pytest.raises(ValueError, match="a page of 361 bytes where 362 are needed"):
        scatter_pages(runs, [0, 1], short, 0, 6)
    with pytest.raises(ValueError, match="a page of 361 bytes where 362 are needed"):
        gather_pages(runs, [0, 1], short)
    for run, old in zip(runs, before, strict=True):
        assert torch.equal(run.pool, old.pool)


def test_slots_and_pages_must_be_one_to_one() -> None:
    runs = runs_of(SHAPES["one-layer"])
    with pytest.raises(ValueError, match="2 slots and 1 pages"):
        gather_pages(runs, [0, 1], [random_bytes(64)])
    with pytest.raises(ValueError, match="1 slots and 2 pages"):
        scatter_pages(runs, [0], [random_bytes(64), random_bytes(64)], 0, 1)


def test_nothing_to_copy_is_harmless() -> None:
    runs = runs_of(SHAPES["one-layer"])
    gather_pages(runs, [], [])
    scatter_pages(runs, [], [], 0, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@shapes
def test_a_pool_on_a_gpu_gives_and_takes_the_same_bytes(
    shape: tuple[tuple[int, int], ...],
) -> None:
    runs = [run._replace(pool=run.pool.cuda()) for run in runs_of(shape)]
    slots, n_bytes = [4, 1, 0], page_bytes_of(shape)
    pages = [random_bytes(n_bytes, seed=at) for at in range(3)]
    scatter_pages(runs, slots, pages, 0, sum(layers for layers, _ in shape))
    into = [np.zeros(n_bytes, dtype=np.uint8) for _ in slots]
    gather_pages(runs, slots, into)
    torch.cuda.synchronize()
    for page, found in zip(pages, into, strict=True):
        assert np.array_equal(page, found)
