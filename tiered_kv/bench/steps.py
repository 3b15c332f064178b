"""How far a benchmark has come."""

from __future__ import annotations

from dataclasses import dataclass

from tiered_kv.bench.settings import Show


@dataclass(slots=True)
class Steps:
    """How far it has come: in cells, and in ticks within one."""

    show: Show
    cells: int
    done: int = 0
    text: str = ""
    _ticks: int = 0
    _planned: int = 1

    def begin(self, text: str, planned: int) -> None:
        """A cell of so many ticks."""
        self.text, self._ticks, self._planned = text, 0, max(1, planned)
        self._tell()

    def tick(self) -> None:
        """A sample was taken."""
        self._ticks = min(self._ticks + 1, self._planned)
        self._tell()

    def end(self) -> None:
        """The cell is done."""
        self.done += 1
        self._ticks = 0
        self._tell()

    def _tell(self) -> None:
        part = 100 * self._ticks // self._planned
        self.show(min(100 * self.done + part, 100 * self.cells), 100 * self.cells, self.text)
