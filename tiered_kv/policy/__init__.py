"""Eviction policies: one small class a file. `make` finds one by name."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from tiered_kv.errors import ConfigError
from tiered_kv.policy.base import Policy, Tree

__all__ = ["POLICIES", "Policy", "Tree", "make"]

POLICIES = {
    "lru": "tiered_kv.policy.lru:Lru",
    "fifo": "tiered_kv.policy.fifo:Fifo",
}
"""Name -> where the class is; imported when asked for."""


def make(name: str, tree: Tree) -> Policy:
    """A policy by name, looking at one tier's tree.

    Raises:
        ConfigError: no such policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy={name!r}: there is {', '.join(sorted(POLICIES))}")
    module, _, attribute = POLICIES[name].partition(":")
    factory = getattr(import_module(module), attribute)
    return cast("Policy", factory(tree))
