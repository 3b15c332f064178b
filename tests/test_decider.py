"""Deciding in one process, moving in others: orders down, reports up, a page counts with all."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from split_rig import HBM_PAGES, LAYOUT, Engine, chain, content

from tiered_kv.decider import Decider, Hit
from tiered_kv.errors import ConfigError, TierIOError
from tiered_kv.orders import RankFacts
from tiered_kv.plan import DISK, HOST
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier

Rig = Callable[..., Engine]


@pytest.fixture
def engine() -> Iterator[Rig]:
    opened: list[Engine] = []

    def open_engine(**settings: Any) -> Engine:
        opened.append(Engine(**settings))
        return opened[-1]

    yield open_engine
    for one in opened:
        one.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_stored_comes_back_on_every_rank(engine: Rig, ranks: int) -> None:
    rig = engine(ranks=ranks)
    keys = chain("a", "b", "c")
    rig.store(keys, [3, 1, 2])
    rig.wipe()
    assert rig.decider.match(keys) == Hit(3, 3, 3)
    job = rig.decider.get(keys, [10, 11, 12])
    rig.step()
    assert rig.arrived[job.id] == 3
    assert rig.holds(keys, [10, 11, 12])
    rig.settle()
    assert rig.decider.stats().hit_pages[HOST] == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_restart_finds_on_disk_what_all_ranks_wrote(
    engine: Rig, ranks: int, tmp_path: Path
) -> None:
    keys = chain(*"abcdef")
    first = engine(ranks=ranks, disk=tmp_path)
    first.store(keys, range(6))
    first.close()
    rig = engine(ranks=ranks, disk=tmp_path)
    assert rig.decider.match(keys) == Hit(6, 6, 0)
    rig.decider.prefetch(keys[:4])
    rig.settle()
    assert rig.decider.match(keys) == Hit(6, 6, 4)
    rig.decider.prefetch(keys)
    rig.settle()
    assert rig.decider.match(keys) == Hit(6, 6, 6)
    rig.decider.get(keys, range(20, 26), is_awaited=True)
    rig.settle()
    assert rig.holds(keys, range(20, 26))


def test_page_that_one_rank_has_lost_is_no_page(engine: Rig, tmp_path: Path) -> None:
    keys = chain(*"abcd")
    first = engine(ranks=2, disk=tmp_path)
    first.store(keys[:2], [0, 1])
    first.close()
    alone = engine(ranks=1, disk=tmp_path)  # a run with rank 0 alone: rank 1 misses "c" and "d"
    alone.step()
    alone.store(keys, [0, 1, 2, 3])
    alone.close()
    rig = engine(ranks=2, disk=tmp_path)
    assert rig.decider.match(keys) == Hit(2, 2, 0)
    rig.step()
    rig.store(keys, [4, 5, 6, 7])  # the number of a dropped page is free on every rank
    rig.wipe()
    rig.decider.get(keys, range(8, 12), is_awaited=True)
    rig.settle()
    assert rig.holds(keys, range(8, 12))


def test_store_that_fails_on_one_rank_counts_on_none(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine(ranks=2)
    keys = chain("a", "b")

    def broken(slots: object, into: object) -> None:
        raise TierIOError("gone", tier="hbm", errno=5)

    monkeypatch.setattr(rig.ranks[1].hbm, "read", broken)
    rig.decider.put(keys, [0, 1])
    rig.step(compute=(keys, [0, 1]))
    (ended,) = rig.settle()
    assert ended.not_stored == (0, 1)
    assert rig.decider.match(keys) == Hit(0, 0, 0)
    monkeypatch.undo()
    rig.store(keys, [0, 1])
    assert rig.decider.match(keys) == Hit(2, 2, 2)


def test_failed_load_into_a_running_request_stops_stores_until_the_decider_knows(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = engine()
    keys = chain(*"abcd")
    rig.store(keys[:2], [0, 1])
    rig.wipe()

    def broken(*args: object) -> None:
        raise TierIOError("gone", tier="hbm", errno=5)

    monkeypatch.setattr(rig.ranks[0].hbm, "write_layers", broken)
    rig.decider.get(keys[:2], [10, 11])
    rig.decider.put(keys[2:], [12, 13])  # computed over pages that did not come
    order = rig.decider.order()
    (rank,) = rig.ranks
    rank.carrier.receive(order)
    rank.carrier.start_running()
    for layer in range(LAYOUT.layers):
        rank.carrier.wait_layer(layer)
    (load,) = rank.carrier.finish_running()
    assert load.failed_slots == (10, 11)
    rank.carrier.start()
    rig.decider.put(chain("x"), [14])  # the next step was decided before the report came
    late = rig.decider.order()
    rank.carrier.receive(late)
    rank.carrier.start()
    report = rank.carrier.report()
    assert report is not None and len(report.failed) == 1
    rig.decider.take(report)
    rig.settle()
    assert rig.decider.match(keys) == Hit(2, 2, 2)
    assert rig.decider.match(chain("x")) == Hit(0, 0, 0)
    monkeypatch.undo()
    rig.store(keys, [0, 1, 2, 3])
    assert rig.decider.match(keys) == Hit(4, 4, 4)


def test_corrupt_page_is_a_miss_and_forgotten(engine: Rig, tmp_path: Path) -> None:
    keys = chain(*"abc")
    first = engine(disk=tmp_path)
    first.store(keys, range(3))
    first.close()
    (segment,) = sorted((tmp_path / "rank0" / "segments").iterdir())[:1]
    page = content(keys[1], 0).tobytes()
    data = segment.read_bytes()
    at = data.find(page)
    assert at > 0
    with segment.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([page[100] ^ 0xFF]))
    rig = engine(disk=tmp_path)
    rig.decider.prefetch(keys)
    rig.settle()
    assert rig.decider.match(keys) == Hit(1, 1, 1)
    assert rig.decider.why_missing(keys[1]) == "corrupt"
    assert rig.decider.stats().checksums_failed == 1


def test_fenced_put_is_through_before_the_engine_goes_on(engine: Rig) -> None:
    rig = engine()
    keys = chain("a", "b")
    (rank,) = rig.ranks
    rank.compute(keys, [0, 1])
    job, _ = rig.decider.put(keys, [0, 1])
    assert job is not None
    order = rig.decider.order([job.id])
    rank.carrier.receive(order)
    rank.carrier.fence(order.fences)
    rig.wipe()  # the engine overwrites the blocks now
    report = rank.carrier.report()
    while report is None:
        rig.step()
        report = rank.carrier.report()
    rig.decider.take(report)
    rig.settle()
    rig.decider.get(keys, [4, 5])
    rig.step()
    assert rig.holds(keys, [4, 5])


def test_clear_drops_all_and_the_room_is_used_again(engine: Rig, tmp_path: Path) -> None:
    rig = engine(disk=tmp_path, host_pages=4)
    keys = chain(*"abcdefgh")
    rig.store(keys[:4], range(4))
    rig.decider.clear()
    rig.settle()
    assert rig.decider.match(keys) == Hit(0, 0, 0)
    assert rig.decider.stats().resident_pages == {HOST: 0, DISK: 0}
    rig.store(keys[:4], range(4))
    assert rig.decider.match(keys).pages == 4


def test_ranks_with_and_without_disk_are_refused() -> None:
    with pytest.raises(ConfigError, match="give all of them one"):
        Decider([RankFacts(4, 4), RankFacts(4)])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("failing", [False, True])
def test_soak(
    engine: Rig, ranks: int, failing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 3 of the field's faults: whatever happens, what came back is what was put."""
    rig = engine(ranks=ranks, host_pages=12, disk=tmp_path, disk_size=2 << 20)
    rng = random.Random(ranks + 10 * failing)
    if failing:
        _fail_sometimes(rig, rng, monkeypatch)
    prompts = [chain(*"abcdefgh"[:n], *name) for n in (2, 5, 8) for name in ("xyzuvw", "123456")]
    hits = 0
    for _ in range(25):
        keys = rng.choice(prompts)[: rng.randint(1, 14)]
        free = rng.sample(range(HBM_PAGES), len(keys))
        found = rig.decider.match(keys).pages
        if found:
            job = rig.decider.get(keys[:found], free[:found], is_awaited=rng.random() < 0.5)
            rig.step()
            rig.settle()
            assert rig.holds(keys[: rig.arrived[job.id]], free[: rig.arrived[job.id]])
            hits += rig.arrived[job.id]
        rig.decider.put(keys, free)
        rig.step(compute=(keys, free))
        if rng.random() < 0.3:
            rig.decider.prefetch(rng.choice(prompts))
        rig.settle()
        rig.wipe()
    for keys in prompts:
        found = rig.decider.match(keys).pages
        job = rig.decider.get(keys[:found], range(found), is_awaited=True)
        rig.settle()
        assert rig.holds(keys[: rig.arrived[job.id]], range(rig.arrived[job.id]))
    assert hits > 20


def _fail_sometimes(rig: Engine, rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in rig.ranks:
        assert isinstance(rank.disk, DiskTier)
        write = rank.disk.write

        def flaky(slots: list[int], pages: list[Page], write: Any = write) -> None:
            if rng.random() < 0.2:
                raise TierIOError("sometimes", tier="disk", errno=5)
            write(slots, pages)

        monkeypatch.setattr(rank.disk, "write", flaky)


def test_an_idle_step_waits_for_the_end_of_a_job(
    engine: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that goes round without a pause takes the interpreter from those it waits for."""
    rig = engine()
    (rank,) = rig.ranks
    monkeypatch.setattr("tiered_kv.carrier.IDLE_S", 30.0)
    rank.carrier.wait_for_news()  # nothing is under way: at once
    rig.decider.put(chain("a"), [0])
    rank.compute(chain("a"), [0])
    rank.carrier.receive(rig.decider.order())
    rank.carrier.start()
    rank.carrier.wait_for_news()
    report = rank.carrier.report()
    assert report is not None
    rig.decider.take(report)
    assert rig.decider.match(chain("a")).ready == 1
