"""Pages on their way to disk, in columns: what Python does for each of them is done for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tiered_kv.keys import PageKey
from tiered_kv.storage.base import Page
from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.extent import RECORD, name_pages
from tiered_kv.storage.disk.parts import PartedPage
from tiered_kv.storage.disk.writes import Job


@dataclass(slots=True, eq=False)
class Batch:
    """Pages that become durable together: written, synced, then committed.

    Attributes:
        rows: their records (`RECORD`), set as they are appended: the first write is 0.4 ms earlier.
        chunks: the writes begun, each of one extent or a few, and the segment it goes to, in order.
        durable_below: when it is on the medium, so are all extents with a smaller number.
        failure: why it will not become durable.
    """

    slots: Column
    keys: list[PageKey]
    parents: list[PageKey | None]
    pages: Sequence[Page | PartedPage]
    page_bytes: int
    rows: Column
    chunks: list[tuple[int, Job]] = field(default_factory=list)
    durable_below: int = 0
    failure: BaseException | None = None

    @classmethod
    def of(cls, slots: Sequence[int], pages: Sequence[Page | PartedPage], page_bytes: int) -> Batch:
        """Pages, each with its slot, in the order in which they will lie."""
        keys, parents = [page.key for page in pages], [page.parent for page in pages]
        rows = np.zeros(len(keys), RECORD)
        return cls(np.array(slots, np.int64), keys, parents, pages, page_bytes, rows)

    @classmethod
    def joined(cls, batches: Sequence[Batch]) -> Batch:
        """One batch of several that were appended one after the other."""
        if len(batches) == 1:
            return batches[0]
        last = batches[-1]
        return cls(
            np.concatenate([batch.slots for batch in batches]),
            [key for batch in batches for key in batch.keys],
            [parent for batch in batches for parent in batch.parents],
            [page for batch in batches for page in batch.pages],
            last.page_bytes,
            np.concatenate([batch.rows for batch in batches]),
            [chunk for batch in batches for chunk in batch.chunks],
            last.durable_below,
        )

    def name(self, here: slice) -> None:
        """Set what the records of these pages say but checksum, sequence and offset."""
        name_pages(self.rows[here], self.keys[here], self.parents[here], self.page_bytes)

    def __len__(self) -> int:
        return len(self.keys)
