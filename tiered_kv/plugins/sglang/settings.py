"""StorageSettings: what `--hicache-storage-backend-extra-config` may say of our storage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from tiered_kv.config import PolicyName, Size
from tiered_kv.plugins.extra_config import settings_in

_OF_SGLANG = (  # some of them are taken out before a storage is made, some are not
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "allocator",
    "hicache_storage_pass_prefix_keys",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "tp_lcm_size",
    "file_storage_path",
)


class StorageSettings(BaseModel):
    """Settings of `TieredKVStorage`. Sizes are bytes, or text such as "8GiB"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path = Field(description="where the pages go; each rank makes one of its own inside")
    size: Size = Field(
        description="bytes that all ranks on this machine may ever take together, metadata included"
    )
    policy: PolicyName = Field(
        default="lru", description="the order in which a full disk gives pages up"
    )
    io_threads: int = Field(
        default=4, ge=1, le=64, description="disk reads of each rank under way at once"
    )

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> StorageSettings:
        """The settings in SGLang's extra config, beside SGLang's own keys.

        Raises:
            ConfigError: an unknown or missing key, or a value out of range; one line that says what
                would be right.
        """
        return settings_in(
            given,
            cls,
            "hicache-storage-backend-extra-config: TieredKVStorage",
            engine="SGLang",
            engine_keys=_OF_SGLANG,
        )
