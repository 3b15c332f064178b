"""Caches of SGLang's over one directory, closed in the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_rig import Opener


@pytest.fixture
def open_cache(tmp_path: Path) -> Iterator[Opener]:
    """`open_cache(**how)`: a `Cache` over `open_cache.directory`."""
    opener = Opener(tmp_path / "kv")
    yield opener
    opener.close()
