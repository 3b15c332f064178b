"""tiered-kv inside SGLang: a storage backend of HiCache.

Named in SGLang's configuration; importing it does not import sglang, using a name of it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tiered_kv.plugins.sglang.storage import TieredKVStorage

__all__ = ["TieredKVStorage"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module(f"{__name__}.versions").check_installed()
    return getattr(import_module(f"{__name__}.storage"), name)
