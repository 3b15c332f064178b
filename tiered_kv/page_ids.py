"""Which page a key is: a dict that is filled as it is used, after pages were found again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import filterfalse, repeat

import numpy as np

from tiered_kv.columns import FEW
from tiered_kv.found import KeyOrder, beginnings_of
from tiered_kv.keys import KEY_BYTES, PageKey

_NOTHING = KeyOrder(np.empty(0, np.uint64), np.empty(0, np.int32))


class PageIds(dict[PageKey, int]):
    """Key -> page.

    To fill a dict would be a third of the time that opening a store takes, 0.25 us a page. So pages
    that are restored are *asleep* at first: not in the dict, but found by the first 8 bytes of
    their keys, in order of these, when they are asked for. That takes 1.3 to 2 us a page, once;
    then they stand side by side as they are used, and are matched at 5 M pages/s instead of 2.5.
    Every key that is no page's rouses one of them, so that at last none sleeps, and this is a dict
    like any other (1 M pages, Xeon 2.8 GHz, 2026-11).

    What takes keys must call `rouse` with them before it asks the dict, while `sleeps`.
    """

    __slots__ = ("_known", "_next", "_order", "sleeps")

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = False
        self._known: list[PageKey | None] = []
        self._order = _NOTHING
        self._next = 0  # pages below are in the dict, if they still are pages

    def restore(self, known: list[PageKey | None], order: KeyOrder | None) -> None:
        """Take over pages 0 to `len(known) - 1`.

        Args:
            known: the key of each page, kept: None, or another one, once the page is forgotten.
                An equal key takes the place of one that is asked for.
            order: of the keys; the page of a key is its row. Without it none sleeps.
        """
        assert not self
        if order is None:
            self._take(known, 0, len(known))
            assert len(self) == len(known), "a key is restored twice"
            return
        self.sleeps, self._known, self._order, self._next = True, known, order, 0
        for page in order.rows[order.alike()].tolist():  # only the first is found
            self._take(known, page, page + 1)

    def prefix(self, keys: Sequence[PageKey]) -> list[int]:
        """The pages of keys, up to the first that is no page's."""
        if self.sleeps:
            self.rouse(keys)
        if keys and keys[-1] in self:  # and so are those before it, if they are of one prompt
            try:
                return list(map(self.__getitem__, keys))  # 45 ns a page
            except KeyError:
                pass
        return list(iter(map(self.get, keys).__next__, None))  # 85; a loop: 125

    def rouse(self, keys: Sequence[PageKey]) -> None:
        """Take in those of the keys that are asleep, and another for each that is no page's."""
        missing = list(filterfalse(self.__contains__, keys))
        if not missing:
            return
        known, count = self._known, len(self._order.rows)
        unknown = 0
        for key, page in zip(missing, self._pages(missing), strict=True):
            if known[page] == key:
                self[key] = page
                known[page] = key  # one object, and beside those that are used with it
            else:
                unknown += 1
        upto = min(self._next + unknown, count)
        self._take(known, self._next, upto)
        self._next = upto
        if upto == count:
            self.sleeps, self._known, self._order = False, [], _NOTHING

    def _pages(self, keys: Sequence[PageKey]) -> list[int]:
        """For each key the one restored page that may be its."""
        beginnings, rows = self._order.beginnings, self._order.rows
        last = len(rows) - 1
        if len(keys) < FEW:
            numbers = (int.from_bytes(key[:8], "big") for key in keys)
            places = map(bisect_left, repeat(memoryview(beginnings.data)), numbers)
            return [int(rows[min(place, last)]) for place in places]
        wanted = beginnings_of(np.frombuffer(b"".join(keys), f"V{KEY_BYTES}"))
        pages: list[int] = rows[np.minimum(np.searchsorted(beginnings, wanted), last)].tolist()
        return pages

    def _take(self, known: list[PageKey | None], first: int, upto: int) -> None:
        pages = zip(known[first:upto], range(first, upto), strict=True)
        self.update(pages)  # type: ignore[arg-type]
        self.pop(None, None)  # type: ignore[call-overload]  # what is forgotten has no key
