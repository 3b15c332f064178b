"""A restore goes on while the model computes: each layer waits for its own pages alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from huggingface_rig import (
    build_model,
    converse,
    generate,
    kept_by,
    on_one_thread,
    random_tokens,
    small_store,
)
from store_rig import settle

from tiered_kv.plugins import huggingface_restore
from tiered_kv.plugins.huggingface import LatePagesError, TieredCache
from tiered_kv.store import TieredStore
from tiered_kv.transfer import Transfer

LAYERS = 4
PATIENCE_S = 30.0  # a test that waits so long has found a hang
KNOWN = random_tokens(100, seed=1)
PROMPT = torch.cat([KNOWN, random_tokens(20, seed=2)], dim=1)


class HeldTransfer:
    """A transfer whose layers come when the test says so, or too late."""

    def __init__(self, inner: Transfer, gates: list[threading.Event], late_from: int) -> None:
        self._inner = inner
        self._gates = gates
        self._late_from = late_from
        self.is_lost = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def wait_layer(self, layer: int) -> int:
        if self.is_lost:
            return 0
        assert self._gates[layer].wait(PATIENCE_S), f"nobody let layer {layer} come"
        if layer >= self._late_from:
            return self._inner.wait_layer(layer) - 1
        return self._inner.wait_layer(layer)

    def wait(self) -> int:
        if self.is_lost:
            return 0
        return self._inner.wait() - (self._late_from < LAYERS)


class Gates:
    """Holds the layers of every load of a store back from `held` on."""

    def __init__(self, store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events = [threading.Event() for _ in range(LAYERS)]
        self.late_from = LAYERS
        self.lost: set[int] = set()  # loads of which nothing comes, from 1
        self.loads: list[HeldTransfer] = []
        get = store.get

        def held_get(*args: Any, **kwargs: Any) -> HeldTransfer:
            self.loads.append(HeldTransfer(get(*args, **kwargs), self.events, self.late_from))
            self.loads[-1].is_lost = len(self.loads) in self.lost
            return self.loads[-1]

        monkeypatch.setattr(store, "get", held_get)

    def open(self, *layers: int) -> None:
        for layer in layers:
            self.events[layer].set()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    yield from on_one_thread()


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model("llama", num_hidden_layers=LAYERS)


@pytest.fixture
def store(model: Any) -> Iterator[TieredStore]:
    with small_store(model) as store:
        converse(model, store, KNOWN)
        yield store


@pytest.fixture
def gates(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gates]:
    gates = Gates(store, monkeypatch)
    yield gates
    gates.open(*range(LAYERS))


def test_a_layer_computes_while_later_ones_have_not_come(
    model: Any, store: TieredStore, gates: Gates
) -> None:
    """Layer i + 1 is let go only when the model is through with layer i.

    A restore that waited for all layers would wait here until the patience ends.
    """
    computed: list[int] = []

    def through(layer: int) -> Any:
        def note(*args: Any) -> None:
            if layer not in computed:
                computed.append(layer)
                gates.open(*range(layer + 1, min(layer + 2, LAYERS)))

        return note

    layers = enumerate(model.model.layers)
    hooks = [layer.register_forward_hook(through(index)) for index, layer in layers]
    try:
        gates.open(0)
        cache = TieredCache.restore(store, PROMPT)
        assert cache.restored_tokens == cache.get_seq_length() == 96
        assert not gates.events[1].is_set()
        output = generate(model, PROMPT, cache)
    finally:
        for hook in hooks:
            hook.remove()
    assert computed == list(range(LAYERS))
    assert torch.equal(output, generate(model, PROMPT))
    assert cache.save(output) == 1 + (120 + 15) // 16 - 7


def test_whoever_looks_at_a_layer_waits_for_it(
    model: Any, store: TieredStore, gates: Gates
) -> None:
    gates.open(0)
    cache = TieredCache.restore(store, PROMPT)
    found: list[torch.Tensor] = []
    looker = threading.Thread(target=lambda: found.append(kept_by(cache, layer=2)[0].clone()))
    looker.start()
    assert found == []
    gates.open(1, 2)
    looker.join(PATIENCE_S)
    gates.open(3)
    plain = TieredCache.restore(store, PROMPT, overlap=False)
    assert torch.equal(found[0], kept_by(plain, layer=2)[0])


def test_without_overlap_all_layers_are_here_when_restore_returns(
    store: TieredStore, gates: Gates
) -> None:
    made: list[TieredCache] = []
    restoring = threading.Thread(
        target=lambda: made.append(TieredCache.restore(store, PROMPT, overlap=False))
    )
    restoring.start()
    gates.open(0, 1, 2)
    assert made == []
    gates.open(3)
    restoring.join(PATIENCE_S)
    assert made[0].restored_tokens == 96


def test_pages_leased_for_a_restore_are_given_back_though_its_cache_is_never_used(
    store: TieredStore, gates: Gates
) -> None:
    gates.open(0)
    cache = TieredCache.restore(store, PROMPT)
    del cache
    assert store.hbm.allocate(store.hbm.capacity_pages) is None
    gates.open(1, 2, 3)
    end_of_copying(gates)
    assert_no_lease_is_left(store)


def assert_no_lease_is_left(store: TieredStore) -> None:
    settle(store)
    slots = store.hbm.allocate(store.hbm.capacity_pages)
    assert slots is not None
    store.hbm.release(slots)


def end_of_copying(gates: Gates) -> None:
    """Wait for the threads that copy restored layers."""
    gates.open(*range(LAYERS))
    for thread in threading.enumerate():
        if thread.name == "tiered-kv-restore":
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_layer_that_comes_too_late_stops_the_pass_and_nothing_wrong_is_computed(
    model: Any, store: TieredStore, gates: Gates
) -> None:
    gates.late_from = 2
    gates.open(*range(LAYERS))
    cache = TieredCache.restore(store, PROMPT)
    with pytest.raises(LatePagesError, match="layer 2 of the restored prefix did not come") as info:
        generate(model, PROMPT, cache)
    assert "\n" not in str(info.value)
    with pytest.raises(LatePagesError):  # and not only once
        cache.save_rows()
    end_of_copying(gates)
    cache.reset()
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))


def test_without_overlap_a_late_load_shortens_the_prefix(
    model: Any, store: TieredStore, gates: Gates
) -> None:
    gates.late_from = 2
    gates.open(*range(LAYERS))
    cache = TieredCache.restore(store, PROMPT, overlap=False)
    assert cache.restored_tokens == 96 - 16
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))


def test_a_row_that_comes_short_leaves_nothing_on_its_way_to_columns_that_are_computed(
    model: Any, store: TieredStore, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 1's pages are lost, so no column is kept: row 0's must not arrive on top of new ones."""
    ids = torch.cat([PROMPT, torch.cat([KNOWN, random_tokens(20, seed=3)], dim=1)])
    gates.lost = {2}
    gates.open(*range(LAYERS))
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_restore, "open_stream", None)  # must not be called
        cache = TieredCache.restore(store, ids)
    assert (cache.restored_tokens, cache.get_seq_length()) == (0, 0)
    assert_no_lease_is_left(store)
    assert torch.equal(generate(model, ids, cache), generate(model, ids))


