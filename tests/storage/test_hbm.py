"""HbmTier on a CPU under the contract of a tier, with layers of equal and unequal size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from contracts import TierContract, buffers, page_of, read_all, take

from tiered_kv.errors import ConfigError
from tiered_kv.layout import KVLayout, LayerGroup
from tiered_kv.storage.hbm import HbmTier


def layout_of(*layer_bytes: int) -> KVLayout:
    """A layout with one token a page and just these layers."""
    groups = tuple(LayerGroup("full", (at,), n) for at, n in enumerate(layer_bytes))
    return KVLayout("made-up", "uint8", 1, groups)


UNEQUAL = (1000, 1000, 300, 7, 7, 7, 1000, 787)  # runs of 2, 1, 3, 1 and 1 layers; 4108 in all


class TestHbmTier(TierContract):
    layer_bytes: tuple[int, ...] = (1027, 1027, 1027, 1027)

    def open_tier(self, folder: Path) -> HbmTier:
        layout = layout_of(*self.layer_bytes)
        assert layout.page_bytes == self.page_bytes
        return HbmTier(layout, self.capacity_pages * self.page_bytes)

    def raw_read(self, tier: HbmTier, slot: int) -> bytes:
        return b"".join(layer[slot].numpy().tobytes() for layer in tier.layers)

    def raw_write(self, tier: HbmTier, slot: int, data: bytes) -> None:
        at = 0
        for layer, n_bytes in zip(tier.layers, self.layer_bytes, strict=True):
            row = np.frombuffer(data[at : at + n_bytes], dtype=np.uint8)
            layer[slot] = torch.from_numpy(row.copy())
            at += n_bytes


class TestHbmTierWithUnequalLayers(TestHbmTier):
    layer_bytes = UNEQUAL


class TestHbmTierWithOneLayer(TestHbmTier):
    layer_bytes = (4108,)


class TestHbmTierWithLayersThatKeepNothing(TestHbmTier):
    layer_bytes = (0, 2054, 0, 0, 2054, 0)


def test_layers_are_uint8_views_of_the_pool_one_row_a_page() -> None:
    tier = HbmTier(layout_of(*UNEQUAL), 5 * 4108)
    assert [tuple(layer.shape) for layer in tier.layers] == [(5, n) for n in UNEQUAL]
    assert {layer.dtype for layer in tier.layers} == {torch.uint8}
    (slot,) = take(tier, 1)
    page = page_of("a", 4108)
    at = 0
    for layer in tier.layers:  # an engine writes through the views
        layer[slot] = torch.from_numpy(page.data[at : at + layer.shape[1]])
        at += layer.shape[1]
    assert read_all(tier, [slot]) == [page.data.tobytes()]


def test_views_of_all_layers_share_no_byte_and_leave_none_out() -> None:
    tier = HbmTier(layout_of(*UNEQUAL), 3 * 4108)
    for number, layer in enumerate(tier.layers):
        layer.fill_(number + 1)
    for number, layer in enumerate(tier.layers):
        assert bool((layer == number + 1).all())
    assert sum(layer.numel() for layer in tier.layers) == 3 * 4108


def test_equal_layers_that_follow_one_another_form_a_run() -> None:
    runs = HbmTier(layout_of(*UNEQUAL), 4108).runs
    assert [(run.first_layer, run.page_offset, run.pool.shape[0]) for run in runs] == [
        (0, 0, 2),
        (2, 2000, 1),
        (3, 2300, 3),
        (6, 2321, 1),
        (7, 3321, 1),
    ]


def test_a_layer_can_be_seen_as_the_models_own_dtype() -> None:
    tier = HbmTier(layout_of(64, 64), 4 * 128)
    assert tier.layers[0].view(torch.bfloat16).shape == (4, 32)


@pytest.mark.parametrize(
    ("first", "last"), [(0, 1), (1, 3), (2, 6), (3, 5), (5, 8), (0, 8), (4, 4), (7, 8)]
)
def test_write_layers_writes_those_layers_and_no_other(first: int, last: int) -> None:
    tier = HbmTier(layout_of(*UNEQUAL), 4 * 4108)
    slots = take(tier, 3)
    pages = [page_of(name, 4108) for name in "abc"]
    tier.write_layers(slots, [page.data for page in pages], first, last)
    low, high = sum(UNEQUAL[:first]), sum(UNEQUAL[:last])
    for page, found in zip(pages, read_all(tier, slots), strict=True):
        expected = bytearray(4108)
        expected[low:high] = page.data[low:high].tobytes()
        assert found == bytes(expected)


@pytest.mark.parametrize("layer_bytes", [UNEQUAL, (40_000,) * 7, (70_000, 10, 70_000, 5), (16,)])
def test_layer_steps_cover_every_layer_once_and_in_order(layer_bytes: tuple[int, ...]) -> None:
    layout = layout_of(*layer_bytes)
    tier = HbmTier(layout, layout.page_bytes)
    layers = [layer for first, last in tier.layer_steps for layer in range(first, last)]
    assert layers == list(range(len(layer_bytes)))


def test_writing_step_by_step_is_writing_at_once() -> None:
    layout = layout_of(2_400_000, 2_400_000, 7, 4_300_000, 4_300_000, 12)
    tier = HbmTier(layout, 2 * layout.page_bytes)
    assert len(tier.layer_steps) > 2
    slots = take(tier, 2)
    pages = [page_of(name, layout.page_bytes) for name in "ab"]
    for first, last in tier.layer_steps:
        tier.write_layers(slots, [page.data for page in pages], first, last)
    assert read_all(tier, slots) == [page.data.tobytes() for page in pages]


def test_copy_slots_copies_whole_pages_and_leaves_the_rest() -> None:
    tier = HbmTier(layout_of(*UNEQUAL), 6 * 4108)
    slots = take(tier, 6)
    pages = [page_of(slot, 4108) for slot in slots]
    tier.write(slots, pages)
    tier.copy_slots([0, 4], [3, 1])
    expected = [pages[at].data.tobytes() for at in (0, 4, 2, 0, 4, 5)]
    assert read_all(tier, slots) == expected


def test_copy_slots_of_nothing_is_harmless() -> None:
    tier = HbmTier(layout_of(16), 16)
    tier.copy_slots([], [])


def test_a_budget_below_one_page_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"hbm=4107.*at least 4108"):
        HbmTier(layout_of(*UNEQUAL), 4107)


def test_bytes_that_make_no_whole_page_are_left_unused() -> None:
    tier = HbmTier(layout_of(*UNEQUAL), 3 * 4108 - 1)
    assert tier.capacity_pages == 2
    assert tier.capacity_bytes == 3 * 4108 - 1


def test_read_needs_no_aligned_buffers() -> None:
    tier = HbmTier(layout_of(*UNEQUAL), 4108)
    slots = take(tier, 1)
    tier.write(slots, [page_of("a", 4108)])
    (wide,) = buffers(1, 4108 + 3)
    assert tier.read(slots, [wide[3:]]) == [None]
    assert wide[3:].tobytes() == page_of("a", 4108).data.tobytes()
