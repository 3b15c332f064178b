"""Fixtures that several test files share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_rig import Rig

# Tests inside real engines have environments and settings of their own: `make test-engines`.
collect_ignore = ["engines"]

# What a script starts in the background ignores Ctrl-C; tests send it, to themselves and to others.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Rig]:
    """Opens stores that can be held up and made to fail; closes them in the end."""
    rig = Rig(tmp_path)
    yield rig
    rig.let_all_go()
    for store in rig.opened:
        store.close()
