"""tiered-kv: a hierarchical GPU/CPU/SSD store for the key/value cache of large language models."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.config import StoreConfig
    from tiered_kv.counters import StoreStats
    from tiered_kv.errors import (
        CapacityError,
        ConfigError,
        CorruptPageError,
        LayoutMismatchError,
        StoreClosedError,
        TieredKVError,
        TierIOError,
    )
    from tiered_kv.keys import KeyChain, Multimodal, Namespace, PageKey, page_keys
    from tiered_kv.layout import KVLayout
    from tiered_kv.session import Session
    from tiered_kv.store import PageState, PrefixMatch, TieredStore
    from tiered_kv.transfer import Transfer

_HOMES = {
    "CapacityError": "errors",
    "ConfigError": "errors",
    "CorruptPageError": "errors",
    "KVLayout": "layout",
    "KeyChain": "keys",
    "LayoutMismatchError": "errors",
    "Multimodal": "keys",
    "Namespace": "keys",
    "PageKey": "keys",
    "PageState": "store",
    "PrefixMatch": "store",
    "Session": "session",
    "StoreClosedError": "errors",
    "StoreConfig": "config",
    "StoreStats": "counters",
    "TierIOError": "errors",
    "TieredKVError": "errors",
    "TieredStore": "store",
    "Transfer": "transfer",
    "page_keys": "keys",
}

__all__ = [
    "CapacityError",
    "ConfigError",
    "CorruptPageError",
    "KVLayout",
    "KeyChain",
    "LayoutMismatchError",
    "Multimodal",
    "Namespace",
    "PageKey",
    "PageState",
    "PrefixMatch",
    "Session",
    "StoreClosedError",
    "StoreConfig",
    "StoreStats",
    "TierIOError",
    "TieredKVError",
    "TieredStore",
    "Transfer",
    "page_keys",
]

try:
    __version__ = version("tiered-kv")
except PackageNotFoundError:  # run from a checkout that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `tiered-kv --help` must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tiered_kv' has no attribute {name!r}")
    return getattr(import_module(f"tiered_kv.{_HOMES[name]}"), name)
