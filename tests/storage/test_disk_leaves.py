"""The entries of an LMDB, read out of its pages, are those that a cursor finds, or it is broken."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import lmdb
import numpy as np
import pytest
import xxhash
from disk_rig import assert_holds, chain, key_of, open_tier, put

from tiered_kv.storage.disk import catalog as catalog_module
from tiered_kv.storage.disk.leaves import BrokenLeavesError, read_rows

KEY_BYTES, VALUE_BYTES = 8, 120


def opened(path: Path) -> lmdb.Environment:
    return lmdb.open(str(path), map_size=64 << 20, lock=False, max_dbs=3)


def by_cursor(env: lmdb.Environment) -> list[bytes]:
    with env.begin() as txn:
        return [key + value for key, value in txn.cursor(db=env.open_db(b"pages", txn=txn))]


def by_pages(path: Path) -> list[bytes]:
    batches = read_rows(path / "data.mdb", b"pages", KEY_BYTES, VALUE_BYTES)
    assert batches is not None
    return [row.tobytes() for rows in batches for row in rows]


def filled(path: Path, count: int, seed: int = 0) -> lmdb.Environment:
    source = random.Random(seed)
    env = opened(path)
    pages = env.open_db(b"pages")
    env.open_db(b"another")
    with env.begin(write=True, db=pages) as txn:
        for _ in range(count):
            txn.put(source.randbytes(KEY_BYTES), source.randbytes(VALUE_BYTES))
    return env


@pytest.mark.parametrize("count", [0, 1, 29, 30, 900, 20_000])
def test_every_entry_is_found_in_order(tmp_path: Path, count: int) -> None:
    """With no leaf, one, and a tree of two and of three levels."""
    env = filled(tmp_path, count)
    found = by_pages(tmp_path)
    assert found == by_cursor(env) == sorted(found)
    assert len(found) == count


def test_entries_are_found_after_many_commits_and_deletions(tmp_path: Path) -> None:
    """Pages are split, merged and written again elsewhere; what was committed last counts."""
    env = filled(tmp_path, 3000)
    source = random.Random(1)
    pages = env.open_db(b"pages")
    for _ in range(30):
        with env.begin(write=True, db=pages) as txn:
            keys = [key for key, _ in txn.cursor()]
            for key in source.sample(keys, 200):
                txn.delete(key)
            for key in source.sample(keys, 50):
                txn.put(key, source.randbytes(VALUE_BYTES))
            for _ in range(source.randrange(250)):
                txn.put(source.randbytes(KEY_BYTES), source.randbytes(VALUE_BYTES))
        assert by_pages(tmp_path) == by_cursor(env)
    with env.begin(write=True, db=pages) as txn:
        txn.drop(pages, delete=False)
    assert by_pages(tmp_path) == []


@pytest.mark.parametrize("at", [500, 999])
def test_an_entry_of_another_length_is_an_error(tmp_path: Path, at: int) -> None:
    env = filled(tmp_path, 1000)
    key = by_cursor(env)[at][:KEY_BYTES]
    with env.begin(write=True, db=env.open_db(b"pages")) as txn:
        txn.put(key, bytes(VALUE_BYTES - 2))
    with pytest.raises(BrokenLeavesError):
        by_pages(tmp_path)


def test_a_database_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    opened(tmp_path).open_db(b"another")
    with pytest.raises(BrokenLeavesError, match="no database b'pages'"):
        by_pages(tmp_path)


def test_a_file_of_another_form_is_left_to_a_cursor(tmp_path: Path) -> None:
    path = tmp_path / "data.mdb"
    for content in (b"", bytes(8192)):
        path.write_bytes(content)
        assert read_rows(path, b"pages", KEY_BYTES, VALUE_BYTES) is None
    filled(tmp_path / "made", 10).close()
    made = bytearray((tmp_path / "made" / "data.mdb").read_bytes())
    made[20] += 1  # data version
    path.write_bytes(made)
    assert read_rows(path, b"pages", KEY_BYTES, VALUE_BYTES) is None


def test_whatever_byte_is_damaged_the_outcome_is_entries_or_one_error(tmp_path: Path) -> None:
    """No page outside the file is looked at, and no loop goes on for ever."""
    env = filled(tmp_path, 2000)
    whole = by_cursor(env)
    with env.begin() as txn:
        used = (env.info()["last_pgno"] + 1) * txn.stat(db=env.open_db(b"pages", txn=txn))["psize"]
    env.close()
    sound = (tmp_path / "data.mdb").read_bytes()[:used]
    source = random.Random(2)
    broken = 0
    heads = [page + at for page in range(0, used, 4096) for at in (0, 10, 12, 16, 17, 4088)]
    for at in [*range(16, 160), *range(4112, 4256), *heads, *source.sample(range(used), 300)]:
        damaged = bytearray(sound)
        damaged[at] ^= source.choice([1, 0x80, 0xFF])
        (tmp_path / "data.mdb").write_bytes(damaged)
        try:
            batches = read_rows(tmp_path / "data.mdb", b"pages", KEY_BYTES, VALUE_BYTES)
            assert sum(map(len, batches or [])) <= len(whole)
        except BrokenLeavesError:
            broken += 1
    assert broken > 100


def test_a_catalog_that_only_a_cursor_can_read_gives_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path / "store")
    put(tier, chain(range(50)))
    tier.close()
    again = open_tier(tmp_path / "store")
    listed = list(again.pages())
    again.close()
    monkeypatch.setattr(catalog_module, "read_rows", lambda *args: None)
    monkeypatch.setattr(catalog_module, "_BATCH_ENTRIES", 7)
    by_hand = open_tier(tmp_path / "store")
    assert list(by_hand.pages()) == listed
    assert len(listed) == 50
    by_hand.close()


def seal_of(entry: bytes | bytearray) -> bytes:
    return xxhash.xxh3_64_intdigest(entry[:-8]).to_bytes(8, "little")


@pytest.mark.parametrize("what", ["seal", "order"])
def test_a_catalog_with_a_damaged_entry_is_rebuilt(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Among many good ones. Whatever was changed in it, no page is lost and none is wrong."""
    path = tmp_path / "store"
    tier = open_tier(path)
    put(tier, chain(range(60)))
    tier.close()
    file = path / "catalog" / "data.mdb"
    content = bytearray(file.read_bytes())
    key = bytes(key_of(30))
    places = [at for at in range(0, len(content) - 32, 2) if bytes(content[at : at + 32]) == key]
    entries = [content[at - KEY_BYTES : at + VALUE_BYTES] for at in places]
    own = [(at, one) for at, one in zip(places, entries, strict=True) if one[-8:] == seal_of(one)]
    assert own, "not where it is a parent; the pages of earlier transactions have it too"
    for at, entry in own:
        if what == "seal":
            entry[KEY_BYTES + 50] ^= 1
        else:
            entry[:KEY_BYTES] = bytes(KEY_BYTES)  # the smallest sequence
            entry[-8:] = seal_of(entry)
        content[at - KEY_BYTES : at + VALUE_BYTES] = entry
    file.write_bytes(content)
    again = open_tier(path)
    assert again.was_rebuilt
    assert {"seal": "does not agree with its seal", "order": "not in order at"}[what] in caplog.text
    assert "rebuilding it" in caplog.text
    assert sorted(page.key for page in again.pages()) == sorted(key_of(n) for n in range(60))
    assert not again.check().problems
    again.close()
    shutil.rmtree(path)


