"""README and docs are true: their code runs, their links lead somewhere, their tables are
complete.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_kv.config import StoreConfig
from tiered_kv.plan import MISS_REASONS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("bench/*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks() -> list[object]:
    return [
        pytest.param(code, id=f"{name_of(page)}-{at}")
        for page in PAGES
        for at, (language, code) in enumerate(_FENCE.findall(page.read_text()))
        if language == "python"
    ]


@pytest.mark.parametrize("code", python_blocks())
def test_code_in_the_docs_runs(code: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", code],
        cwd=tmp_path,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in _LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_the_configuration_page_lists_every_setting_with_its_default() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    for name, field in StoreConfig.model_fields.items():
        default = "required" if field.is_required() else field.default
        shown = {None: "none", "": "empty", "required": "required"}.get(default, f"`{default}`")
        assert f"| `{name}` | {shown} |" in text


def test_the_api_page_lists_every_reason_for_a_miss() -> None:
    text = (ROOT / "docs/api.md").read_text()
    assert [reason for reason in MISS_REASONS if f"| `{reason}` |" not in text] == []


def test_every_example_is_under_60_lines() -> None:
    long = [
        name_of(path)
        for path in (ROOT / "examples").glob("*.py")
        if len(path.read_text().splitlines()) >= 60
    ]
    assert long == []
