"""The layout of the code itself: which way imports point, how long things are, their names."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LEVELS: tuple[frozenset[str], ...] = tuple(
    frozenset(level.split())
    for level in (
        "errors slots columns interrupts",
        "keys config model_config",
        "layout found",
        "policy kernels",
        "tier_index page_ids storage",
        "guard",
        "index",
        "plan streams",
        "books arrivals",
        "room counters transfer orders manifest tasks",
        "ledger",
        "planner",
        "mover decider",
        "run hbm_pages session",
        "carrier flush",
        "store disk_store",
        "plugins",
        "replay",
        "bench",
        "cli",
        "__main__",
    )
)
"""Units of the package, lowest first: a unit imports itself and what stands below it."""

DECIDES = {
    "index",
    "plan",
    "planner",
    "ledger",
    "room",
    "policy",
    "keys",
    "decider",
    "orders",
    "slots",
    "columns",
    "found",
    "page_ids",
    "guard",
}
DECIDES |= {"layout", "model_config", "config", "errors"}
ENGINES = {"transformers", "vllm", "sglang"}
ENGINE_PLACES = ("tiered_kv.plugins.", "tiered_kv.replay.engines.")
VAGUE_MODULES = {"utils", "util", "helpers", "helper", "common", "misc"}
VAGUE_CLASSES = ("Manager", "Handler")
MODULE_LINES = 500
FUNCTION_LINES = 50
KERNEL_LINES = 100


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if not any(parent.is_symlink() for parent in path.parents if parent != ROOT):
                assert relative.parts[0] == folder
                yield path


@cache
def library() -> dict[str, Path]:
    """Every module of the package by the name it is imported under."""
    modules = {}
    for path in python_files("tiered_kv", "kernels", "storage"):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        parts = parts if parts[0] == "tiered_kv" else ["tiered_kv", *parts]
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path, module: str = "") -> Iterator[tuple[int, str]]:
    """(line, module imported) for every import anywhere in a file, relative ones made absolute."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
                base = ".".join([*package[: len(package) - node.level + 1], base]).strip(".")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{name.name}") for name in node.names)


