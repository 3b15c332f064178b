"""Which process of an engine this is, and how many of them share the machine's disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiered_kv.errors import ConfigError

_NOT_OURS_BUT_HARMLESS = {"lost+found"}


@dataclass(frozen=True, slots=True)
class Rank:
    """One scheduler process of SGLang.

    Every tensor-parallel rank has a store of its own, also where the KV is the same on all of them
    (MLA): a store has one owner.

    Attributes:
        topology: how the engine is spread over processes, such as "tp2" or "tp4-pp2".
        name: of this process among them, such as "tp0" or "tp3-pp1".
        ranks_here: processes of the engine on one machine, which share the configured size.
    """

    topology: str
    name: str
    ranks_here: int

    @classmethod
    def of(cls, config: Any, parallel: Any) -> Rank:
        """From SGLang's `HiCacheStorageConfig` and its `get_parallel()`."""
        replicas = _published(parallel, "dp_size", 1)
        axes = {
            "tp": (config.tp_rank, config.tp_size),
            "pp": (config.pp_rank, config.pp_size),
            "cp": (config.attn_cp_rank, config.attn_cp_size),
            "dp": (config.dp_rank, _published(parallel, "attn_dp_size", 1)),
            "replica": (_published(parallel, "dp_rank", 0), replicas),
        }
        kept = {axis: of for axis, of in axes.items() if of[1] > 1 or axis == "tp"}
        tp_size = _published(parallel, "tp_size", config.tp_size * config.attn_cp_size)
        ranks = tp_size * config.pp_size * replicas
        return cls(
            "-".join(f"{axis}{size}" for axis, (_, size) in kept.items()),
            "-".join(f"{axis}{rank}" for axis, (rank, _) in kept.items()),
            max(1, ranks // _published(parallel, "nnodes", 1)),
        )

    def directory(self, parent: Path) -> Path:
        """Where this rank keeps its pages under the configured directory; makes nothing.

        Raises:
            ConfigError: an engine of another topology kept its pages there, which would come on top
                of the configured size, or something that is not ours lies there.
        """
        try:
            names = {entry.name for entry in parent.iterdir()}
        except FileNotFoundError:
            names = set()
        except OSError as error:
            raise ConfigError(f"{parent} cannot be used: {error.strerror or error}") from error
        foreign = sorted(names - {self.topology} - _NOT_OURS_BUT_HARMLESS)
        if foreign:
            raise ConfigError(
                f"{parent} holds {', '.join(foreign[:3])}, and the pages of this engine go to "
                f"{self.topology} there: name another directory, or delete what is in it"
            )
        return parent / self.topology / self.name


def _published(parallel: Any, name: str, default: int) -> int:
    """A number of SGLang's parallel context, which raises for what nobody has set."""
    try:
        value = getattr(parallel, name)
    except (AttributeError, RuntimeError, ValueError):
        return default
    return default if value is None else int(value)
