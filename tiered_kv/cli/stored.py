"""A store's disk directory, opened alone: what `check` and `stats` work on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_kv.errors import ConfigError

if TYPE_CHECKING:
    from tiered_kv.storage.disk import DiskTier

MARKER = "format.json"


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """What a directory's marker says of the store in it."""

    page_bytes: int
    capacity_bytes: int
    fingerprint: str

    @classmethod
    def of(cls, directory: Path) -> StoredLayout:
        """Read the marker; changes nothing, creates nothing.

        Raises:
            ConfigError: there is no store in the directory, or its marker is damaged.
        """
        marker = directory / MARKER
        try:
            fields: Any = json.loads(marker.read_bytes())
            return cls(
                page_bytes=int(fields["page_bytes"]),
                capacity_bytes=int(fields["capacity_bytes"]),
                fingerprint=str(fields["fingerprint"]),
            )
        except OSError as error:
            raise ConfigError(
                f"{directory}: holds no tiered-kv store ({MARKER}: {error.strerror}); give the "
                "directory that --disk named"
            ) from error
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            raise ConfigError(f"{marker}: is not a tiered-kv marker ({error!r})") from error


@contextmanager
def opened(directory: Path) -> Iterator[DiskTier]:
    """The disk tier of a directory, found as its last writer left it.

    Raises:
        ConfigError: it is no store, or another process has it open.
    """
    layout = StoredLayout.of(directory)
    from tiered_kv.storage.disk import DiskTier

    tier = DiskTier.open(
        directory,
        page_bytes=layout.page_bytes,
        capacity_bytes=layout.capacity_bytes,
        fingerprint=layout.fingerprint,
        io_threads=2,
    )
    try:
        yield tier
    finally:
        tier.close()