def test_a_copy_that_breaks_surfaces_where_its_layer_is_used(
    model: Any, store: TieredStore, gates: Gates, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates.open(0)
    cache = TieredCache.restore(store, PROMPT)
    gates.loads[-1]._inner.broke(OSError("the bus is gone"))
    gates.open(1, 2, 3)
    with pytest.raises(LatePagesError, match="a copy broke: the bus is gone"):
        generate(model, PROMPT, cache)
    end_of_copying(gates)


def test_a_restore_that_is_interrupted_leaves_no_lease(
    store: TieredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Transfer, layer: int) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Transfer, "wait_layer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            TieredCache.restore(store, PROMPT)
    assert_no_lease_is_left(store)


def test_the_store_may_close_while_layers_are_still_copied(
    model: Any, gates: Gates, store: TieredStore
) -> None:
    gates.open(0)
    cache = TieredCache.restore(store, PROMPT)
    store.close()
    gates.open(1, 2, 3)
    assert torch.equal(generate(model, PROMPT, cache), generate(model, PROMPT))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layers_restored_on_a_stream_of_their_own_equal_recomputing_on_a_gpu() -> None:
    model = build_model("llama", num_hidden_layers=LAYERS).cuda()
    prompt, known = PROMPT.cuda(), KNOWN.cuda()
    with small_store(model, device="cuda") as store:
        converse(model, store, known)
        for turn in range(20):
            cache = TieredCache.restore(store, prompt, device="cuda")
            assert cache.restored_tokens == 96
            output = generate(model, prompt, cache)
            assert torch.equal(output, generate(model, prompt)), f"turn {turn}"
