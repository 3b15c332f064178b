"""What `import tiered_kv` promises: its names, and that it is cheap."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiered_kv
from tiered_kv import errors

ROOT = Path(tiered_kv.__file__).parent


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT.parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("name", tiered_kv.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(tiered_kv, name) is not None


def test_public_names_are_sorted_and_named_once() -> None:
    assert tiered_kv.__all__ == sorted(set(tiered_kv.__all__))


@pytest.mark.parametrize("name", tiered_kv.__all__)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(tiered_kv, name)
    assert getattr(thing, "__doc__", None)


def test_names_for_type_checkers_are_the_ones_at_run_time() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    typed = {
        name.asname or name.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert sorted(typed) == sorted(name for name in tiered_kv.__all__ if name != "__version__")
    for name, module in typed.items():
        assert getattr(importlib.import_module(str(module)), name) is getattr(tiered_kv, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tiered_kv' has no attribute 'TieredStorr'"):
        _ = tiered_kv.TieredStorr
    assert not hasattr(tiered_kv, "store_of_things")


def test_a_version_is_known() -> None:
    assert tiered_kv.__version__[0].isdigit()


def test_import_takes_neither_torch_nor_an_engine_nor_triton() -> None:
    """`tiered-kv --help` must not wait for torch, and a scheduler process may have none."""
    program = (
        "import sys, tiered_kv\n"
        "heavy = {'torch', 'triton', 'transformers', 'vllm', 'sglang', 'numpy', 'lmdb'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    assert run_python(program) == ""


def test_deciding_takes_no_torch() -> None:
    program = (
        "import sys, tiered_kv.planner, tiered_kv.keys, tiered_kv.layout, tiered_kv.counters\n"
        "print('torch' in sys.modules)"
    )
    assert run_python(program) == "False"


def test_no_module_imports_an_engine_unless_it_is_the_plugin_for_it() -> None:
    program = (
        "import importlib, pkgutil, sys, tiered_kv\n"
        "for module in pkgutil.walk_packages(tiered_kv.__path__, 'tiered_kv.'):\n"
        "    if not any(part in module.name for part in ('plugins', 'engines', '__main__')):\n"
        "        importlib.import_module(module.name)\n"
        "print(*sorted({'transformers', 'vllm', 'sglang'} & set(sys.modules)))"
    )
    assert run_python(program) == ""


def test_every_error_is_one_of_ours_and_drawn_in_the_tree() -> None:
    classes = [
        thing
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and not name.startswith("_")
    ]
    assert len(classes) > 5
    for thing in classes:
        assert issubclass(thing, errors.TieredKVError)
        assert thing.__name__ in str(errors.__doc__)
        assert thing.__name__ in tiered_kv.__all__


def test_errors_can_be_caught_as_what_python_calls_them() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.TierIOError, OSError)


def test_errors_carry_where_it_happened() -> None:
    corrupt = errors.CorruptPageError("bad", key=b"k", tier="disk", path="/p")
    assert (corrupt.key, corrupt.tier, corrupt.path) == (b"k", "disk", "/p")
    failed = errors.TierIOError("bad", tier="disk", errno=28)
    assert (failed.tier, failed.errno, str(failed)) == ("disk", 28, "bad")


def test_the_package_is_typed() -> None:
    assert (ROOT / "py.typed").is_file()


def test_every_module_says_what_it_is() -> None:
    for module in pkgutil.walk_packages(tiered_kv.__path__, "tiered_kv."):
        spec = module.module_finder.find_spec(module.name, None)
        assert spec is not None
        if spec.origin is not None:
            assert ast.get_docstring(ast.parse(Path(spec.origin).read_text())), module.name
