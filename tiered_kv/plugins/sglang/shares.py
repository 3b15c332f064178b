"""How the bytes of one rank are divided among its pools, and the file that remembers it.

A pool's pages have a size of their own, so each pool has a store of its own, and a store can grow
but not shrink. SGLang registers some pools (those of a draft model) after the others are open: the
division of the first start is written down, and later ones keep to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tiered_kv.errors import ConfigError
from tiered_kv.storage.disk.geometry import minimum_capacity_bytes

RECORD = "pools.json"
OWN_BYTES = 64 << 10
"""Of a rank's bytes, for its directory and the record."""

_CATALOG_BYTES = 1 << 10  # of a page, beside its own
_BLOCK_BYTES = 4096
_MAX_RECORD_BYTES = 1 << 16


def weight(page_bytes: int, pages: int) -> int:
    """Bytes that so many pages take on disk: pools share in proportion to their host memory."""
    return pages * (-(-page_bytes // _BLOCK_BYTES) * _BLOCK_BYTES + _CATALOG_BYTES)


def divide(total: int, weights: Mapping[str, int], least: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each pool: so many at least, and of what is left in proportion to its weight."""
    left, whole = total - sum(least.values()), sum(weights.values())
    return {name: n_bytes + left * weights.get(name, 0) // whole for name, n_bytes in least.items()}


def least_bytes(pages: Mapping[str, int]) -> dict[str, int]:
    """Bytes without which a pool cannot hold a page, by the bytes of its pages."""
    return {name: minimum_capacity_bytes(page_bytes) for name, page_bytes in pages.items()}


def read_record(directory: Path) -> dict[str, int]:
    """Bytes of each pool as an earlier start divided them; empty if none did.

    Raises:
        ConfigError: the file is not ours.
    """
    path = directory / RECORD
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        fields = json.loads(os.read(fd, _MAX_RECORD_BYTES))
        return {str(name): int(n_bytes) for name, n_bytes in fields["pool_bytes"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a record of tiered-kv: {error!r}") from error
    finally:
        os.close(fd)


def write_record(directory: Path, shares: Mapping[str, int]) -> None:
    """Replace the record atomically and durably.

    Raises:
        OSError: the medium failed or is full.
    """
    temporary = directory / f"{RECORD}.tmp"
    text = json.dumps({"version": 1, "pool_bytes": dict(shares)}, indent=2)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600)
    try:
        os.write(fd, text.encode() + b"\n")
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, directory / RECORD)
