"""Transcripts: the token ids of conversations, by name, beside the pages that they are the keys of.

A page may be evicted, for it can be computed again. A conversation cannot, so it is not a page: it
is a small file of its own, replaced atomically, 4 bytes a token. It is bounded too: the transcripts
kept longest ago give way.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from tiered_kv.errors import CapacityError, ConfigError, StoreClosedError, TierIOError
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, round_up

Tokens = np.ndarray[Any, np.dtype[np.uint32]]

_MAGIC = b"TKVTRANS"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, zero, tokens, xxh3-128 of name and tokens
_NAME_BYTES = 32
_ENTRY_BYTES = 192  # of the directory, half full at worst
_TEMPORARY = "new.tmp"
_log = logging.getLogger(__name__)


class Transcripts:
    """Token ids by name. Safe to call from several threads.

    Args:
        folder: the directory to keep them in, made with mode 0700 when first used; None: memory.
        capacity_bytes: bound on all that they take, as `du` counts it, a replacement included.
    """

    def __init__(self, folder: Path | None, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes - BLOCK_BYTES  # for the directory itself
        self._path = folder
        self._folder: _Folder | None = None
        self._memory: dict[bytes, bytes] = {}
        self._used_bytes: OrderedDict[bytes, int] | None = None  # None: not looked at yet
        self._lock = threading.Lock()
        self._is_closed = False

    def read(self, name: bytes) -> Tokens | None:
        """The tokens under a name; None if there are none, or they are damaged. Blocks.

        Raises:
            TierIOError: the medium failed.
        """
        with self._lock:
            if name not in self._open():
                return None
            record = self._memory[name] if self._folder is None else self._folder.read(name)
            tokens = _tokens_in(record, name)
            if tokens is None:
                _log.warning("the transcript %s is damaged: dropped", name.hex()[:12])
                self._remove(name)
            return tokens

    def write(self, name: bytes, tokens: Tokens) -> None:
        """Keep these tokens under a name, in place of others; durable when it returns.

        Raises:
            CapacityError: it alone is larger than the bound.
            TierIOError: the medium failed. As above, what was kept before is still there.
        """
        record = _record_of(name, tokens)
        size = round_up(len(record)) + _ENTRY_BYTES
        with self._lock:
            used = self._open()
            if size > self._capacity_bytes:
                raise CapacityError(
                    f"a conversation of {len(tokens)} tokens cannot be kept: all sessions together "
                    f"may take {max(0, self._capacity_bytes)} bytes; give a larger disk_size (or, "
                    "without a disk, host)"
                )
            others = [other for other in used if other != name]
            excess = sum(used.values()) + size - self._capacity_bytes
            while excess > 0 and others:
                excess -= self._remove(others.pop(0))
            if excess > 0:  # there is no room for both its old and its new self
                self._remove(name)
            if self._folder is None:
                self._memory[name] = record
            else:
                self._folder.write(name, record)
            used[name] = size
            used.move_to_end(name)

    def remove(self, name: bytes) -> None:
        """Keep nothing under this name."""
        with self._lock:
            if name in self._open():
                self._remove(name)

    def close(self) -> None:
        """Keep nothing from now on. Twice is harmless."""
        with self._lock:
            self._is_closed = True
            folder, self._folder = self._folder, None
            if folder is not None:
                folder.close()

    def _open(self) -> OrderedDict[bytes, int]:
        """What each transcript takes, the one kept longest ago first."""
        if self._is_closed:
            raise StoreClosedError("the store is closed: its sessions cannot be read or kept")
        if self._used_bytes is None:
            self._used_bytes = OrderedDict()
            if self._path is not None:
                self._folder = _Folder(self._path)
                for name, n_bytes in self._folder.found():
                    self._used_bytes[name] = round_up(n_bytes) + _ENTRY_BYTES
        return self._used_bytes

    def _remove(self, name: bytes) -> int:
        """Drop one, if it is there; how many bytes that frees."""
        self._memory.pop(name, None)
        if self._folder is not None:
            self._folder.remove(name)
        return self._open().pop(name, 0)


class _Folder:
    """One file a transcript; names are opened relative to the directory, through no symlink."""

    def __init__(self, path: Path) -> None:
        try:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            raise ConfigError(f"{path} is no directory of ours: {error.strerror}") from error

    def found(self) -> list[tuple[bytes, int]]:
        """(name, bytes) of every transcript, the one written longest ago first."""
        files: list[tuple[int, bytes, int]] = []
        with suppress(FileNotFoundError):
            os.unlink(_TEMPORARY, dir_fd=self._fd)
        for file in os.listdir(self._fd):
            with suppress(ValueError):
                name = bytes.fromhex(file)
                stat = os.stat(file, dir_fd=self._fd, follow_symlinks=False)
                if len(name) == _NAME_BYTES:
                    files.append((stat.st_mtime_ns, name, stat.st_size))
        return [(name, n_bytes) for _, name, n_bytes in sorted(files)]

    def read(self, name: bytes) -> bytes:
        try:
            fd = os.open(name.hex(), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self._fd)
            with os.fdopen(fd, "rb") as file:
                return file.read()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP):
                return b""
            raise _failure("reading", error) from error

    def write(self, name: bytes, record: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        try:
            fd = os.open(_TEMPORARY, flags, 0o600, dir_fd=self._fd)
            with os.fdopen(fd, "wb") as file:
                file.write(record)
                file.flush()
                os.fsync(fd)
            os.rename(_TEMPORARY, name.hex(), src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)
        except OSError as error:
            with suppress(OSError):
                os.unlink(_TEMPORARY, dir_fd=self._fd)
            raise _failure("writing", error) from error

    def remove(self, name: bytes) -> None:
        try:
            with suppress(FileNotFoundError):
                os.unlink(name.hex(), dir_fd=self._fd)
        except OSError as error:
            raise _failure("removing", error) from error

    def close(self) -> None:
        os.close(self._fd)


def _record_of(name: bytes, tokens: Tokens) -> bytes:
    body = np.ascontiguousarray(tokens, dtype="<u4").tobytes()
    checksum = xxhash.xxh3_128_digest(name + body)
    return _HEADER.pack(_MAGIC, _VERSION, 0, len(body) // 4, checksum) + body


def _tokens_in(record: bytes, name: bytes) -> Tokens | None:
    """The tokens of a record; None if it is not whole, or not of this name."""
    if len(record) < _HEADER.size:
        return None
    magic, version, _, count, checksum = _HEADER.unpack_from(record)
    body = record[_HEADER.size :]
    is_whole = len(body) == 4 * count and xxhash.xxh3_128_digest(name + body) == checksum
    if (magic, version) != (_MAGIC, _VERSION) or not is_whole:
        return None
    tokens: Tokens = np.frombuffer(body, dtype="<u4").astype(np.uint32)
    return tokens


def _failure(doing: str, error: OSError) -> TierIOError:
    return TierIOError(
        f"{doing} a transcript failed: {error.strerror or error}", tier="disk", errno=error.errno
    )
