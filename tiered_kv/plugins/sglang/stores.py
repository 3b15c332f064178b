"""PoolStores: one `DiskStore` a pool under the directory of one rank, within its bytes."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tiered_kv.disk_store import DiskStore
from tiered_kv.errors import ConfigError, TieredKVError
from tiered_kv.plugins.sglang.pages import HostPages
from tiered_kv.plugins.sglang.shares import (
    OWN_BYTES,
    divide,
    least_bytes,
    read_record,
    weight,
    write_record,
)
from tiered_kv.storage.disk.directory import SEGMENTS

_log = logging.getLogger(__name__)


class PoolStores:
    """The stores of one rank by the name of their pool. Safe to call from several threads.

    Args:
        directory: of the rank; made with mode 0700 if missing.
        size: bytes that all of it may take.
        identity: what the pages depend on and their pool does not know.
        io_threads, policy: as for `DiskStore.open`.
    """

    def __init__(
        self, directory: Path, size: int, identity: Sequence[str], io_threads: int, policy: str
    ) -> None:
        self.directory = directory
        self._size = size
        self._identity = tuple(identity)
        self._io_threads = io_threads
        self._policy = policy
        self._lock = threading.Lock()
        self._fd = -1
        self._pools: dict[str, HostPages] = {}
        self._open: dict[str, tuple[HostPages, DiskStore]] = {}

    def __getitem__(self, name: str) -> tuple[HostPages, DiskStore]:
        """The pages and the store of a pool; KeyError if it was not opened."""
        return self._open[name]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._open))

    def add(self, pages: HostPages) -> None:
        """Note a pool; `open` opens its store."""
        with self._lock:
            self._pools[pages.name] = pages

    def open(self) -> None:
        """Open the store of every pool that is noted and has none yet; blocks.

        Raises:
            ConfigError: the directory cannot be used, or has no room for a pool: too few bytes, or
                divided already among others by an earlier start.
            LayoutMismatchError: it holds pages of another model, dtype or layout.
            TierIOError: the medium failed.
        """
        with self._lock:
            try:
                if self._fd < 0:
                    self._fd = self._own_directory()
                shares = self._shares(read_record(self.directory))
                for name, pages in self._pools.items():
                    if name not in self._open:
                        self._open[name] = pages, self._open_store(pages, shares[name])
                write_record(self.directory, shares)
            except Exception as error:
                if not self._open:
                    self._give_up()
                if isinstance(error, TieredKVError) or not isinstance(error, OSError):
                    raise
                raise ConfigError(
                    f"{self.directory} cannot be used for pages: {error.strerror or error}"
                ) from error

    def close(self) -> None:
        """Give the directory back. Twice is harmless."""
        with self._lock:
            opened, self._open = self._open, {}
            for _, store in opened.values():
                store.close()
            self._give_up()

    def _give_up(self) -> None:
        """Let go of the directory, and remove it if nothing was ever kept there."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for path in (self.directory, self.directory.parent):
            with suppress(OSError):  # not empty, or another rank's too
                path.rmdir()

    def _own_directory(self) -> int:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{self.directory} is in use by another process: name a directory for each engine"
            ) from error
        return fd

    def _shares(self, record: dict[str, int]) -> dict[str, int]:
        """Bytes of every pool; what an earlier start divided otherwise is made anew if unused."""
        total = self._size - OWN_BYTES
        weights = {name: weight(p.page_bytes, p.pages) for name, p in self._pools.items()}
        if record and set(self._pools) <= set(record):
            if sum(record.values()) > total:
                raise ConfigError(
                    f"{self.directory} was made with {sum(record.values()) + OWN_BYTES} bytes and "
                    f"cannot shrink to {self._size}: give a larger size, or another directory"
                )
            return divide(total, weights, record)
        if any(self._is_used(name) for name in record):
            raise ConfigError(
                f"{self.directory} is divided among the pools {', '.join(sorted(record))}, and now "
                f"there is {', '.join(sorted(set(self._pools) - set(record)))} too: name another "
                "directory, or delete this one"
            )
        for name in record:
            if name in self._open:
                self._open.pop(name)[1].close()
            shutil.rmtree(self.directory / name, ignore_errors=True)
        least = least_bytes({name: pages.page_bytes for name, pages in self._pools.items()})
        if sum(least.values()) > total:
            raise ConfigError(
                f"size is too small: a rank has {self._size} bytes of it and needs at least "
                f"{sum(least.values()) + OWN_BYTES} for its pools {', '.join(least)}"
            )
        return divide(total, weights, least)

    def _is_used(self, name: str) -> bool:
        """Whether a page was ever written there: a store makes its first segment for it."""
        folder = self.directory / name / SEGMENTS
        return folder.is_dir() and bool(os.listdir(folder))

    def _open_store(self, pages: HostPages, size: int) -> DiskStore:
        store = DiskStore.open(
            self.directory / pages.name,
            size,
            pages.page_bytes,
            pages.fingerprint(*self._identity),
            io_threads=self._io_threads,
            policy=self._policy,
        )
        _log.info(
            "%s: %s, %d of %d pages held, %d bytes each%s",
            self.directory,
            pages.name,
            store.stats().resident_pages["disk"],
            store.capacity_pages,
            pages.page_bytes,
            "; copied, as SGLang gives no pointers to them" if pages.is_flat else "",
        )
        return store
