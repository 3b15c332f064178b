"""tiered-kv inside vLLM: a KV connector, and a disk tier under vLLM's own offloading.

Named in vLLM's configuration; importing it does not import vllm, using a name of it does.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.plugins.vllm.connector import TieredKVConnector
    from tiered_kv.plugins.vllm.tier import TieredKVTier

_HOMES = {"TieredKVConnector": "connector", "TieredKVTier": "tier"}

__all__ = ["TieredKVConnector", "TieredKVTier", "register"]


def register() -> None:
    """The entry point: vLLM calls it in each of its processes, to know the connector by name."""
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    with suppress(ValueError):  # it is known already
        factory.register_connector(
            "TieredKVConnector", f"{__name__}.connector", "TieredKVConnector"
        )


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
