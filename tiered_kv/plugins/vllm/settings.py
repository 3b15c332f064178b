"""TieredKVSettings: what `kv_connector_extra_config` may say, checked at an engine's start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, model_validator

from tiered_kv.config import PolicyName, Size, WritePolicy
from tiered_kv.plugins.extra_config import settings_in

StorePolicy = Literal["all", "prompt"]
LoadMode = Literal["auto", "layerwise", "async"]


class TieredKVSettings(BaseModel):
    """Settings of the vLLM connector. Sizes are bytes, or text such as "8GiB".

    Every size is for the whole engine, all its ranks together; `per_rank` gives one rank its share.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: Size = Field(default=ByteSize(4 << 30), description="pinned host memory for warm pages")
    disk: Path | None = Field(
        default=None, description="directory for cold pages; none: no disk tier"
    )
    disk_size: Size | None = Field(default=None, description="bytes the directory may ever take")
    write_policy: WritePolicy = Field(
        default="through",
        description="through: every page goes to disk at once; back: when host gives it up, or the "
        "engine stops, as far as disk has room",
    )
    policy: PolicyName = Field(
        default="lru", description="the order in which full tiers give pages up"
    )
    io_threads: int = Field(default=4, ge=1, le=64, description="reads under way at once")
    store: StorePolicy = Field(
        default="all", description="what is stored. all: prompts and answers; prompt: prompts alone"
    )
    load: LoadMode = Field(
        default="auto",
        description="layerwise: a layer waits for its own KV; async: a request waits until all its "
        "KV is there and others run meanwhile; auto: chosen for each request",
    )
    max_load_tokens: int | None = Field(
        default=None, ge=1, description="tokens that are loaded for one request at most"
    )
    min_load_tokens: int = Field(
        default=0, ge=0, description="a stored prefix shorter than this is recomputed, not loaded"
    )
    prefill_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        description="how fast the engine computes a prompt; pages that would load slower than that "
        "(by measured rate) are not loaded. none: always load",
    )
    prefetch_deadline_s: float = Field(
        default=2.0,
        gt=0,
        allow_inf_nan=False,
        description="how long a waiting request is held back for pages on their way from disk",
    )
    load_deadline_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds after which a load is given up and its tokens are recomputed",
    )
    model_name: str = Field(default="", description="a name for the weights; enters every key")

    @model_validator(mode="after")
    def _settings_agree(self) -> TieredKVSettings:
        if (self.disk is None) != (self.disk_size is None):
            given, missing = ("disk", "disk_size") if self.disk else ("disk_size", "disk")
            raise ValueError(f"{given} needs {missing} too: give both for a disk tier, or neither")
        if self.max_load_tokens is not None and self.max_load_tokens < self.min_load_tokens:
            raise ValueError(
                f"max_load_tokens={self.max_load_tokens} must not be below "
                f"min_load_tokens={self.min_load_tokens}, or nothing is ever loaded"
            )
        return self

    @classmethod
    def from_extra_config(cls, extra_config: Mapping[str, Any]) -> TieredKVSettings:
        """The settings in a `kv_connector_extra_config`.

        Raises:
            ConfigError: an unknown key, a value out of range, or two that do not go together; one
                line that names it and says what would be right.
        """
        return settings_in(extra_config, cls, "kv_connector_extra_config")

    def per_rank(self, ranks: int) -> TieredKVSettings:
        """The same with one rank's share of every size."""
        shares = {
            name: ByteSize(value // ranks)
            for name in ("host", "disk_size")
            if (value := getattr(self, name)) is not None
        }
        return self.model_copy(update=shares)
