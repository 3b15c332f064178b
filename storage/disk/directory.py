"""The store's directory: one owner, one writer, a marker that says what it is."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.errors import ConfigError, LayoutMismatchError
from tiered_kv.storage.disk.catalog import CatalogDamagedError
from tiered_kv.storage.disk.geometry import Geometry, grow_geometry, plan_geometry

FORMAT_NAME = "tiered-kv-disk"
FORMAT_VERSION = 2
_OLDEST_VERSION = 1  # whose catalog is in order of keys: made anew from the segments
MARKER = "format.json"
LOCK = "tiered-kv.lock"
SEGMENTS = "segments"
CATALOG = "catalog"
SESSIONS = "sessions"  # belongs to storage/transcripts.py; made when first used
_READING = "reading"
_UNFINISHED = frozenset({LOCK, MARKER + ".tmp"})  # what a creation that was killed can leave
_MAX_MARKER_BYTES = 1 << 16
_SMALL_FILE_BYTES = 32 << 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Marker:
    """What `format.json` says: whose pages these are and how the budget is divided."""

    geometry: Geometry
    fingerprint: str
    store_id: bytes

    def as_json(self) -> bytes:
        """The file's content."""
        geometry = self.geometry
        fields = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "store_id": self.store_id.hex(),
            "fingerprint": self.fingerprint,
            "page_bytes": geometry.page_bytes,
            "capacity_bytes": geometry.capacity_bytes,
            "segment_bytes": geometry.segment_bytes,
            "segments": geometry.segments,
            "catalog_bytes": geometry.catalog_bytes,
        }
        return json.dumps(fields, indent=2).encode() + b"\n"


class StoreDirectory:
    """A locked directory with a marker that was checked. Close it to let another process in.

    Attributes:
        path: the directory.
        fd: an open descriptor of it; names inside are opened relative to it, through no symlink.
        marker: geometry (grown, if more capacity was asked for), fingerprint, store id.
        is_new: whether this opening makes the store.
        version_before: of the format, before this opening.
        catalog_bytes_before: the catalog's size before this opening grew it.
    """

    def __init__(self, path: Path, page_bytes: int, capacity_bytes: int, fingerprint: str) -> None:
        """Open the directory or make it; takes the lock without waiting.

        Raises:
            ConfigError: not writable, a symlink, foreign, newer, in use, or asked to shrink.
                Nothing in it was touched.
            LayoutMismatchError: it holds pages of another layout.
        """
        fresh = None if (path / MARKER).exists() else plan_geometry(page_bytes, capacity_bytes)
        self.path = path
        self._was_made = not path.exists()
        self.is_new = False
        self.fd = _open_directory(path)
        self._lock_fd = -1
        try:
            names = set(os.listdir(self.fd))
            if MARKER not in names and not names <= _UNFINISHED:
                raise ConfigError(
                    f"{path} is not empty and holds no {MARKER}: it is not a tiered-kv store, and "
                    "nothing in it was touched; name an empty or a new directory"
                )
            if MARKER in names:
                _read_marker(self.fd, path)  # is it ours? before a lock file appears in it
            self._lock_fd = _lock(self.fd, path)
            self.is_new = MARKER not in os.listdir(self.fd)  # by now another may have made it
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
            if not self.is_new:
                self.marker = self._reopen(page_bytes, capacity_bytes, fingerprint)
            else:
                geometry = fresh or plan_geometry(page_bytes, capacity_bytes)
                self.marker = Marker(geometry, fingerprint, uuid.uuid4().bytes)
                self.version_before = FORMAT_VERSION
                self.catalog_bytes_before = geometry.catalog_bytes
                self._capacity_bytes_before = capacity_bytes
                self.write_marker()
            os.fchmod(self.fd, 0o700)
            _make_directory(SEGMENTS, self.fd, path)
            self.segments_fd = _open_inside(SEGMENTS, self.fd, path)
        except BaseException as error:
            self.give_up()
            if isinstance(error, OSError):
                raise _unusable(path, error) from error
            raise

    def _reopen(self, page_bytes: int, capacity_bytes: int, fingerprint: str) -> Marker:
        self.version_before, present = _read_marker(self.fd, self.path)
        if (present.fingerprint, present.geometry.page_bytes) != (fingerprint, page_bytes):
            raise LayoutMismatchError(
                f"{self.path} holds pages of {present.geometry.page_bytes} bytes with layout "
                f"{present.fingerprint}, not of {page_bytes} bytes with layout {fingerprint}: use "
                "one directory for each model and layout"
            )
        self.catalog_bytes_before = present.geometry.catalog_bytes
        self._capacity_bytes_before = present.geometry.capacity_bytes
        geometry = grow_geometry(present.geometry, capacity_bytes)
        return Marker(geometry, fingerprint, present.store_id)

    def update_marker(self) -> None:
        """Write the marker if this opening grew the store, or its catalog is of a new form now.

        To be called when the catalog is.
        """
        is_grown = self.marker.geometry.capacity_bytes != self._capacity_bytes_before
        if is_grown or self.version_before != FORMAT_VERSION:
            self.write_marker()

    def write_marker(self) -> None:
        """Replace the marker atomically and durably."""
        temporary = MARKER + ".tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        fd = os.open(temporary, flags, 0o600, dir_fd=self.fd)
        try:
            os.write(fd, self.marker.as_json())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, MARKER, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)

    @property
    def catalog_path(self) -> Path:
        """Where the LMDB environment lives."""
        return self.path / CATALOG

    @contextmanager
    def reading_catalog(self) -> Iterator[None]:
        """Leave a note while the catalog is read for the first time.

        LMDB aborts the process on some kinds of damage; the note then tells the next opening to
        rebuild the catalog instead of dying in the same place.

        Raises:
            CatalogDamagedError: the last opening left its note.
        """
        note = self.catalog_path / _READING
        if note.exists():
            raise CatalogDamagedError("the last opening died while it read the catalog")
        os.close(os.open(note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        try:
            yield
        finally:
            note.unlink()

    def reset_catalog(self) -> None:
        """Drop the catalog's files, so that an empty one can be made."""
        _make_directory(CATALOG, self.fd, self.path)
        fd = _open_inside(CATALOG, self.fd, self.path)
        try:
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)

    def disk_usage_bytes(self) -> int:
        """What `du` counts for the directory and all below it."""
        total = 0
        for directory, folders, files in os.walk(self.path):
            total += os.lstat(directory).st_blocks * 512
            links = [name for name in folders if os.path.islink(os.path.join(directory, name))]
            for name in files + links:
                try:
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    continue
        return total

    @property
    def has_space(self) -> bool:
        """Whether the device has a block left for a small file: LMDB calls a full one broken."""
        device = os.statvfs(self.fd)
        return device.f_bavail * device.f_frsize >= _SMALL_FILE_BYTES

    def give_up(self) -> None:
        """Close after an opening that failed; what it made of a new store is removed.

        In a directory that was there before, the lock file stays: a process that has it open
        already could lock it while a third one makes another.
        """
        if self.is_new:
            for name in (SEGMENTS, CATALOG):
                shutil.rmtree(self.path / name, ignore_errors=True)
            for name in (MARKER + ".tmp", MARKER, *([LOCK] if self._was_made else [])):
                with suppress(OSError):
                    os.unlink(name, dir_fd=self.fd)
        if self._was_made:
            with suppress(OSError):  # not empty: another process was faster
                self.path.rmdir()
        self._close_fds()

    def close(self) -> None:
        """Release the lock. Twice is harmless."""
        self._close_fds()

    def _close_fds(self) -> None:
        for name in ("segments_fd", "_lock_fd", "fd"):
            fd = getattr(self, name, -1)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)


