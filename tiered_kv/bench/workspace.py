"""A folder for a benchmark's files: on the disk to measure, gone at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiered_kv.errors import ConfigError

PREFIX = ".tiered-kv-bench-"


@contextmanager
def workspace(directory: Path | None, needed_bytes: int = 0, *, less: str = "") -> Iterator[Path]:
    """A new folder in `directory` (default: the current one), removed on every way out.

    Args:
        less: what would need less room, for the message.

    Raises:
        ConfigError: no such directory, not writable, or less than `needed_bytes` free in it.
    """
    parent = Path.cwd() if directory is None else directory
    if not parent.is_dir():
        raise ConfigError(f"--dir {parent}: is not a directory; give one on the disk to measure")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise ConfigError(
            f"--dir {parent}: {needed_bytes >> 20:,} MiB are needed and {free >> 20:,} MiB free; "
            f"give one with more room{less and f', or {less}'}"
        )
    try:
        made = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"--dir {parent}: cannot be written: {error.strerror}") from error
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def refuse_too_much_memory(needed_bytes: int) -> None:
    """Raise ConfigError where so much host memory is not to be had: better than being killed."""
    available = available_memory_bytes()
    if available is not None and needed_bytes > available:
        raise ConfigError(
            f"{needed_bytes >> 20:,} MiB of memory are needed and {available >> 20:,} MiB are to "
            "be had; give smaller pages or a smaller --set-bytes"
        )


def available_memory_bytes() -> int | None:
    """Host memory to be had without swapping; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(facts["MemAvailable"].split()[0]) << 10 if "MemAvailable" in facts else None
