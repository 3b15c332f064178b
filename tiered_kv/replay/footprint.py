"""How much memory the process took while something ran."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def resident_bytes() -> int | None:
    """This process's resident set, or None where the system does not say (no /proc)."""
    return _status_bytes("VmRSS")


def _status_bytes(field: str) -> int | None:
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


class PeakMemory:
    """Growth of the resident set from its construction to its highest point since.

    The kernel's own high-water mark is used, reset at the start, so that no peak falls between
    samples. Where it cannot be reset (no /proc, or a kernel that forbids it) `peak_bytes` is None
    rather than a guess.
    """

    def __init__(self) -> None:
        try:
            _CLEAR_REFS.write_text("5")  # 5: set the high-water mark to the present resident set
            self._start_bytes = resident_bytes()
        except OSError:
            self._start_bytes = None

    def peak_bytes(self) -> int | None:
        """Bytes above the start at the highest point so far."""
        high = _status_bytes("VmHWM")
        if high is None or self._start_bytes is None:
            return None
        return max(0, high - self._start_bytes)
