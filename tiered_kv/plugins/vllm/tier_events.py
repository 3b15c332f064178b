"""Announcements: the KV events of the disk tier, what is stored and what is gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

_CHECKED_AT_LEAST = 64


class Announcements:
    """Tells whoever listens to vLLM's KV events what the disk holds.

    What is gone is noticed with the stores that made it go: each of them has a few of the oldest
    announcements looked at. Pages of an earlier run are announced when they are stored again.

    Args:
        holds: for each page whether it is still on disk; cheap.
    """

    def __init__(self, holds: Callable[[Sequence[OffloadKey]], list[bool]]) -> None:
        self._holds = holds
        self._announced: OrderedDict[OffloadKey, None] = OrderedDict()
        self._events: list[OffloadingEvent] = []

    def stored(self, keys: Collection[OffloadKey]) -> None:
        """Pages are on disk now; others may have left for them."""
        self._tell(keys, is_removed=False)
        for key in keys:
            self._announced[key] = None
            self._announced.move_to_end(key)
        n_checked = min(len(self._announced), max(4 * len(keys), _CHECKED_AT_LEAST))
        self.gone(list(islice(self._announced, n_checked)))

    def gone(self, keys: Iterable[OffloadKey]) -> None:
        """These may be gone: tell so of those that are, if they were announced."""
        asked = [key for key in keys if key in self._announced]
        gone: list[OffloadKey] = []
        for key, is_held in zip(asked, self._holds(asked), strict=True):
            if is_held:
                self._announced.move_to_end(key)
            else:
                del self._announced[key]
                gone.append(key)
        self._tell(gone, is_removed=True)

    def take(self) -> list[OffloadingEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def _tell(self, keys: Collection[OffloadKey], *, is_removed: bool) -> None:
        if keys:
            self._events.append(
                OffloadingEvent(
                    list(keys), Medium.STORAGE, removed=is_removed, locality=Locality.LOCAL
                )
            )
