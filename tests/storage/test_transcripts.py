"""Transcripts: token ids by name, on disk or in memory; whole or absent, and never too many."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.errors import CapacityError, ConfigError, StoreClosedError, TierIOError
from tiered_kv.storage.transcripts import Tokens, Transcripts

ROOT = Path(__file__).resolve().parents[2]
ROOM = 1 << 20


def name_of(n: int) -> bytes:
    return hashlib.sha256(b"%d" % n).digest()


def tokens_of(n: int, count: int = 1000) -> Tokens:
    return np.random.default_rng(n).integers(0, 2**32, count, dtype=np.uint32)


def du_bytes(path: Path) -> int:
    out = subprocess.run(["du", "-s", "-B1", str(path)], capture_output=True, text=True, check=True)
    return int(out.stdout.split()[0])


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "sessions" if request.param == "disk" else None


@pytest.fixture
def on_disk(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


def test_what_was_written_last_comes_back(folder: Path | None) -> None:
    kept = Transcripts(folder, ROOM)
    assert kept.read(name_of(1)) is None
    for count in (1000, 0, 70_000):
        kept.write(name_of(1), tokens_of(1, count))
        kept.write(name_of(2), tokens_of(2))
        found = kept.read(name_of(1))
        assert found is not None and np.array_equal(found, tokens_of(1, count))
    kept.remove(name_of(1))
    kept.remove(name_of(1))
    assert kept.read(name_of(1)) is None
    assert kept.read(name_of(2)) is not None
    kept.close()


def test_transcripts_on_disk_survive_the_process(on_disk: Path) -> None:
    program = (
        "import numpy as np, pathlib, sys; from tiered_kv.storage.transcripts import Transcripts\n"
        f"kept = Transcripts(pathlib.Path({str(on_disk)!r}), {ROOM})\n"
        f"kept.write({name_of(1)!r}, np.arange(5000, dtype=np.uint32)); import os; os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False, timeout=60)
    found = Transcripts(on_disk, ROOM).read(name_of(1))
    assert found is not None and found.tolist() == list(range(5000))


def test_nothing_is_made_before_the_first_use(on_disk: Path) -> None:
    Transcripts(on_disk, ROOM).close()
    assert not on_disk.exists()


def test_those_kept_longest_ago_give_way(folder: Path | None) -> None:
    kept = Transcripts(folder, 4096 + 5 * (4096 + 192) + 100)
    for n in range(5):
        kept.write(name_of(n), tokens_of(n, 500))
    kept.write(name_of(0), tokens_of(10, 500))  # there is room for its old and its new self: not 1
    left = [n for n in range(5) if kept.read(name_of(n)) is not None]
    assert left == [0, 2, 3, 4]
    kept.write(name_of(5), tokens_of(5, 500))
    kept.write(name_of(6), tokens_of(6, 500))
    left = [n for n in range(7) if kept.read(name_of(n)) is not None]
    assert left == [0, 3, 4, 5, 6]
    kept.close()


def test_order_of_keeping_is_known_after_a_restart(on_disk: Path) -> None:
    room = 4096 + 5 * (4096 + 192)
    kept = Transcripts(on_disk, room)
    for at, n in enumerate((3, 0, 2, 1)):
        kept.write(name_of(n), tokens_of(n, 500))
        os.utime(on_disk / name_of(n).hex(), ns=(at, at))
    kept.close()
    kept = Transcripts(on_disk, room)
    kept.write(name_of(4), tokens_of(4, 500))
    kept.write(name_of(5), tokens_of(5, 500))
    assert [n for n in range(6) if kept.read(name_of(n)) is not None] == [0, 1, 2, 4, 5]


def test_disk_use_stays_within_the_bound_whatever_is_kept(on_disk: Path) -> None:
    room = 64 << 10
    kept = Transcripts(on_disk, room)
    random = np.random.default_rng(7)
    for step in range(200):
        kept.write(name_of(int(random.integers(30))), tokens_of(step, int(random.integers(5000))))
        if step % 10 == 0:
            assert du_bytes(on_disk) <= room
    assert len(list(on_disk.iterdir())) >= 3


def test_a_conversation_larger_than_the_bound_is_refused_and_nothing_is_lost(
    folder: Path | None,
) -> None:
    kept = Transcripts(folder, 32 << 10)
    kept.write(name_of(1), tokens_of(1))
    kept.write(name_of(2), tokens_of(2))
    with pytest.raises(CapacityError, match="20000 tokens cannot be kept"):
        kept.write(name_of(1), tokens_of(1, 20_000))
    for n in (1, 2):
        found = kept.read(name_of(n))
        assert found is not None and np.array_equal(found, tokens_of(n))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other name", "version"])
def test_a_damaged_transcript_is_none_at_all(
    on_disk: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Transcripts(on_disk, ROOM)
    kept.write(name_of(1), tokens_of(1))
    kept.write(name_of(2), tokens_of(2))
    file = on_disk / name_of(1).hex()
    record = bytearray(file.read_bytes())
    if damage == "flip":
        record[-5] ^= 1
    elif damage == "cut":
        del record[-4:]
    elif damage == "empty":
        record.clear()
    elif damage == "other name":
        record = bytearray((on_disk / name_of(2).hex()).read_bytes())
    else:
        record[8] = 9
    file.write_bytes(record)
    assert kept.read(name_of(1)) is None
    assert "is damaged: dropped" in caplog.text
    assert not file.exists()
    kept.write(name_of(1), tokens_of(3))
    found = kept.read(name_of(1))
    assert found is not None and np.array_equal(found, tokens_of(3))


def test_files_are_private_and_no_symlink_is_followed(on_disk: Path, tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        kept = Transcripts(on_disk, ROOM)
        kept.write(name_of(1), tokens_of(1))
    finally:
        os.umask(previous)
    assert stat.S_IMODE(on_disk.stat().st_mode) == 0o700
    file = on_disk / name_of(1).hex()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "elsewhere").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    assert kept.read(name_of(1)) is None
    assert (tmp_path / "elsewhere").exists()
    linked = tmp_path / "linked"
    linked.symlink_to(on_disk)
    with pytest.raises(ConfigError, match="is no directory of ours"):
        Transcripts(linked, ROOM).read(name_of(1))


def test_what_a_killed_writer_left_is_cleared_and_foreign_files_are_let_be(on_disk: Path) -> None:
    on_disk.mkdir()
    (on_disk / "new.tmp").write_bytes(b"half")
    (on_disk / "notes").write_bytes(b"mine")
    kept = Transcripts(on_disk, ROOM)
    assert kept.read(name_of(1)) is None
    assert sorted(path.name for path in on_disk.iterdir()) == ["notes"]


def test_a_full_device_is_an_error_and_what_was_kept_is_still_there(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Transcripts(on_disk, ROOM)
    kept.write(name_of(1), tokens_of(1))

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(TierIOError, match="writing a transcript failed: No space left") as info:
            kept.write(name_of(1), tokens_of(2))
    assert info.value.errno == errno.ENOSPC
    found = kept.read(name_of(1))
    assert found is not None and np.array_equal(found, tokens_of(1))
    assert [path.name for path in on_disk.iterdir()] == [name_of(1).hex()]


def test_closed_transcripts_say_so(folder: Path | None) -> None:
    kept = Transcripts(folder, ROOM)
    kept.write(name_of(1), tokens_of(1))
    kept.close()
    kept.close()
    with pytest.raises(StoreClosedError, match="its sessions cannot be read or kept"):
        kept.read(name_of(1))
    with pytest.raises(StoreClosedError):
        kept.write(name_of(1), tokens_of(1))
