"""TierJobs: every job ends once, loads wait for no save, and what fails is a page not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from disk_rig import PAGE_BYTES, key_of

from tiered_kv.disk_store import DiskStore
from tiered_kv.errors import ConfigError, StoreClosedError, TierIOError
from tiered_kv.keys import PageKey
from tiered_kv.plugins.vllm import tier_jobs
from tiered_kv.plugins.vllm.tier_jobs import Ended, TierJobs
from tiered_kv.plugins.vllm.tier_settings import TierSettings

DEADLINE_S = 30.0


class Scripted:
    """A store that keeps pages in a dict, holds calls up at a gate, and fails on command."""

    def __init__(self) -> None:
        self.pages: dict[PageKey, bytes] = {}
        self.puts: list[list[PageKey]] = []
        self.parents: dict[PageKey, PageKey | None] = {}
        self.touched: list[Sequence[PageKey]] = []
        self.error: Exception | None = None
        self.put_gate, self.get_gate = threading.Event(), threading.Event()
        self.put_gate.set()
        self.get_gate.set()
        self.at_put, self.at_get = threading.Semaphore(0), threading.Semaphore(0)

    def get(self, keys: Sequence[PageKey], into: Sequence[Any]) -> list[bool]:
        self.at_get.release()
        assert self.get_gate.wait(DEADLINE_S)
        if self.error:
            raise self.error
        for key, row in zip(keys, into, strict=True):
            row[:] = np.frombuffer(self.pages.get(key, bytes(row.nbytes)), np.uint8)
        return [key in self.pages for key in keys]

    def put(
        self, keys: Sequence[PageKey], pages: Sequence[Any], parents: Sequence[PageKey | None]
    ) -> list[bool]:
        self.puts.append(list(keys))
        self.at_put.release()
        assert self.put_gate.wait(DEADLINE_S)
        if self.error:
            raise self.error
        self.pages |= {key: row.tobytes() for key, row in zip(keys, pages, strict=True)}
        self.parents |= dict(zip(keys, parents, strict=True))
        return [True] * len(keys)

    def touch(self, keys: Sequence[PageKey]) -> None:
        self.touched.append(keys)


class Desk:
    """Jobs over a scripted store and sixteen rows of numbers."""

    def __init__(self) -> None:
        self.store = Scripted()
        self.rows = np.arange(16, dtype=np.uint8)[:, None].repeat(PAGE_BYTES, axis=1)
        self.jobs = TierJobs(cast("DiskStore", self.store), self.rows)
        self.is_closed = False

    def save(self, job_id: int, *numbers: int, rows: Sequence[int] | None = None) -> None:
        keys = [key_of(number) for number in numbers]
        self.jobs.save(job_id, keys, rows or numbers, [None, *keys[:-1]])

    def load(self, job_id: int, *numbers: int, rows: Sequence[int] | None = None) -> None:
        self.jobs.load(job_id, [key_of(number) for number in numbers], rows or numbers)

    def ended(self) -> dict[int, Ended]:
        self.jobs.drain()
        ended = self.jobs.ended()
        assert len({one.job_id for one in ended}) == len(ended)
        return {one.job_id: one for one in ended}

    def wait_until(self, condition: Callable[[TierJobs], object]) -> None:
        with self.jobs._changed:
            assert self.jobs._changed.wait_for(lambda: condition(self.jobs), DEADLINE_S)

    def close(self, deadline_s: float = DEADLINE_S) -> None:
        self.is_closed = True
        self.jobs.close(deadline_s)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.store.put_gate.set()
    desk.store.get_gate.set()
    if not desk.is_closed:
        desk.jobs.close(DEADLINE_S)


def test_a_load_fills_its_rows_and_says_which_pages_came(desk: Desk) -> None:
    desk.save(0, 3, 4)
    desk.jobs.drain()
    desk.load(1, 4, 9, 3, rows=[10, 11, 12])
    ended = desk.ended()
    assert (ended[0].is_load, ended[0].done) == (False, (True, True))
    assert (ended[1].is_load, ended[1].done) == (True, (True, False, True))
    assert [set(desk.rows[row]) for row in (10, 12)] == [{4}, {3}]


def test_a_load_does_not_wait_for_a_save(desk: Desk) -> None:
    desk.store.pages[key_of(5)] = desk.rows[5].tobytes()
    desk.store.put_gate.clear()
    desk.save(0, 1)
    assert desk.store.at_put.acquire(timeout=DEADLINE_S)
    desk.load(1, 5, rows=[8])
    desk.wait_until(lambda jobs: jobs._ended)
    assert [one.job_id for one in desk.jobs.ended()] == [1]


def test_saves_that_wait_become_durable_in_one_commit(desk: Desk) -> None:
    desk.store.put_gate.clear()
    desk.save(0, 1)
    assert desk.store.at_put.acquire(timeout=DEADLINE_S)
    for job_id in range(1, 6):
        desk.save(job_id, 2 * job_id, 2 * job_id + 1)
    desk.store.put_gate.set()
    assert {one.done for one in desk.ended().values()} == {(True,), (True, True)}
    assert [len(keys) for keys in desk.store.puts] == [1, 10]
    assert desk.store.parents[key_of(5)] == key_of(4)
    assert desk.store.parents[key_of(4)] is None


def test_a_commit_has_a_bound(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_jobs, "_SAVE_BATCH_BYTES", 4 * PAGE_BYTES)
    bounded = TierJobs(cast("DiskStore", desk.store), desk.rows)
    desk.store.put_gate.clear()
    keys = [key_of(number) for number in range(12)]
    bounded.save(0, keys[:1], [0], [None])
    assert desk.store.at_put.acquire(timeout=DEADLINE_S)
    for job_id, at in enumerate(range(1, 10, 3), start=1):
        bounded.save(job_id, keys[at : at + 3], range(at, at + 3), [None] * 3)
    desk.store.put_gate.set()
    bounded.close(DEADLINE_S)
    assert [len(put) for put in desk.store.puts] == [1, 3, 3, 3]


@pytest.mark.parametrize("error", [TierIOError("injected", tier="disk"), ZeroDivisionError()])
def test_an_error_is_a_job_that_did_nothing_and_the_next_one_goes_on(
    error: Exception, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.store.error = error
    desk.save(0, 1, 2)
    desk.load(1, 3)
    assert {one.job_id: one.done for one in desk.ended().values()} == {
        0: (False, False),
        1: (False,),
    }
    assert "saving 2 pages failed" in caplog.text
    assert "loading 1 pages failed" in caplog.text
    desk.store.error = None
    desk.save(2, 1)
    assert desk.ended()[2].done == (True,)


def test_pages_are_marked_as_used_after_the_saves_before(desk: Desk) -> None:
    desk.store.put_gate.clear()
    desk.save(0, 1)
    assert desk.store.at_put.acquire(timeout=DEADLINE_S)
    desk.save(1, 2)
    desk.jobs.touch([key_of(1), key_of(2)])
    assert desk.store.touched == []
    desk.store.put_gate.set()
    desk.close()
    assert desk.store.touched == [[key_of(1), key_of(2)]]
    assert key_of(2) in desk.store.pages


def test_close_saves_what_is_queued_and_fails_loads(desk: Desk) -> None:
    desk.store.put_gate.clear()
    desk.store.get_gate.clear()
    desk.save(0, 1)
    assert desk.store.at_put.acquire(timeout=DEADLINE_S)
    desk.save(1, 2)
    for job_id in range(2, 8):
        desk.load(job_id, 1, rows=[10])
    closing = threading.Thread(target=desk.close)
    closing.start()
    desk.wait_until(lambda jobs: not jobs._loads)
    desk.store.put_gate.set()
    desk.store.get_gate.set()
    closing.join(DEADLINE_S)
    assert key_of(2) in desk.store.pages
    assert sorted(one.job_id for one in desk.jobs.ended()) == list(range(8))
    with pytest.raises(StoreClosedError):
        desk.load(9, 1)


def test_close_gives_up_saves_after_its_deadline(desk: Desk) -> None:
    desk.store.put_gate.clear()
    desk.save(0, 1)
    assert desk.store.at_put.acquire(timeout=DEADLINE_S)
    desk.save(1, 2)
    closing = threading.Thread(target=desk.close, args=[0.0])
    closing.start()
    desk.wait_until(lambda jobs: not jobs._saves)
    desk.store.put_gate.set()
    closing.join(DEADLINE_S)
    assert {one.job_id: one.done for one in desk.jobs.ended()} == {0: (True,), 1: (False,)}
    assert key_of(2) not in desk.store.pages


def test_a_disk_that_hangs_is_an_error_of_close(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then keeps the memory that the hanging transfer may still write to."""
    monkeypatch.setattr(tier_jobs, "_STUCK_S", 0.05)
    desk.store.get_gate.clear()
    desk.load(0, 1)
    assert desk.store.at_get.acquire(timeout=DEADLINE_S)
    with pytest.raises(TierIOError, match="does not answer"):
        desk.close(0.01)


