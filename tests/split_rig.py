"""A decider and its carriers, as an engine runs them: messages pickled, one step after another."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiered_kv.carrier import Carrier, Loaded
from tiered_kv.decider import Decider, Ended
from tiered_kv.keys import KeyChain, Namespace, PageKey, page_keys
from tiered_kv.layout import KVLayout
from tiered_kv.orders import Order, Report
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.storage.host import HostTier

PAGE_TOKENS = 4
LAYOUT = KVLayout.uniform(8192, PAGE_TOKENS, layers=4)
HBM_PAGES = 64


def chain(*names: str) -> KeyChain:
    """Keys of a prompt whose pages have these names."""
    tokens = [ord(name[-1]) + 256 * i for i, name in enumerate(names) for _ in range(PAGE_TOKENS)]
    return page_keys(tokens, PAGE_TOKENS, Namespace("model", "layout"))


def content(key: PageKey, rank: int) -> np.ndarray:
    """What a rank's share of a page must hold: nobody else's."""
    seed = int.from_bytes(key[:7], "little") + rank
    return np.random.default_rng(seed).integers(0, 256, LAYOUT.page_bytes, dtype=np.uint8)


class Rank:
    """One worker: its HBM, and what carries pages in and out of it."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        host_pages: int,
        disk: Path | None,
        disk_size: int,
        **settings: Any,
    ) -> None:
        self.rank = rank
        self.hbm = HbmTier(LAYOUT, HBM_PAGES * LAYOUT.page_bytes)
        self.host = HostTier(
            LAYOUT.page_bytes,
            (host_pages + (1 if disk else 0)) * 8192,
            with_staging=disk is not None,
        )
        self.disk = disk and DiskTier.open(
            disk / f"rank{rank}", LAYOUT.page_bytes, disk_size, LAYOUT.fingerprint
        )
        self.carrier = Carrier(self.hbm, self.host, self.disk or None, ranks=ranks, **settings)

    def compute(
        self, keys: Iterable[PageKey], slots: Iterable[int], *, is_wrong: bool = False
    ) -> None:
        """Write pages into HBM as a forward pass does; wrong ones if what it read was wrong."""
        for key, slot in zip(keys, slots, strict=True):
            page = content(key, self.rank)
            for layer, tensor in enumerate(self.hbm.layers):
                size = tensor.shape[1]
                tensor.numpy()[slot] = page[layer * size : (layer + 1) * size] ^ is_wrong

    def page(self, slot: int) -> np.ndarray:
        """What stands in a slot."""
        return np.concatenate([tensor.numpy()[slot] for tensor in self.hbm.layers])


class Engine:
    """A scheduler with a decider, and ranks with carriers.

    Args:
        lag: so many steps are decided before it is known how one went.
        settings: of the carriers.
    """

    def __init__(
        self,
        *,
        ranks: int = 1,
        host_pages: int = 16,
        disk: Path | None = None,
        disk_size: int = 16 << 20,
        write_through: bool = True,
        lag: int = 0,
        **settings: Any,
    ) -> None:
        self.lag = lag
        self._unread: deque[list[Report]] = deque()
        self.ranks = [
            Rank(rank, ranks, host_pages, disk, disk_size, **settings) for rank in range(ranks)
        ]
        facts = [pickle.loads(pickle.dumps(rank.carrier.facts())) for rank in self.ranks]
        self.decider = Decider(facts, write_through=write_through)
        self.arrived: dict[int, int] = {}  # job id -> pages in HBM on all ranks
        self._told: Counter[int] = Counter()  # job id -> ranks that say its load is over

    def step(
        self,
        *,
        fences: Iterable[int] = (),
        compute: tuple[Sequence[PageKey], Sequence[int]] = ((), ()),
    ) -> list[Ended]:
        """One engine step: order, loads, forward pass, stores, report."""
        order = self.decider.order(fences)
        loaded = [
            load
            for rank in self.ranks
            for load in self._load(rank, pickle.loads(pickle.dumps(order)))
        ]
        is_wrong = any(load.failed_slots for load in loaded)  # on one rank: so is all they compute
        reports = []
        for rank in self.ranks:
            rank.compute(*compute, is_wrong=is_wrong)
            rank.carrier.start()
            loaded += rank.carrier.finished_waiting()
            reports.append(rank.carrier.report())
        for load in loaded:
            self._note(load)
        self._unread.append([pickle.loads(pickle.dumps(report)) for report in reports if report])
        ended: list[Ended] = []
        while len(self._unread) > self.lag:
            for report in self._unread.popleft():
                ended += self.decider.take(report)
        return ended

    @staticmethod
    def _load(rank: Rank, order: Order) -> list[Loaded]:
        carrier = rank.carrier
        carrier.receive(order)
        carrier.fence(order.fences)
        carrier.start_running()
        for layer in range(LAYOUT.layers):
            carrier.wait_layer(layer)
        return carrier.finish_running()

    def _note(self, load: Loaded) -> None:
        self._told[load.job.id] += 1
        count = len(load.job.slots) - len(load.failed_slots)
        self.arrived[load.job.id] = min(count, self.arrived.get(load.job.id, count))

    @property
    def over(self) -> set[int]:
        """Gets that are over on all ranks, as far as HBM is concerned."""
        return {job for job, ranks in self._told.items() if ranks == len(self.ranks)}

    def settle(self) -> list[Ended]:
        """Step until every job has ended, and all who wait have been told."""
        ended: list[Ended] = []
        while self.decider.jobs_in_flight or any(rank.carrier._waiting for rank in self.ranks):
            for rank in self.ranks:
                for flight in list(rank.carrier._flights.values()):
                    assert flight.transfer.settled.wait(30)
            ended += self.step()
        assert not self.decider.check()
        return ended

    def store(self, keys: KeyChain, slots: Sequence[int]) -> None:
        """Compute pages and store them, all the way."""
        self.decider.put(keys, slots)
        self.step(compute=(keys, slots))
        self.settle()

    def wipe(self) -> None:
        """Overwrite all of HBM."""
        for rank in self.ranks:
            for tensor in rank.hbm.layers:
                tensor.fill_(0xEE)

    def holds(self, keys: Sequence[PageKey], slots: Sequence[int]) -> bool:
        """Whether every rank has its share of these pages in these slots."""
        return all(
            np.array_equal(rank.page(slot), content(key, rank.rank))
            for rank in self.ranks
            for key, slot in zip(keys, slots, strict=True)
        )

    def close(self) -> None:
        """End the carriers."""
        for rank in self.ranks:
            rank.carrier.close()
            rank.hbm.close()