def test_rows_are_the_callers_own(tmp_path: Path) -> None:
    env = filled(tmp_path, 40)
    batches = read_rows(tmp_path / "data.mdb", b"pages", KEY_BYTES, VALUE_BYTES)
    assert batches is not None
    rows = np.concatenate(list(batches))
    before = rows.copy()
    with env.begin(write=True, db=env.open_db(b"pages")) as txn:
        for key, _ in list(txn.cursor()):
            txn.put(key, bytes(VALUE_BYTES))
    assert (rows == before).all()


def test_entries_that_name_no_place_are_dropped_among_good_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A segment is gone: what lay there is dropped, the rest is read, and slots are used again."""
    path = tmp_path / "store"
    tier = open_tier(path)
    assert tier.capacity_pages > 60
    pages = chain(range(60))
    slots = put(tier, pages)
    places = [tier._records.record(slot) for slot in slots]
    gone = max(place.segment for place in places if place is not None)
    kept = [n for n, place in enumerate(places) if place is not None and place.segment != gone]
    assert 0 < len(kept) < 60
    tier.close()
    (path / "segments" / f"{gone:05d}.seg").unlink()
    again = open_tier(path)
    assert not again.was_rebuilt
    assert f"{60 - len(kept)} catalog entries name no place" in caplog.text
    found = {page.key: page.slot for page in again.pages()}
    assert found.keys() == {pages[n].key for n in kept}
    assert sorted(found.values()) == list(range(len(kept)))
    lost = [page for page in pages if page.key not in found]
    assert_holds(again, put(again, lost), lost)
    assert_holds(again, [found[pages[n].key] for n in kept], [pages[n] for n in kept])
    assert not again.check().problems
    again.close()
