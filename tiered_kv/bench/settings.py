"""What a benchmark is told. Imports no torch: `--help` and a wrong flag answer at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field
from pydantic_settings import NoDecode
from typing_extensions import Self

from tiered_kv.config import Size

Show = Callable[[int, int, str], None]
"""Told now and then: how much is done, of how much, and a few words."""

PathName = Literal[
    "host-put",
    "host-get",
    "host-mixed",
    "disk-put",
    "disk-get",
    "disk-get-hbm",
    "disk-mixed",
    "software-put",
    "software-get",
]
_NO_LIST = str.maketrans(dict.fromkeys("[],\"'", " "))
PATHS: tuple[PathName, ...] = PathName.__args__  # type: ignore[attr-defined]


def split(value: Any) -> Any:
    """`1,2 3`, `["1,2", "3"]` and 1 as lists: in a flag, a variable or a file."""
    if isinstance(value, str):
        parts: list[Any] = value.translate(_NO_LIST).split()
    elif isinstance(value, list | tuple):
        parts = []
        for one in value:
            parts += split(one) if isinstance(one, str) else [one]
    else:
        return [value]
    if not parts:
        raise ValueError("give at least one")
    return parts


class BenchSettings(BaseModel):
    """What every benchmark takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    small: ClassVar[Mapping[str, Any]] = {}
    """What `smoke` takes where nothing was given."""

    directory: Path | None = Field(
        default=None,
        description="where files are made, on the disk to measure; a folder of their own in it is "
        "removed at the end; none: the current directory",
    )
    smoke: bool = Field(
        default=False, description="small sizes: shows that it works, never how fast it is"
    )

    def in_effect(self) -> Self:
        """The settings that a run goes by, and reports: those of `smoke` filled in.

        `model_fields_set` still tells what was asked for.
        """
        given = self.model_fields_set
        if not self.smoke:
            return self
        small = {name: value for name, value in self.small.items() if name not in given}
        return self.model_construct(_fields_set=given, **(dict(self) | small))

    def told(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return self.model_dump(mode="json", include=set(type(self).model_fields))


class MovingSettings(BenchSettings):
    """How much a benchmark moves, how often, and to and from where."""

    small: ClassVar[Mapping[str, Any]] = {
        "set_bytes": ByteSize(2 << 20),
        "transfer_bytes": ByteSize(512 << 10),
        "repeats": 2,
    }

    set_bytes: Size = Field(
        default=ByteSize(64 << 20), description="bytes moved in one sample (at least one page)"
    )
    transfer_bytes: Size = Field(
        default=ByteSize(64 << 20),
        description="bytes that one put or get of a sample moves; where it needs several they are "
        "in flight together",
    )
    repeats: int = Field(
        default=15, ge=1, description="samples of a rate; fewer, but 6, where they take over 6 s"
    )
    device: str = Field(default="auto", description="where the hbm tier lives: auto, cpu, cuda:N")


class TiersSettings(MovingSettings):
    """How fast put, get and prefetch move pages between tiers, beside what the machine can do."""

    small: ClassVar[Mapping[str, Any]] = {
        **MovingSettings.small,
        "page_bytes": (ByteSize(64 << 10), ByteSize(256 << 10)),
    }

    page_bytes: Annotated[tuple[Size, ...], NoDecode, BeforeValidator(split)] = Field(
        default=tuple(ByteSize(size << 10) for size in (64, 256, 1024, 2048, 8192)),
        min_length=1,
        description="page sizes, as in 64KiB,2MiB; multiples of 256 bytes: 8 for each of the 32 "
        "layers that they lie scattered over",
    )
    paths: Annotated[tuple[PathName, ...], NoDecode, BeforeValidator(split)] = Field(
        default=PATHS, min_length=1, description="what to measure"
    )
    cold: bool = Field(
        default=False,
        description="check first that keys never put hit nothing, and open the store again before "
        "it is read; that, or a read that came from the page cache, is exit code 1",
    )


class IndexSettings(BenchSettings):
    """What deciding costs: keys, match, plans, evictions, memory, reopening."""

    small: ClassVar[Mapping[str, Any]] = {"pages": (512, 2048), "repeats": 2}

    pages: Annotated[tuple[int, ...], NoDecode, BeforeValidator(split)] = Field(
        default=(10_000, 100_000, 1_000_000), min_length=1, description="pages in the index"
    )
    page_tokens: int = Field(default=64, ge=1, description="tokens a page")
    repeats: int = Field(default=9, ge=1, description="samples of every figure but evictions")


class BreakEvenSettings(MovingSettings):
    """From how many tokens on a load from each tier beats computing them again."""

    model: str = Field(
        default="",
        description="config.json of a model, or the directory that holds it: its KV layout; "
        "tiny-qwen3 and micro-qwen3 are models with random weights",
    )
    dtype: str = Field(
        default="auto", description="type of the KV cache, such as bfloat16 (auto: the model's)"
    )
    page_tokens: int = Field(default=64, ge=1, description="tokens a page")
    prefill_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="how fast the engine computes a prompt",
    )
    rates: Path | None = Field(
        default=None,
        description="report of `bench tiers --json` with load rates; none: they are measured now",
    )