def unit_of(module: str) -> str:
    """The unit a module of ours belongs to; "" for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def level_of(unit: str) -> int:
    return next(at for at, level in enumerate(LEVELS) if unit in level)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_module_of_the_package_has_a_level() -> None:
    known = frozenset().union(*LEVELS)
    units = {unit_of(module) for module in library()} - {""}
    assert units <= known, f"say in LEVELS what {sorted(units - known)} may import"


def test_imports_point_one_way() -> None:
    known = frozenset().union(*LEVELS)
    upward = []
    for module, path in library().items():
        unit = unit_of(module)
        if not unit:
            continue  # the package's face: tested with the public names
        for line, imported in imports_of(path, module):
            other = unit_of(imported) if imported.split(".")[0] == "tiered_kv" else ""
            if other not in known or other == unit:
                continue
            if level_of(other) >= level_of(unit):
                upward.append(f"{where(path, line)}: {unit} imports {other}")
    assert upward == []


def test_kernels_know_of_ours_only_the_errors_and_themselves() -> None:
    wrong = [
        f"{where(path, line)}: {imported}"
        for module, path in library().items()
        if unit_of(module) == "kernels"
        for line, imported in imports_of(path, module)
        if imported.split(".")[0] == "tiered_kv" and unit_of(imported) not in {"kernels", "errors"}
    ]
    assert wrong == []


def test_what_moves_bytes_knows_nothing_of_policies_nor_policies_of_bytes() -> None:
    apart = {"storage": {"policy", "index"}, "policy": {"kernels"}, "index": {"kernels", "storage"}}
    wrong = [
        f"{where(path, line)}: {unit_of(module)} imports {imported}"
        for module, path in library().items()
        for line, imported in imports_of(path, module)
        if imported.startswith("tiered_kv.")
        and unit_of(imported) in apart.get(unit_of(module), set())
    ]
    assert wrong == []


def test_what_decides_imports_no_torch_not_even_late() -> None:
    """It runs in a scheduler process, in a simulator, and a million times in a property test."""
    wrong = [
        f"{where(path, line)}: {imported}"
        for module, path in library().items()
        if unit_of(module) in DECIDES
        for line, imported in imports_of(path, module)
        if imported.split(".")[0] in {"torch", "triton"}
        or (imported.startswith("tiered_kv.") and unit_of(imported) in {"storage", "kernels"})
    ]
    assert wrong == []


def test_an_engine_is_imported_by_its_plugin_and_by_the_replay_engines_alone() -> None:
    wrong = [
        f"{where(path, line)}: {imported}"
        for module, path in library().items()
        if not f"{module}.".startswith(ENGINE_PLACES)
        for line, imported in imports_of(path, module)
        if imported.split(".")[0] in ENGINES
    ]
    assert wrong == []


def test_nobody_imports_the_bare_names_kernels_and_storage() -> None:
    """`kernels` is Hugging Face's package; with ours in its place `import transformers` dies."""
    folders = [name for name in ("bench", "examples", "docs") if (ROOT / name).is_dir()]
    wrong = [
        f"{where(path, line)}: {imported}"
        for path in python_files("tiered_kv", "kernels", "storage", "tests", *folders)
        for line, imported in imports_of(path)
        if imported.split(".")[0] in {"kernels", "storage"}
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["kernels", "storage"])
def test_the_package_reaches_its_two_folders_by_relative_links(name: str) -> None:
    link = ROOT / "tiered_kv" / name
    assert link.is_symlink(), f"ln -s ../{name} tiered_kv/{name}"
    assert os.readlink(link) == f"../{name}"
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("name", ["kernels", "storage"])
def test_the_two_linked_folders_have_no_package_face(name: str) -> None:
    """With one, transformers takes our folder for its optional `kernels` package."""
    assert not (ROOT / name / "__init__.py").exists()


def test_no_module_is_longer_than_its_limit() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in library().values()
        if (lines := len(path.read_text().splitlines())) > MODULE_LINES
    }
    assert long == {}


def test_no_function_is_longer_than_its_limit() -> None:
    long = []
    for path in library().values():
        limit = KERNEL_LINES if path.name == "kernel.py" else FUNCTION_LINES
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > limit:
                    long.append(f"{where(path, node.lineno)}: {node.name} has {lines} lines")
    assert long == []


def test_things_are_named_for_what_they_are() -> None:
    vague = []
    for path in python_files("tiered_kv", "kernels", "storage", "tests", "bench"):
        if path.stem in VAGUE_MODULES or path.parent.name in VAGUE_MODULES:
            vague.append(str(path.relative_to(ROOT)))
        vague += [
            f"{where(path, node.lineno)}: class {node.name}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ClassDef) and node.name.endswith(VAGUE_CLASSES)
        ]
    assert vague == []


def test_every_module_postpones_its_annotations() -> None:
    """Python 3.10 is supported."""
    missing = [
        str(path.relative_to(ROOT))
        for path in library().values()
        if tree_of(path).body
        and "from __future__ import annotations" not in path.read_text()
        and len(tree_of(path).body) > 1
    ]
    assert missing == []


def test_the_reader_of_imports_sees_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "import torch.nn as nn\n"
        "from . import plan\n"
        "from ..storage.base import Tier\n"
        "def late():\n"
        "    from tiered_kv import store\n"
        "if False:\n"
        "    import kernels\n"
    )
    found = {imported for _, imported in imports_of(path, "tiered_kv.policy.module")}
    assert found >= {
        "torch.nn",
        "tiered_kv.policy.plan",
        "tiered_kv.storage.base",
        "tiered_kv.store",
        "kernels",
    }
