"""Killed at any point, a disk store opens clean and holds every page that it acknowledged."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk.ring import is_ring_allowed

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 8192
CAPACITY_BYTES = 2 << 20

# Writes and frees pages for ever, saying what is durable, until it is killed at the n-th call of a
# function (argv: path, function, "before" | "half" | "after", n, page and capacity bytes).
CHILD = """
import hashlib, os, signal, sys
import numpy as np
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk import DiskTier
from tiered_kv.storage.disk import tier as module, writes
from tiered_kv.storage.disk.catalog import Catalog
from tiered_kv.storage.disk.direct_io import aligned_buffer
from tiered_kv.storage.disk.ring import Ring

module._AHEAD_PAGES, module._AHEAD_BYTES = 3, 0  # most writes: in two steps
path, where, moment = sys.argv[1:4]
wanted, page_bytes, capacity_bytes = map(int, sys.argv[4:])
owner = next(one for one in (os, Catalog, Ring) if hasattr(one, where))
if owner is Ring:
    writes.RING_BYTES = 0  # of aligned pages every chunk goes there
real, calls = getattr(owner, where), 0

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def counted(*args, **kwargs):
    global calls
    calls += 1
    if calls != wanted:
        return real(*args, **kwargs)
    if moment == "half":
        vector = args[1][0]
        real(args[0], [vector[: len(vector) // 8192 * 4096]], args[2])
    if moment == "after":
        real(*args, **kwargs)
    die()

tier = DiskTier.open(path, page_bytes, capacity_bytes, "f")
setattr(owner, where, counted)
rng = np.random.default_rng(wanted)
held = {stored.slot: stored.key for stored in tier.pages()}
number = tier.recovered_pages * 1000
say = lambda *words: os.write(1, (" ".join(words) + "\\n").encode())
say("ready")
while True:
    count = int(rng.integers(1, 9))
    slots = tier.reserve(count)
    while slots is None:
        gone = rng.permutation(sorted(held))[:20].tolist()
        say("free", *(held.pop(slot).hex() for slot in gone))
        tier.free(gone)
        slots = tier.reserve(count)
    pages = []
    for slot in slots:
        key = hashlib.sha256(b"%d" % number).digest()
        seed = int.from_bytes(key[:8], "little")
        data = np.random.default_rng(seed).integers(0, 256, page_bytes, dtype=np.uint8)
        if owner is Ring:
            memory = aligned_buffer(page_bytes)
            memory[:] = data
            data = memory
        pages.append(Page(key, None, data))
        held[slot] = key
        number += 1
    tier.write(slots, pages)
    say("done", *(page.key.hex() for page in pages))
"""


def run_until_killed(path: Path, where: str, moment: str, nth: int) -> set[PageKey]:
    """The pages that were acknowledged and not freed."""
    sizes = [str(number) for number in (nth, PAGE_BYTES, CAPACITY_BYTES)]
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), where, moment, *sizes],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == -9, child.stderr
    held: set[PageKey] = set()
    for line in child.stdout.splitlines():
        word, *keys = line.split()
        named = {PageKey(bytes.fromhex(key)) for key in keys}
        held = held - named if word == "free" else held | named
    return held


def assert_clean(path: Path, acknowledged: set[PageKey]) -> None:
    tier = DiskTier.open(path, PAGE_BYTES, CAPACITY_BYTES, "f")
    assert not tier.was_rebuilt
    assert tier.disk_usage_bytes <= CAPACITY_BYTES
    found = {stored.key: stored.slot for stored in tier.pages()}
    assert acknowledged <= set(found)
    into = [np.empty(PAGE_BYTES, np.uint8) for _ in found]
    assert tier.read(list(found.values()), into) == [None] * len(found)
    for key, got in zip(found, into, strict=True):
        seed = int.from_bytes(key[:8], "little")
        wanted = np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, dtype=np.uint8)
        assert np.array_equal(got, wanted)
    assert tier.check().problems == []
    tier.close()


@pytest.mark.parametrize(
    ("where", "moment", "nth"),  # "enter": of the ring, where io_uring is allowed
    [
        ("pwritev", "before", 3),
        ("pwritev", "half", 5),
        ("pwritev", "half", 120),
        ("pwritev", "after", 150),
        ("enter", "before", 3),
        ("enter", "after", 40),
        ("enter", "after", 121),
        ("enter", "before", 182),
        ("fdatasync", "before", 90),
        ("fdatasync", "after", 131),
        ("commit", "before", 60),
        ("commit", "before", 101),
        ("commit", "after", 102),
        ("prepare", "before", 41),
        ("prepare", "after", 3),
        ("prepare", "after", 42),
        ("posix_fallocate", "before", 1),
        ("posix_fallocate", "after", 2),
    ],
)
def test_killed_store_opens_clean(tmp_path: Path, where: str, moment: str, nth: int) -> None:
    """LMCache/LMCache#562, #1175: after a restart the index is lost and the files stay for ever."""
    if where == "enter" and not is_ring_allowed():
        pytest.skip("io_uring is not allowed here")
    path = tmp_path / "store"
    assert_clean(path, run_until_killed(path, where, moment, nth))


def test_store_killed_again_and_again_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "store"
    deaths = (
        ("pwritev", "half", 40),
        ("prepare", "after", 9),
        ("commit", "before", 60),
        ("prepare", "after", 8),
        ("pwritev", "after", 70),
    )
    for where, moment, nth in deaths:
        assert_clean(path, run_until_killed(path, where, moment, nth))


def test_killed_store_without_a_catalog_finds_only_sound_pages(tmp_path: Path) -> None:
    path = tmp_path / "store"
    run_until_killed(path, "pwritev", "half", 30)
    (path / "catalog" / "data.mdb").unlink()
    tier = DiskTier.open(path, PAGE_BYTES, CAPACITY_BYTES, "f")
    assert tier.was_rebuilt
    assert tier.recovered_pages > 20
    assert tier.check().problems == []
    tier.close()


def test_killed_creation_is_finished_by_the_next_opening(tmp_path: Path) -> None:
    for nth, name in enumerate(("rename", "fsync", "mkdir", "ftruncate")):
        path = tmp_path / str(nth)
        code = (
            "import os, signal\nfrom tiered_kv.storage.disk import DiskTier\n"
            f"os.{name} = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"DiskTier.open({str(path)!r}, {PAGE_BYTES}, {CAPACITY_BYTES}, 'f')\n"
        )
        killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
        assert killed.returncode == -9
        assert_clean_when_empty(path)


def assert_clean_when_empty(path: Path) -> None:
    tier = DiskTier.open(path, PAGE_BYTES, CAPACITY_BYTES, "f")
    assert (tier.recovered_pages, tier.was_rebuilt) == (0, False)
    key = PageKey(hashlib.sha256(b"first").digest())
    slots = tier.reserve(1)
    assert slots is not None
    tier.write(slots, [Page(key, None, np.zeros(PAGE_BYTES, np.uint8))])
    assert tier.check().problems == []
    tier.close()
