"""StoreConfig: what a store is given, checked once at the door."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from tiered_kv.errors import ConfigError

PolicyName = Literal["lru", "fifo"]
WritePolicy = Literal["back", "through"]

Size = Annotated[ByteSize, Field(gt=0)]


class StoreConfig(BaseModel):
    """Sizes and rules of a `TieredStore`. Sizes are bytes, or text such as "8GiB".

    Every size is a hard bound: the tier never holds more, its own metadata on disk included.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hbm: Size = Field(description="GPU memory for hot pages (host memory where there is no GPU)")
    host: Size = Field(description="pinned host memory for warm pages")
    disk: Path | None = Field(
        default=None, description="directory for cold pages; none: no disk tier"
    )
    disk_size: Size | None = Field(default=None, description="bytes the directory may ever take")
    write_policy: WritePolicy = Field(
        default="back",
        description="back: a page goes to disk when host gives it up or the store closes; "
        "through: every page at once",
    )
    policy: PolicyName = Field(
        default="lru", description="the order in which full tiers give pages up"
    )
    device: str = Field(
        default="auto", description="where the hbm tier lives: auto, cpu, cuda, cuda:N"
    )
    model_name: str = Field(default="", description="which weights made the KV; enters every key")
    deadline_s: float | None = Field(
        default=60.0,
        gt=0,
        description="seconds after which a load is given up as a miss; none: wait",
    )
    io_threads: int = Field(default=4, ge=1, le=64, description="reads under way at once")
    min_load_tokens: int = Field(
        default=0, ge=0, description="a stored prefix shorter than this is recomputed, not loaded"
    )
    prefill_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        description="how fast the engine computes a prompt; pages that would load slower than that "
        "(by measured rate) are not loaded. none: always load",
    )

    @model_validator(mode="after")
    def _disk_needs_a_size(self) -> StoreConfig:
        if (self.disk is None) != (self.disk_size is None):
            given, missing = ("disk", "disk_size") if self.disk else ("disk_size", "disk")
            raise ValueError(f"{given} needs {missing} too: give both for a disk tier, or neither")
        return self

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            if type(self) is not StoreConfig:
                raise  # a form of it with other names, such as the command line's, words its own
            raise ConfigError(one_line(error)) from error

    @classmethod
    def parse(cls, **settings: object) -> StoreConfig:
        """The constructor, for type checkers that know sizes as numbers alone."""
        return cls(**settings)


def one_line(error: ValidationError) -> str:
    """The first fault of a pydantic error as one line: setting, value, what would be right."""
    fault = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if not where:
        return message
    return f"{where}={fault['input']!r}: {message}"
