"""Measurements, and the append-only result files they go to: a JSON object a line.

No line is ever rewritten. Every row says where it came from: a figure without its machine, versions
and commit is a rumour.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_SOURCES = ("tiered_kv", "storage", "kernels", "bench", ":!bench/results")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One metric of one case, sampled several times."""

    name: str
    metric: str
    unit: str
    params: dict[str, Any]
    samples: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The sample below which this share of them lies, interpolated."""
        ordered = sorted(self.samples)
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    @property
    def p50(self) -> float:
        """The median."""
        return self.quantile(0.5)


@dataclass(slots=True)
class Log:
    """What a bench has measured so far, in order."""

    measured: list[Measurement] = field(default_factory=list)

    def add(
        self, name: str, metric: str, unit: str, samples: Iterable[float], **params: Any
    ) -> Measurement:
        """Keep one metric; its repeats are counted in the params."""
        taken = tuple(float(sample) for sample in samples)
        made = Measurement(name, metric, unit, {**params, "repeats": len(taken)}, taken)
        self.measured.append(made)
        return made


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row comes from."""

    gpu: str | None
    host: str
    torch: str | None
    triton: str | None
    commit: str
    timestamp: str


def origin(gpu: str | None = None, commit: str | None = None) -> Origin:
    """This machine and this checkout, now.

    Args:
        gpu: name of the GPU that was used, None if there was none.
        commit: what to say where there is no git; by default asked of git.
    """
    return Origin(
        gpu=gpu,
        host=_host(),
        torch=_version("torch"),
        triton=_version("triton"),
        commit=commit or _commit(),
        timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def append(path: Path, measured: Sequence[Measurement], where: Origin) -> int:
    """Add one line a measurement to a result file; returns how many. Lines already there stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for one in measured:
            quantiles = {
                f"p{percent}": float(f"{one.quantile(percent / 100):.5g}")
                for percent in (20, 50, 80)
            }
            head = {key: getattr(one, key) for key in ("name", "metric", "unit", "params")}
            file.write(json.dumps({**head, **quantiles, **asdict(where)}) + "\n")
    return len(measured)


def load_average() -> float:
    """Runnable threads over the last minute, ours included: how shared the machine was."""
    return round(os.getloadavg()[0], 2)


def size_text(n_bytes: int) -> str:
    """A size as people write it: 64 KiB, 2 MiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if n_bytes >= 1 << shift:
            return f"{n_bytes / (1 << shift):g} {unit}"
    return f"{n_bytes} B"


@cache
def _host() -> str:
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        pass
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return f"{os.cpu_count()} x {model}, {memory_gib:.0f} GiB, {system}"


@cache
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    here = RESULTS.parent.parent
    try:
        head = _git(here, "rev-parse", "--short", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", *_SOURCES)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _git(where: Path, *arguments: str) -> str:
    command = ["git", "-C", str(where), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
