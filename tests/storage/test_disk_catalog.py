"""The catalog alone: in order of sequence, dense, and never too full to drop what is freed."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import lmdb
import pytest
from disk_rig import assert_holds, chain, key_of, open_tier, put

from tiered_kv.errors import TierIOError
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.entries import Item, items_of, rows_from
from tiered_kv.storage.disk.extent import Record

GENERATIONS = {0: 7, 1: 9}
LEAF_ENTRIES = 29


def record(sequence: int, segment: int = 0) -> Record:
    return Record(key_of(sequence), None, bytes(16), sequence, segment, sequence * 4096, 4096)


def items(sequences: list[int]) -> list[Item]:
    return items_of(rows_from([record(sequence) for sequence in sequences]), GENERATIONS)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    made = Catalog(tmp_path, 640 << 10)
    yield made
    made.close()


def sequences(catalog: Catalog) -> list[int]:
    return [found.sequence for found, _ in catalog.records()]


def used_pages(catalog: Catalog) -> tuple[int, int]:
    """Leaves of entries, and pages of the file that were ever used."""
    env = catalog._env
    with env.begin(db=catalog._entries) as txn:
        leaves = int(txn.stat(db=catalog._entries)["leaf_pages"])
    return leaves, int(env.info()["last_pgno"]) + 1


def test_records_are_listed_in_order_of_sequence_with_all_they_say(catalog: Catalog) -> None:
    catalog.commit(added=items([5, 6, 300]), generations=GENERATIONS)
    catalog.prepare(added=items([70_000, 1 << 41]), deleted=[6, 999], generations=GENERATIONS)
    expected = [5, 300, 70_000, 1 << 41]
    assert list(catalog.records()) == [(record(sequence), 7) for sequence in expected]
    (batch,) = catalog.batches()
    assert batch["sequence"].tolist() == expected
    assert batch["key"].tobytes() == b"".join(map(key_of, expected))


def test_what_does_not_follow_what_is_there_is_not_written(catalog: Catalog) -> None:
    catalog.commit(added=items([10, 20]), generations=GENERATIONS)
    for added in ([20], [15], [30, 19], [30, 30]):
        listed = [item for sequence in added for item in items([sequence])]
        for write in (catalog.prepare, catalog.commit):
            with pytest.raises(TierIOError, match="does not follow"):
                write(added=listed, deleted=[10], generations=GENERATIONS)
        assert sequences(catalog) == [10, 20], "all of it or nothing"


def test_a_record_that_has_moved_keeps_its_place_in_the_order(catalog: Catalog) -> None:
    catalog.commit(added=items([1, 2, 3]), generations=GENERATIONS)
    moved = [record(3, segment=1), record(4, segment=1), record(1, segment=1)]
    catalog.commit(moved=moved, generations=GENERATIONS)
    assert list(catalog.records()) == [(moved[2], 9), (record(2), 7), (moved[0], 9)]


def test_of_records_that_have_moved_twice_the_later_place_counts(catalog: Catalog) -> None:
    """Compaction moved them, its commit failed, and it moved them again: both are unsaved."""
    numbers = list(range(1, 101))
    catalog.commit(added=items(numbers), generations=GENERATIONS)
    moved = [record(number, segment) for segment in (2, 1) for number in numbers]
    catalog.commit(moved=moved, generations={**GENERATIONS, 2: 8})
    assert list(catalog.records()) == [(record(number, segment=1), 9) for number in numbers]


def test_what_a_nearly_full_catalog_moves_ahead_counts_if_the_rest_never_comes(
    catalog: Catalog,
) -> None:
    """Opening drops an entry of another generation than its segment has."""
    numbers = list(range(1, 41))
    catalog.commit(added=items(numbers), generations={0: 7})
    ends = iter([lmdb.MapFullError("no room"), OSError(errno.EIO, "the medium broke")])

    def breaks() -> None:
        raise next(ends)

    with pytest.raises(OSError, match="the medium broke"):
        catalog.commit(
            moved=[record(number, segment=1) for number in numbers],
            generations=GENERATIONS,
            when=breaks,
        )
    assert list(catalog.records()) == [(record(number, segment=1), 9) for number in numbers]
    assert catalog.generations() == GENERATIONS


def test_pages_that_come_and_go_in_order_take_as_many_leaves_as_they_fill(
    catalog: Catalog,
) -> None:
    """A write of 100 changes 4 leaves at either end, not 200 anywhere: by key it would."""
    for first in range(0, 6000, 100):
        gone = range(first - 1000, first - 900) if first >= 1000 else ()
        added = items([*range(first, first + 100)])
        catalog.commit(added=added, deleted=[*gone], generations=GENERATIONS)
    leaves, pages = used_pages(catalog)
    assert leaves <= 1000 // LEAF_ENTRIES + 2
    assert pages <= leaves + 40


def test_a_catalog_that_is_nearly_full_takes_changes_everywhere_in_it(
    catalog: Catalog,
) -> None:
    """In one transaction they would need each leaf twice, and 160 pages is all there is."""
    catalog.commit(added=items([*range(3000)]), generations=GENERATIONS)
    leaves, _ = used_pages(catalog)
    assert 100 < leaves < 110
    once = [*range(0, 3000, 30)]
    with catalog._env.begin(write=True, db=catalog._entries) as txn:
        listed = [sequence.to_bytes(8, "big") for sequence in once]
        with pytest.raises(lmdb.MapFullError):
            list(map(txn.delete, listed))
        txn.abort()
    for step in range(8):
        gone = [sequence + step for sequence in once]
        moved = [record(sequence + 10, segment=1) for sequence in once]
        first = 3000 + 10 * step
        catalog.commit(
            added=items([*range(first, first + 10)]),
            deleted=gone,
            moved=moved,
            generations=GENERATIONS,
        )
    left = [n for n in range(3000) if n % 30 >= 8]
    assert sequences(catalog) == [*left, *range(3000, 3080)]
    where = {found.sequence: (found.segment, generation) for found, generation in catalog.records()}
    assert {n % 30 == 10 for n in left if where[n] == (1, 9)} == {True}


def test_when_even_that_is_too_much_nothing_counts_and_it_says_so(catalog: Catalog) -> None:
    catalog.commit(added=items([*range(3000)]), generations=GENERATIONS, counted_below=3000)
    with pytest.raises(TierIOError, match="is full: nothing of this batch was stored"):
        catalog.commit(
            added=items([*range(3000, 9000)]), generations=GENERATIONS, counted_below=9000
        )
    assert sequences(catalog) == [*range(3000)]
    assert catalog.counted_below(0) == 3000


def test_a_store_of_format_1_is_opened_with_all_its_pages_and_is_of_format_2_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its catalog is in order of keys; the segments are the same."""
    path = tmp_path / "store"
    pages = chain(range(40))
    tier = open_tier(path)
    put(tier, pages)
    tier.close()
    with closing(lmdb.open(str(path / "catalog"), lock=False, max_dbs=3)) as env:
        entries = env.open_db(b"entries")
        with env.begin(write=True) as txn:
            txn.drop(entries)
            by_key = env.open_db(b"pages", txn=txn)
            for page in pages:
                txn.put(page.key, bytes(96), db=by_key)
    marker = path / "format.json"
    fields = json.loads(marker.read_text())
    assert fields["version"] == 2
    marker.write_text(json.dumps(fields | {"version": 1}))
    again = open_tier(path)
    assert again.was_rebuilt and "the disk catalog is of format 1; rebuilding it" in caplog.text
    found = {stored.key: stored.slot for stored in again.pages()}
    assert_holds(again, [found[page.key] for page in pages], pages)
    assert again.check().is_clean
    again.close()
    assert json.loads(marker.read_text()) == fields
    again = open_tier(path)
    assert (again.was_rebuilt, again.recovered_pages) == (False, 40)
    again.close()
