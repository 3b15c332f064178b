"""AttachedHbm over the memory orders that engines use, against plain torch indexing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.storage.attached import (
    NULL_BLOCK,
    AttachedHbm,
    AttachedLayer,
    pack_blocks,
    unpack_blocks,
)
from tiered_kv.storage.base import PageBuffer

BLOCKS = 7
Order = Literal["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
ORDERS: tuple[Order, ...] = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
orders = pytest.mark.parametrize("order", ORDERS)


def engine_views(
    order: Order, layers: int, heads: int = 2, tokens: int = 4, content: int = 6
) -> list[torch.Tensor]:
    """bfloat16 views ``[blocks, heads, tokens, content]`` of one allocation, a layer each."""
    sizes = {"L": layers, "B": BLOCKS, "H": heads, "N": tokens, "C": content}
    shape = [sizes[name] for name in order]
    count = int(np.prod(shape))
    memory = torch.arange(count, dtype=torch.int16).view(torch.bfloat16).view(shape)
    by_layer = memory.permute([order.index(name) for name in "LBHNC"])
    return list(by_layer.unbind(0))


def as_bytes(view: torch.Tensor) -> torch.Tensor:
    """What a plugin attaches: the blocks of a view as rows of bytes, in their memory order."""
    width = view.element_size()
    return torch.empty(0, dtype=torch.uint8).set_(
        view.untyped_storage(),
        view.storage_offset() * width,
        (view.shape[0], view[0].numel() * width),
        (view.stride(0) * width, 1),
    )


def attached(
    views: Sequence[torch.Tensor], groups: Sequence[int] | None = None, *, layerwise: bool = False
) -> AttachedHbm:
    groups = [0] * len(views) if groups is None else groups
    layers = [AttachedLayer(g, as_bytes(v)) for g, v in zip(groups, views, strict=True)]
    return AttachedHbm(layers, layerwise=layerwise)


def random_page(hbm: AttachedHbm, seed: int = 0) -> PageBuffer:
    return np.random.default_rng(seed).integers(0, 256, hbm.page_bytes, dtype=np.uint8)


def read_page(hbm: AttachedHbm, slot: int) -> PageBuffer:
    into = np.zeros(hbm.page_bytes, dtype=np.uint8)
    assert hbm.read([slot], [into]) == [None]
    return into


def expected_page(hbm: AttachedHbm, groups: Sequence[int], blocks: Sequence[int]) -> bytes:
    """The page by plain indexing: group after group, its layers in execution order."""
    return b"".join(
        layer[blocks[group]].contiguous().numpy().tobytes()
        for group in range(hbm.groups)
        for layer, own in zip(hbm.layers, groups, strict=True)
        if own == group
    )


# -- slots -----------------------------------------------------------------------------------------


@given(st.integers(1, 1 << 20), st.data())
def test_a_slot_gives_back_the_blocks_that_were_packed_into_it(
    blocks: int, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=12))
    assert unpack_blocks(pack_blocks(ids, blocks), len(ids), blocks) == tuple(ids)


def test_the_slot_of_one_group_is_the_block_itself() -> None:
    assert [pack_blocks([block], 9) for block in range(9)] == list(range(9))


@pytest.mark.parametrize("ids", [(7,), (-1,), (0, 7), (7, 0)])
def test_a_block_that_the_engine_does_not_have_is_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"block -?\d is outside 0..6"):
        pack_blocks(ids, 7)


def test_a_slot_of_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        pack_blocks([], 7)


@pytest.mark.parametrize("slot", [-1, 49, 50])
def test_a_slot_out_of_range_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=r"slot -?\d+ is outside 0..48"):
        unpack_blocks(slot, 2, 7)


# -- one group -------------------------------------------------------------------------------------


@orders
@pytest.mark.parametrize("heads", [1, 2], ids=["mla", "heads"])
def test_a_page_read_is_the_block_of_every_layer(order: Order, heads: int) -> None:
    hbm = attached(engine_views(order, layers=3, heads=heads))
    for block in range(1, BLOCKS):
        assert read_page(hbm, block).tobytes() == expected_page(hbm, [0] * 3, [block])


@orders
def test_a_page_written_lands_in_the_engines_tensors_and_nowhere_else(order: Order) -> None:
    views = engine_views(order, layers=3)
    before = [view.clone() for view in views]
    hbm = attached(views)
    page = random_page(hbm)
    hbm.write_layers([4], [page], 0, 3)
    others = [block for block in range(BLOCKS) if block != 4]
    for at, (view, old) in enumerate(zip(views, before, strict=True)):
        size = hbm.page_bytes // 3
        dims = (2, 4, 6) if order.endswith("HNC") else (4, 2, 6)
        own = (
            torch.from_numpy(page[at * size : (at + 1) * size].copy()).view(torch.int16).view(dims)
        )
        own = own if order.endswith("HNC") else own.transpose(0, 1)
        assert torch.equal(view[4].view(torch.int16), own)
        assert torch.equal(view[others].view(torch.int16), old[others].view(torch.int16))


@orders
def test_blocks_of_one_page_are_one_run(order: Order) -> None:
    """On a CPU one copy a page; on a GPU too where the layers of a block are neighbours."""
    hbm = attached(engine_views(order, layers=5))
    ((run,),) = hbm._runs
    assert run.pool.shape == (5, BLOCKS, hbm.page_bytes // 5)
    is_one_copy = run.pool.stride(0) == run.pool.shape[2]
    assert is_one_copy == order.startswith("BL")


def test_padding_between_blocks_is_neither_read_nor_written() -> None:
    memory = torch.zeros(2 * BLOCKS * 100, dtype=torch.uint8)
    layers = [memory.as_strided((BLOCKS, 60), (100, 1), at * BLOCKS * 100) for at in range(2)]
    hbm = AttachedHbm([AttachedLayer(0, layer) for layer in layers], layerwise=False)
    page = np.full(120, 0xEE, dtype=np.uint8)
    hbm.write_layers([3], [page], 0, 2)
    assert int((memory == 0xEE).sum()) == 120
    assert np.array_equal(read_page(hbm, 3), page)


def test_layers_of_unequal_size_and_distance_form_several_runs() -> None:
    sizes = (8, 8, 8, 5, 8, 8)
    memory = torch.arange(BLOCKS * sum(sizes) + 16, dtype=torch.int64).to(torch.uint8)
    layers, at = [], 0
    for number, size in enumerate(sizes):
        at += 16 if number == 5 else 0  # a gap before the last
        layers.append(AttachedLayer(0, memory[at : at + BLOCKS * size].view(BLOCKS, size)))
        at += BLOCKS * size
    hbm = AttachedHbm(layers, layerwise=False)
    (runs,) = hbm._runs
    assert [(run.first_layer, run.page_offset, run.pool.shape[0]) for run in runs] == [
        (0, 0, 3),
        (3, 24, 1),
        (4, 29, 2),
    ]
    assert read_page(hbm, 2).tobytes() == expected_page(hbm, [0] * 6, [2])


def test_layers_in_allocations_of_their_own_are_copied_one_by_one() -> None:
    layers = [torch.full((BLOCKS, 16), fill, dtype=torch.uint8) for fill in (1, 2, 3)]
    hbm = AttachedHbm([AttachedLayer(0, layer) for layer in layers], layerwise=False)
    assert read_page(hbm, 1).tolist() == [1] * 16 + [2] * 16 + [3] * 16


def test_layers_that_lie_backwards_in_memory_keep_their_execution_order() -> None:
    memory = torch.arange(3 * BLOCKS * 4, dtype=torch.uint8).view(3, BLOCKS, 4)
    hbm = AttachedHbm([AttachedLayer(0, memory[at]) for at in (2, 1, 0)], layerwise=False)
    assert read_page(hbm, 1).tobytes() == expected_page(hbm, [0] * 3, [1])


# -- several groups --------------------------------------------------------------------------------

ALTERNATING = (0, 1, 0, 1, 0, 1)


def aliasing_views(order: Order) -> list[torch.Tensor]:
    """Two groups of three layers each over the same bytes, in execution order g0 g1 g0 g1 g0 g1."""
    views = engine_views(order, layers=3)
    return [view for view in views for _ in range(2)]


@orders
def test_groups_that_alias_the_same_bytes_keep_their_own_blocks(order: Order) -> None:
    hbm = attached(aliasing_views(order), ALTERNATING)
    slots = [pack_blocks(ids, BLOCKS) for ids in ((1, 2), (4, 3), (6, 5))]
    pages = [random_page(hbm, seed) for seed in range(3)]
    hbm.write_layers(slots, pages, 0, 6)
    for slot, page in zip(slots, pages, strict=True):
        assert np.array_equal(read_page(hbm, slot), page)
        assert page.tobytes() == expected_page(hbm, ALTERNATING, unpack_blocks(slot, 2, BLOCKS))


@orders
def test_a_null_block_is_not_written(order: Order) -> None:
    views = aliasing_views(order)
    hbm = attached(views, ALTERNATING)
    null_before = [view[NULL_BLOCK].clone() for view in views]
    page = random_page(hbm)
    hbm.write_layers([pack_blocks((NULL_BLOCK, 3), BLOCKS)], [page], 0, 6)
    for view, old in zip(views, null_before, strict=True):
        assert torch.equal(view[NULL_BLOCK].view(torch.int16), old.view(torch.int16))
    second_half = page[hbm.page_bytes // 2 :].tobytes()
    assert expected_page(hbm, ALTERNATING, (3, 3))[hbm.page_bytes // 2 :] == second_half


def test_a_null_block_is_not_read() -> None:
    hbm = attached(aliasing_views("LBHNC"), ALTERNATING)
    into = np.zeros(hbm.page_bytes, dtype=np.uint8)
    slots = [pack_blocks((2, 3), BLOCKS), pack_blocks((2, NULL_BLOCK), BLOCKS)]
    with pytest.raises(ValueError, match=r"blocks \(2, 0\) cannot be read: 0 is the null block"):
        hbm.read(slots, [into, into])
    assert not into.any()


def test_a_group_may_have_no_layer_on_this_rank() -> None:
    """With pipeline stages a group of the engine can lie wholly on another stage."""
    layers = [AttachedLayer(1, as_bytes(view)) for view in engine_views("LBHNC", layers=2)]
    hbm = AttachedHbm(layers, layerwise=False, groups=3)
    slot = pack_blocks((5, 4, 1), BLOCKS)
    page = random_page(hbm)
    hbm.write_layers([slot], [page], 0, 2)
    assert np.array_equal(read_page(hbm, slot), page)
    assert page.tobytes() == expected_page(hbm, [1, 1], (5, 4, 1))


# -- layers and steps ------------------------------------------------------------------------------


@orders
@pytest.mark.parametrize("groups", [(0,) * 6, ALTERNATING, (0, 0, 1, 0, 0, 1)], ids=str)
def test_writing_layer_by_layer_is_writing_at_once(order: Order, groups: tuple[int, ...]) -> None:
    at_once, by_layer = (attached(engine_views(order, layers=6), groups) for _ in range(2))
    slots = [pack_blocks([2] * at_once.groups, BLOCKS), pack_blocks([5] * at_once.groups, BLOCKS)]
    pages = [random_page(at_once, seed) for seed in range(2)]
    at_once.write_layers(slots, pages, 0, 6)
    for layer in range(6):
        by_layer.write_layers(slots, pages, layer, layer + 1)
    for one, other in zip(at_once.layers, by_layer.layers, strict=True):
        assert torch.equal(one, other)


def test_writing_some_layers_leaves_the_others_alone() -> None:
    groups = (0, 0, 1, 0, 0, 1)
    for first in range(6):
        for last in range(first, 7):
            hbm = attached(engine_views("LBHNC", layers=6), groups)
            before = [layer.clone() for layer in hbm.layers]
            hbm.write_layers([pack_blocks((3, 3), BLOCKS)], [random_page(hbm)], first, last)
            changed = [
                not torch.equal(layer, old) for layer, old in zip(hbm.layers, before, strict=True)
            ]
            assert changed == [first <= at < last for at in range(6)], (first, last)


def test_not_layerwise_a_page_is_written_in_one_step() -> None:
    assert attached(engine_views("LBHNC", layers=4)).layer_steps == [(0, 4)]


def test_layerwise_small_layers_share_a_step_and_every_layer_has_one() -> None:
    small = attached(engine_views("LBHNC", layers=4), layerwise=True)
    assert small.layer_steps == [(0, 4)]
    large = attached(engine_views("LBHNC", 5, heads=4, tokens=2048, content=160), layerwise=True)
    assert large.layer_steps == [(0, 2), (2, 4), (4, 5)]  # 2.5 MiB a layer, 4 MiB make a step


def test_copy_slots_copies_whole_pages_and_leaves_the_rest() -> None:
    hbm = attached(aliasing_views("BLHNC"), ALTERNATING)
    source, target = pack_blocks((1, 2), BLOCKS), pack_blocks((3, 4), BLOCKS)
    untouched = {block: read_page(hbm, pack_blocks((block, block), BLOCKS)) for block in (5, 6)}
    expected = read_page(hbm, source)
    hbm.copy_slots([source], [target])
    assert np.array_equal(read_page(hbm, target), expected)
    for block, page in untouched.items():
        assert np.array_equal(read_page(hbm, pack_blocks((block, block), BLOCKS)), page)


def test_copy_slots_passes_over_a_null_target_and_refuses_a_null_source() -> None:
    hbm = attached(aliasing_views("LBHNC"), ALTERNATING)
    null = hbm.layers[0][NULL_BLOCK].clone()
    hbm.copy_slots([pack_blocks((1, 2), BLOCKS)], [pack_blocks((NULL_BLOCK, 4), BLOCKS)])
    assert torch.equal(hbm.layers[0][NULL_BLOCK], null)
    before = hbm.layers[0].clone()
    with pytest.raises(ValueError, match="nothing to copy to block 3"):
        hbm.copy_slots([pack_blocks((NULL_BLOCK, 2), BLOCKS)], [pack_blocks((3, 4), BLOCKS)])
    assert torch.equal(hbm.layers[0], before)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(BLOCKS, 8), "must be uint8"),
        (torch.zeros(BLOCKS, 2, 8, dtype=torch.uint8), "must be uint8"),
        (torch.zeros(8, BLOCKS, dtype=torch.uint8).t(), "contiguous blocks"),
        (torch.zeros(BLOCKS + 1, 8, dtype=torch.uint8), f"all must have {BLOCKS} on cpu"),
    ],
    ids=["float", "three-dims", "strided", "blocks"],
)
def test_a_layer_that_is_not_rows_of_bytes_is_refused(tensor: torch.Tensor, message: str) -> None:
    good = torch.zeros(BLOCKS, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        AttachedHbm([AttachedLayer(0, good), AttachedLayer(0, tensor)], layerwise=False)


def test_an_engine_without_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="without layers"):
        AttachedHbm([], layerwise=False)


def test_a_batch_that_is_not_one_to_one_is_refused() -> None:
    hbm = attached(engine_views("LBHNC", layers=2))
    page = random_page(hbm)
    with pytest.raises(ValueError, match="one to one"):
        hbm.write_layers([1, 2], [page], 0, 2)
    with pytest.raises(ValueError, match="one slot a page"):
        hbm.read([1, 2], [page])
    with pytest.raises(ValueError, match="not shape"):
        hbm.read([1], [page[:-1]])


def test_nothing_to_move_is_harmless() -> None:
    hbm = attached(engine_views("LBHNC", layers=2))
    hbm.write_layers([], [], 0, 2)
    assert hbm.read([], []) == []
    hbm.copy_slots([], [])


# -- anything at all -------------------------------------------------------------------------------


@given(
    order=st.sampled_from(ORDERS),
    groups=st.lists(st.integers(0, 2), min_size=1, max_size=7),
    heads=st.integers(1, 3),
    layerwise=st.booleans(),
    data=st.data(),
)
def test_what_is_written_comes_back(
    order: Order, groups: list[int], heads: int, layerwise: bool, data: st.DataObject
) -> None:
    hbm = attached(engine_views(order, len(groups), heads), groups, layerwise=layerwise)
    count = data.draw(st.integers(1, BLOCKS - 1))
    columns = [data.draw(st.permutations(range(1, BLOCKS)))[:count] for _ in range(hbm.groups)]
    rows = list(zip(*columns, strict=True))
    slots = [pack_blocks(row, BLOCKS) for row in rows]
    pages = [random_page(hbm, seed) for seed in range(count)]
    for first, last in hbm.layer_steps:
        hbm.write_layers(slots, pages, first, last)
    for slot, row, page in zip(slots, rows, pages, strict=True):
        assert np.array_equal(read_page(hbm, slot), page)
        assert page.tobytes() == expected_page(hbm, groups, row)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@orders
def test_an_engine_on_a_gpu_gives_and_takes_the_same_bytes(order: Order) -> None:
    shape = engine_views(order, layers=3)
    memory = torch.empty(0, dtype=torch.bfloat16).set_(shape[0].untyped_storage()).cuda()
    views = [memory.as_strided(v.shape, v.stride(), v.storage_offset()) for v in shape]
    layers = [
        AttachedLayer(
            0,
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(
                view.untyped_storage(),
                view.storage_offset() * 2,
                (BLOCKS, view[0].numel() * 2),
                (view.stride(0) * 2, 1),
            ),
        )
        for view in views
    ]
    hbm, on_cpu = AttachedHbm(layers, layerwise=True), attached(shape)
    assert hbm.layer_steps == [(0, 1), (1, 2), (2, 3)]
    for block in range(1, BLOCKS):
        assert np.array_equal(read_page(hbm, block), read_page(on_cpu, block))
    page = random_page(hbm)
    for first, last in hbm.layer_steps:
        hbm.write_layers([2], [page], first, last)
    assert np.array_equal(read_page(hbm, 2), page)
