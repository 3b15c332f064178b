"""Every exception this package raises on purpose.

::

    TieredKVError
    +- ConfigError(ValueError)   a setting unknown or impossible; a directory not ours to open
    +- CapacityError             the system does not give the memory that was asked for
    +- LayoutMismatchError       the page geometry differs from the store's
    +- CorruptPageError          a checksum or format that does not agree; carries key, tier, path
    +- TierIOError(OSError)      the medium failed; carries tier and errno
    +- StoreClosedError          the store was used after close()

A missing page is not an error: it is a value (`PageState.MISS`). A broken page is a miss plus a
counter.
"""

from __future__ import annotations


class TieredKVError(Exception):
    """Base of every exception this package raises on purpose."""


class ConfigError(TieredKVError, ValueError):
    """A setting is unknown or impossible; the message names it and what would be right."""


class CapacityError(TieredKVError):
    """The system does not give the memory that a tier was promised."""


class LayoutMismatchError(TieredKVError):
    """The geometry of a page differs from what the store holds."""


class CorruptPageError(TieredKVError):
    """Bytes that do not agree with their checksum or format.

    Attributes:
        key: the page's key, or None where the damage hides it.
        tier: name of the tier that held it.
        path: the file, or None for a tier in memory.
    """

    def __init__(
        self, message: str, *, key: bytes | None = None, tier: str, path: str | None = None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.tier = tier
        self.path = path


class TierIOError(TieredKVError, OSError):
    """The medium under a tier failed.

    Attributes:
        tier: name of the tier.
        errno: the operating system's number, or None.
    """

    def __init__(self, message: str, *, tier: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.errno = errno


class StoreClosedError(TieredKVError):
    """The store was used after `close()`."""
