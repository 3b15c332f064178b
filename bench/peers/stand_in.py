"""Stand-ins for modules that a peer imports on its way and does not use on a CPU."""

from __future__ import annotations

import sys
import types
from collections.abc import MutableSequence, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


class _Anything:
    """Called as a decorator it gives back what it decorates; else it stays what it is."""

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, index: Any) -> Any:
        return self


class _Module(types.ModuleType):
    __path__: MutableSequence[str] = []  # noqa: RUF012
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else _Anything()


class _Finder:
    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        loader: Any = self
        return ModuleSpec(name, loader, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It is whole as it is."""


def stand_in(packages: Sequence[str], first: Sequence[str]) -> None:
    """Have these packages found where they are missing.

    Args:
        packages: top-level names.
        first: modules to import before, which ask for them and must not find a stand-in.
    """
    for name in first:
        import_module(name)
    finder: Any = _Finder([name for name in packages if find_spec(name) is None])
    sys.meta_path.append(finder)
