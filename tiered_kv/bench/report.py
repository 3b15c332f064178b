"""What a benchmark found, as one object: for tables, `--json`, `--html`, baselines, exit codes."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, get_args

from tiered_kv.errors import ConfigError

SCHEMA_VERSION = 1

Kind = Literal["tiers", "index", "break-even"]

_BUSY_SHARE = 0.3  # of the cores: above, other work was measured with ours


@dataclass(frozen=True)
class BenchReport:
    """One run of one benchmark.

    Attributes:
        kind: which benchmark.
        machine: what it ran on, see `machine`.
        settings: what it was told.
        rows: one object a figure; a rate is bytes a second, times are seconds.
        notes: what the numbers do not show, in sentences.
        samples: raw samples behind the rows, by a name that says which.
        checksum: pages that were read back and compared: `verified`, and of those `failed`.
        failures: what was wrong, one sentence each; any makes the command fail.
    """

    kind: Kind
    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    checksum: dict[str, int] = field(default_factory=lambda: {"verified": 0, "failed": 0})
    failures: list[str] = field(default_factory=list)

    @property
    def is_passed(self) -> bool:
        """Whether every byte was right and every check held."""
        return not self.failures and not self.checksum["failed"]

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints and `--save-baseline` keeps."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"schema_version": SCHEMA_VERSION, **found}

    @classmethod
    def from_json(cls, path: Path, kind: Kind | None = None) -> BenchReport:
        """A report that `--json` or `--save-baseline` wrote.

        Args:
            kind: refuse any other.

        Raises:
            ConfigError: unreadable, no such report, or another schema or kind; one line.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON: {error}") from error
        return cls._of(found, path, kind)

    @classmethod
    def _of(cls, found: Any, path: Path, kind: Kind | None) -> BenchReport:
        what = "a report of `tiered-kv bench --json` or --save-baseline"
        if not isinstance(found, dict) or found.get("kind") not in get_args(Kind):
            raise ConfigError(f"{path}: is not {what}")
        if found.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{path}: has schema_version {found.get('schema_version')}; this version reads "
                f"{SCHEMA_VERSION}: make it anew"
            )
        if kind is not None and found["kind"] != kind:
            raise ConfigError(f"{path}: is of `bench {found['kind']}`, not of `bench {kind}`")
        shapes = {one.name: (list if one.name in _LISTS else dict) for one in fields(cls)}
        del shapes["kind"]
        wrong = [name for name, shape in shapes.items() if not isinstance(found.get(name), shape)]
        if wrong or not all(isinstance(row, dict) for row in found["rows"]):
            raise ConfigError(f"{path}: is not {what}: {(wrong or ['rows'])[0]} is missing or bad")
        if not all(isinstance(found["checksum"].get(name), int) for name in ("verified", "failed")):
            raise ConfigError(f"{path}: is not {what}: checksum is missing or bad")
        return cls(kind=found["kind"], **{name: found[name] for name in shapes})

    def write(self, path: Path) -> None:
        """Write `to_json` to a file, replacing it in one step.

        Raises:
            ConfigError: it cannot be written.
        """
        write_whole(path, json.dumps(self.to_json(), indent=1) + "\n")


_LISTS = {"rows", "notes", "failures"}
_NAMES_A_ROW = ("path", "tier", "model", "page_bytes", "page_tokens", "pages", "batch", "space")


def row_id(row: Mapping[str, Any]) -> str:
    """What a row is about, in words that are the same in every run."""
    parts = [f"{name}={row[name]}" for name in _NAMES_A_ROW if row.get(name) is not None]
    return " ".join(parts).removeprefix("path=")


def sample_name(row: Mapping[str, Any], metric: str) -> str:
    """The name in `samples` of what a row's figure is made from."""
    return f"{row_id(row)} {metric}"


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one; a link stays a link.

    Raises:
        ConfigError: it cannot be written, or is no file: a device would be replaced by one.
    """
    target, beside = _target(path)
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def refuse_bad_target(path: Path) -> None:
    """Raise ConfigError if `write_whole` could not write there; asked before minutes are spent."""
    _, beside = _target(path)
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


def _target(path: Path) -> tuple[Path, Path]:
    """The file itself, links followed, and one beside it that takes its place."""
    try:
        target = path.resolve()
        is_bad = (target.exists() and not target.is_file()) or not target.parent.is_dir()
    except (OSError, RuntimeError) as error:  # not to be looked at, or a link to itself
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    if is_bad:
        raise ConfigError(f"{path}: cannot be written: give a file in a directory that exists")
    return target, target.with_name(f".{target.name}.{os.getpid()}")


# -- the machine ---------------------------------------------------------------------------------


def machine(directory: Path | None = None) -> dict[str, Any]:
    """Facts of this machine; `directory` is on the disk that is measured, None: no disk is.

    The load average is taken now; `with_load_after` adds the one at the end.
    """
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": _gpu(),
        "disk": None if directory is None else _disk(directory),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "tiered_kv": _version("tiered-kv"),
        "load_average": {"before": _load_average(), "after": None},
    }


def with_load_after(machine: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts with the load average now."""
    load = {**machine["load_average"], "after": _load_average()}
    return {**machine, "load_average": load}


def load_note(machine: Mapping[str, Any]) -> str | None:
    """A sentence if the machine was busy before the benchmark began."""
    load, cores = machine["load_average"]["before"], machine["cores"]
    if load <= _BUSY_SHARE * cores:
        return None
    return (
        f"the load average was {load:g} on {cores} cores before this began: other work was "
        "measured with it; compare ratios, not rates, or run it again on an idle machine"
    )


def finished(report: BenchReport) -> BenchReport:
    """The report with the load average at its end, and a note if the machine was busy."""
    note = load_note(report.machine)
    notes = [*report.notes, *([note] if note else [])]
    return replace(report, machine=with_load_after(report.machine), notes=notes)


def _load_average() -> float:
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _disk(directory: Path) -> dict[str, Any]:
    """Mount, file system and model of the device that a directory is on; None where not known."""
    device = os.stat(directory).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    found: dict[str, Any] = {"mount": None, "fs": None, "source": None, "model": None}
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        if left.split()[2] == name:
            fs, source, *_ = right.split()
            found |= {"mount": left.split()[4], "fs": fs, "source": source}
    block = Path("/sys/dev/block") / name
    for place in (block / "device", block.resolve().parent / "device"):
        try:
            found["model"] = (place / "model").read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return found
