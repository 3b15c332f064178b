"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from tiered_kv.cli import progress
from tiered_kv.cli.progress import Progress


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_in_the_first_second() -> None:
    for stream in (Terminal(), io.StringIO()):
        with Progress(stream) as shown:
            shown.show(1, 10, "reused")
        assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.0)
    stream = Terminal()
    with Progress(stream) as shown:
        shown.show(1, 10, "reused")
        shown.show(10, 10, "reused")
    assert "10/10" in stream.getvalue()


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Progress(stream) as shown:
        shown.show(1, 2000, "30 % reused")
        monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
        shown.show(500, 2000, "30 % reused")
    assert stream.getvalue() == "500 of 2,000: 30 % reused\n"
