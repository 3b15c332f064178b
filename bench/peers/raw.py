"""The machine alone: what no store can beat by much. One memcpy; the disk past the page cache."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bench.peers.adapter import Adapter, Setup
from bench.peers.pages import DISK_SETS, Bytes, buffer, rows

READ_BYTES, READ_THREADS = 4 << 20, 4
WRITE_BYTES, WRITE_THREADS = 8 << 20, 4


class Raw(Adapter):
    """`put` and `get_host` are one contiguous copy each, disk operations large requests.

    The file holds as many sets as a store's disk, each round writes and reads the next. It has been
    written once before it is timed, as the stores have by then.
    """

    operations = ("put", "get_host", "put_durable", "get_cold")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._source, self._target = buffer(setup.set_bytes), buffer(setup.set_bytes)
        self._host = buffer(setup.set_bytes)
        self._writers = ThreadPoolExecutor(WRITE_THREADS)
        self._readers = ThreadPoolExecutor(READ_THREADS)
        self._path = setup.folder / "raw"
        self._fd = _open_direct(str(self._path))
        os.posix_fallocate(self._fd, 0, DISK_SETS * setup.set_bytes)
        for number in range(DISK_SETS):
            self.begin(number)
            self.put_durable()

    def configuration(self) -> dict[str, Any]:
        """Request sizes and threads."""
        return {
            "memcpy": "1 thread, contiguous",
            "read": f"O_DIRECT, {READ_BYTES >> 20} MiB x {READ_THREADS} threads",
            "write": f"O_DIRECT, {WRITE_BYTES >> 20} MiB x {WRITE_THREADS} threads, fdatasync",
            "file": f"{DISK_SETS} sets, written once before, overwritten in turn",
        }

    def versions(self) -> dict[str, str]:
        return {"numpy": np.__version__}

    def begin(self, number: int) -> None:
        """Go on to the next place in the file."""
        super().begin(number)
        self._start = number % DISK_SETS * self.setup.set_bytes

    def sources(self) -> list[Bytes]:
        return rows(self._source, self.setup.page_bytes)

    def targets(self) -> list[Bytes]:
        return rows(self._target, self.setup.page_bytes)

    def put(self) -> None:
        np.copyto(self._host, self._source)

    def get_host(self) -> None:
        np.copyto(self._target, self._host)

    def put_durable(self) -> None:
        def one(at: int) -> None:
            piece = self._source[at : at + WRITE_BYTES]
            if os.pwritev(self._fd, [piece.data], self._start + at) != piece.nbytes:
                raise RuntimeError("short write")

        list(self._writers.map(one, range(0, self.setup.set_bytes, WRITE_BYTES)))
        os.fdatasync(self._fd)

    def get_cold(self) -> None:
        def one(at: int) -> None:
            piece = self._target[at : at + READ_BYTES]
            if os.preadv(self._fd, [piece.data], self._start + at) != piece.nbytes:
                raise RuntimeError("short read")

        list(self._readers.map(one, range(0, self.setup.set_bytes, READ_BYTES)))

    def clear(self) -> None:
        """The file is written again in the next round."""

    def close(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        os.close(self._fd)
        self._path.unlink()


def _open_direct(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError:  # the stores read and write through the page cache here too
        return os.open(path, flags, 0o600)