def test_the_memory_is_free_after_close(desk: Desk) -> None:
    """vLLM releases its view of the host tier then, which fails while anything still exports it."""
    memory = memoryview(bytearray(16 * PAGE_BYTES)).cast("B", (16, PAGE_BYTES))
    jobs = TierJobs(cast("DiskStore", desk.store), np.asarray(memory))
    jobs.save(0, [key_of(1)], [1], [None])
    jobs.load(1, [key_of(2)], [2])
    jobs.close(DEADLINE_S)
    memory.release()


def test_with_a_real_store_pages_are_back_after_it_was_reopened(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (8, PAGE_BYTES), dtype=np.uint8)
    before = rows.copy()
    keys = [key_of(number) for number in range(4)]
    for turn in range(2):
        with DiskStore.open(tmp_path / "kv", 4 << 20, PAGE_BYTES, "f") as store:
            jobs = TierJobs(store, rows)
            if turn == 0:
                jobs.save(0, keys, range(4), [None, *keys[:-1]])
            else:
                jobs.load(0, keys, range(4, 8))
                jobs.drain()
            jobs.close(DEADLINE_S)
            assert [one.done for one in jobs.ended()] == [(True,) * 4]
    assert np.array_equal(rows[4:], before[:4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"disk": "kv"}, "needs 'disk_size': bytes the directory may ever take"),
        ({"disk_size": "1GiB"}, "needs 'disk': directory of the pages"),
        ({"disk": "kv", "disk_size": "-1"}, "disk_size="),
        ({"disk": "kv", "disk_size": "1GiB", "policy": "mru"}, "policy='mru'"),
        ({"disk": "kv", "disk_size": "1GiB", "io_threads": 0}, "io_threads=0"),
        ({"disk": "kv", "disk_size": "1GiB", "root_dir": "/x"}, "no key 'root_dir'; its keys are"),
    ],
)
def test_a_wrong_tier_setting_is_one_line_that_says_what_would_be_right(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        TierSettings.parse(given)
    assert "\n" not in str(raised.value)


def test_vllms_own_keys_beside_a_tiers_are_left_to_vllm() -> None:
    mine = {"disk": "/kv", "disk_size": "8GiB"}
    assert TierSettings.parse(mine | {"type": "TieredKVTier"}) == TierSettings.parse(mine)


def test_each_replica_has_a_directory_and_a_share_of_the_size() -> None:
    whole = TierSettings.parse({"disk": "/kv", "disk_size": "8GiB"})
    assert whole.of_replica(0, 1) == whole
    share = whole.of_replica(3, 4)
    assert (share.disk, share.disk_size) == (Path("/kv/replica-3"), 2 << 30)
