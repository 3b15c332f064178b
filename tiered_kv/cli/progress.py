"""Progress of a long command: a bar on a terminal, an occasional line elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich import progress as rich_progress

_BAR_AFTER_S = 1.0
_LINE_EVERY_S = 15.0


class Progress:
    """Shows how far a command has come. Nothing is shown in its first second.

    Args:
        stream: where people read; a bar is drawn only if it is a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start_s = time.monotonic()
        self._line_s = self._start_s
        self._bar: rich_progress.Progress | None = None
        self._task: rich_progress.TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int, text: str) -> None:
        """Say that `done` of `total` are done; cheap enough to be called for each."""
        now_s = time.monotonic()
        if not self._stream.isatty():
            if now_s - self._line_s >= _LINE_EVERY_S:
                self._line_s = now_s
                print(f"{done:,} of {total:,}: {text}", file=self._stream, flush=True)
        elif now_s - self._start_s >= _BAR_AFTER_S:
            self._draw(done, total, text)

    def _draw(self, done: int, total: int, text: str) -> None:
        if self._bar is None:
            self._bar, self._task = self._new_bar(total)
        assert self._task is not None
        self._bar.update(self._task, completed=done, description=text)

    def _new_bar(self, total: int) -> tuple[rich_progress.Progress, rich_progress.TaskID]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        bar = RichProgress(*columns, console=Console(file=self._stream), transient=True)
        bar.start()
        return bar, bar.add_task("", total=total)
