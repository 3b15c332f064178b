"""TierSettings: what an entry of vLLM's `secondary_tiers` may say of our disk tier."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize, ConfigDict, Field

from tiered_kv.config import PolicyName, Size
from tiered_kv.plugins.extra_config import settings_in

_OF_VLLM = ("type", "module_path", "backpressure")  # taken out before a tier is made


class TierSettings(BaseModel):
    """Settings of `TieredKVTier`. Sizes are bytes, or text such as "8GiB"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    disk: Path = Field(description="directory of the pages; one engine at a time")
    disk_size: Size = Field(description="bytes the directory may ever take, metadata included")
    policy: PolicyName = Field(
        default="lru", description="the order in which a full disk gives pages up"
    )
    io_threads: int = Field(default=4, ge=1, le=64, description="reads under way at once")
    model_name: str = Field(
        default="",
        description="a name for the weights; enters every key. Needed where the model is not a "
        "local directory",
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> TierSettings:
        """The settings in an entry of `secondary_tiers`.

        Raises:
            ConfigError: an unknown or missing key, or a value out of range; one line that says what
                would be right.
        """
        return settings_in(
            given, cls, "secondary_tiers: TieredKVTier", engine="vLLM", engine_keys=_OF_VLLM
        )

    def of_replica(self, replica: int, replicas: int) -> TierSettings:
        """The same for one data-parallel replica: a directory inside, and a share of the size."""
        if replicas <= 1:
            return self
        share = ByteSize(self.disk_size // replicas)
        return self.model_copy(
            update={"disk": self.disk / f"replica-{replica}", "disk_size": share}
        )