def _open_directory(path: Path) -> int:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if path.is_symlink():
            raise ConfigError(f"{path} is a symlink: a disk store follows none") from error
        raise _unusable(path, error) from error
    owner = os.fstat(fd).st_uid
    if owner != os.geteuid() and os.geteuid() != 0:
        os.close(fd)
        raise ConfigError(f"{path} belongs to user {owner}: a disk store must belong to its user")
    if not os.access(path, os.W_OK | os.X_OK):
        os.close(fd)
        raise ConfigError(f"{path} is not writable")
    return fd


def no_space(path: Path) -> str:
    """What to say when the device of a store is full."""
    return (
        f"no space left on the device of {path}: free some there, or put the store on another one"
    )


def _unusable(path: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(no_space(path))
    return ConfigError(f"{path} cannot be used as a disk store: {error.strerror or error}")


def _open_inside(name: str, directory_fd: int, path: Path) -> int:
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=directory_fd)
    except OSError as error:
        raise ConfigError(f"{path / name} is no directory of ours: {error.strerror}") from error


def _make_directory(name: str, directory_fd: int, path: Path) -> None:
    try:
        os.mkdir(name, 0o700, dir_fd=directory_fd)
        os.fsync(directory_fd)
    except FileExistsError:
        if stat.S_ISLNK(os.lstat(path / name).st_mode):
            raise ConfigError(f"{path / name} is a symlink: a disk store follows none") from None


def _lock(directory_fd: int, path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    fd = os.open(LOCK, flags, 0o600, dir_fd=directory_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise ConfigError(f"{path} is in use by process {holder}: one store a directory") from error
    return fd


def _read_marker(directory_fd: int, path: Path) -> tuple[int, Marker]:
    """The version of the format, and what else the marker says."""
    fd = os.open(MARKER, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory_fd)
    try:
        text = os.pread(fd, _MAX_MARKER_BYTES, 0)
    finally:
        os.close(fd)
    try:
        fields = json.loads(text)
        is_ours = fields["format"] == FORMAT_NAME
        version = int(fields["version"])
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        raise ConfigError(f"{path / MARKER} is not a tiered-kv marker: {error!r}") from error
    if not is_ours:
        raise ConfigError(
            f"{path} holds a store of format {fields['format']!r}, not {FORMAT_NAME!r}"
        )
    if not _OLDEST_VERSION <= version <= FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {version}, this program reads {_OLDEST_VERSION} to "
            f"{FORMAT_VERSION}: use the program that wrote it, or another directory"
        )
    return version, _marker_from(fields, path)


def _marker_from(fields: dict[str, Any], path: Path) -> Marker:
    try:
        names = ("page_bytes", "capacity_bytes", "segment_bytes", "segments", "catalog_bytes")
        geometry = Geometry(*(int(fields[name]) for name in names))
        store_id = bytes.fromhex(fields["store_id"])
        if len(store_id) != 16 or geometry.capacity_pages < 1 or geometry.page_bytes < 1:
            raise ValueError("impossible values")
        return Marker(geometry, str(fields["fingerprint"]), store_id)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(f"{path / MARKER} is damaged: {error!r}") from error
