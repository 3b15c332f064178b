"""Reading pages back: long runs straight into the caller's buffers, every page verified."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

from tiered_kv.errors import CorruptPageError, TieredKVError, TierIOError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, checksum_of
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.lane import Lane, Pace
from tiered_kv.storage.disk.medium import Medium
from tiered_kv.storage.disk.parts import PageParts, pieces, scatter
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.records import LOST, Located, Records
from tiered_kv.storage.disk.runs import RUN_BYTES, Run, plan_runs, run_bytes
from tiered_kv.storage.disk.segment import SegmentFiles

Outcome = TieredKVError | None

FIRST_BYTES = 8 << 20
"""Of a longer read so much is begun before the places of the rest are looked up.

512 pages of 256 KiB, 128 MiB: 0.93 of raw reads, 0.91 without (virtio disk, 2 cores, 2026-11).
"""


class PageReader:
    """Carries out reads in the threads that ask for them. Safe to call from several threads.

    A thread has some runs under way at once and verifies each that has come while the medium is
    busy with the others: no other thread need be woken for that (`medium.py`).
    """

    def __init__(
        self,
        files: SegmentFiles,
        records: Records,
        geometry: Geometry,
        threads: int,
        precedence: Precedence,
    ):
        self.files = files
        self.records = records
        self.precedence = precedence
        self.page_bytes = geometry.page_bytes
        self.stride_bytes = geometry.stride_bytes
        self.ignored = aligned_buffer(2 * BLOCK_BYTES)  # what lies between pages is read to here
        self.medium = Medium(threads)
        reach_bytes = 2 * threads * RUN_BYTES  # for each that is read one is queued
        self._whole = Pace(reach_bytes, 3 / 4)  # nothing follows but verifying
        self._begun = Pace(reach_bytes, 1 / 2)  # others copy what has come meanwhile
        self._threads = threads
        self._own = threading.local()

    def read(self, slots: Sequence[int], into: Sequence[PageParts]) -> list[Outcome]:
        """Fill one buffer a slot; blocks. One outcome a slot, as `Tier.read` says."""
        first = max(1, FIRST_BYTES // self.stride_bytes)
        bounds = [0, *([first] if len(slots) > first else []), len(slots)]
        readings: list[_Reading] = []
        try:
            for low, high in pairwise(bounds):
                part = slots[low:high], into[low:high]
                readings.append(_Reading(self, self._lane(), *part, self._whole))
                readings[-1].begin(may_block=len(bounds) == 2)
            return [outcome for reading in readings for outcome in reading.finish()]
        except BaseException as error:
            try:
                self._lane().abandon(error)
            finally:
                for reading in readings:
                    reading.broke(error)
            raise

    def begin(self, slots: Sequence[int], into: Sequence[PageParts]) -> Callable[[], list[Outcome]]:
        """Begin to fill one buffer a slot; what is returned blocks and ends it, as `read` does.

        It must be called, once, by the thread that has called this. (A signal's exception that
        comes on the way from here to whoever keeps it leaves a read that never ends.)
        """
        reading = _Reading(self, self._lane(), slots, into, self._begun)
        try:
            reading.begin(may_block=False)
            return reading.finish
        except BaseException as error:
            reading.give_up(error)
            raise

    def close(self) -> None:
        """Give back what reading took; none is under way."""
        self.medium.close()

    def longest_run(self, pages: int) -> int:
        """Bytes of the longest run that a read of so many pages is cut into."""
        return run_bytes(pages * self.stride_bytes, self._threads)

    def _lane(self) -> Lane:
        lane: Lane | None = getattr(self._own, "lane", None)
        if lane is None:
            lane = self._own.lane = Lane(self.files, self.medium, self.stride_bytes)
        return lane


class _Reading:
    """One call of `read`: where its pages lie, where they go, what became of each slot.

    A signal's exception (Ctrl-C) may come after any call. All that is counted or held for it is
    noted here in the same step, and `broke`, which may come twice, gives it back; only a second
    signal that comes during that leaves some behind.
    """

    _found: Located

    def __init__(
        self,
        reader: PageReader,
        lane: Lane,
        slots: Sequence[int],
        into: Sequence[PageParts],
        pace: Pace,
    ) -> None:
        self.pace = pace
        self._reader = reader
        self._lane = lane
        self._slots = slots
        self._into = into
        self._outcomes: list[Outcome] = [None] * len(slots)
        self._buffers: list[Sequence[PageBuffer]] = []
        self._held: dict[int, int] = {}  # segment -> pages of it that are still to be read
        self._left = 0
        self._broke: BaseException | None = None

    def begin(self, *, may_block: bool) -> None:
        """Find its runs and begin them; one alone is read at once if that may block.

        Whatever it raises, `give_up` must follow.
        """
        reader, into = self._reader, self._into
        reader.precedence.begin_read(self)
        self._found = found = reader.records.locate(self._slots, self._held)
        for position, state in found.absent.items():
            self._outcomes[position] = self._absent(self._slots[position], state)
        self._buffers = [pieces(into[position]) for position in found.positions]
        longest_bytes = reader.longest_run(len(found.keys))
        runs = plan_runs(found.segment, found.block, reader.stride_bytes, longest_bytes)
        self._left = len(runs)
        if may_block and len(runs) == 1:
            self._read_now(runs[0])
        elif runs:
            self._lane.add(self, runs)

    def finish(self) -> list[Outcome]:
        """Block until all of it has landed."""
        try:
            while self._left and self._broke is None:
                self._lane.advance()
            if self._broke is not None:
                raise self._broke
            self._end()
            return self._outcomes
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """Whatever it has begun ends now, with all that its thread has under way. Idempotent."""
        try:
            if self._broke is None:
                self._lane.abandon(error)
        finally:
            self.broke(error)

    def vectors(self, run: Run) -> list[PageBuffer]:
        """What a run is read into, if that can be done in place."""
        reader = self._reader
        wanted = [self._buffers[at] for at in run.wanted]
        vectors: list[PageBuffer] = []
        end = run.offset
        for parts, start in zip(wanted, run.starts, strict=True):
            if start > end:  # padding and the header between two extents
                vectors.append(reader.ignored[: start - end])
            vectors.extend(parts)
            end = start + reader.page_bytes
        return vectors

    def landed(self, run: Run, detour: PageBuffer | None, error: OSError | None) -> None:
        """Verify a run that has been read; only the pages that cannot be read may fail."""
        if error is None:
            self._unload(run, detour)
            self._verify(run)
        elif len(run.wanted) == 1:
            self._note_failure(run, error)
        else:
            for at, start in zip(run.wanted, run.starts, strict=True):
                self._read_page(Run(run.segment, [at], [start], self._reader.stride_bytes))
        self._reader.records.release(run.segment, len(run.wanted), self._held)
        self._reader.precedence.has_read(run.n_bytes)
        self._left -= 1

    def broke(self, error: BaseException) -> None:
        """Nothing more of it will land. Twice is harmless."""
        self._broke = error
        for segment, pages in self._held.items():  # of none too: none may have been told of it
            self._reader.records.release(segment, pages, self._held)
        self._end()

    def _end(self) -> None:
        self._reader.precedence.end_read(self)

    def _read_now(self, run: Run) -> None:
        detour: PageBuffer | None = None
        failure: OSError | None = None
        try:
            detour = self._lane.read_alone(self, run)
        except TierIOError:  # a lasting shortage: of the whole read, and no page's
            raise
        except OSError as error:
            failure = error
        self.landed(run, detour, failure)
        self._lane.give_back(detour)

    def _read_page(self, run: Run) -> None:
        try:
            detour = self._lane.read_alone(self, run)
        except TierIOError:
            raise
        except OSError as error:
            self._note_failure(run, error)
        else:
            self._unload(run, detour)
            self._lane.give_back(detour)
            self._verify(run)

    def _unload(self, run: Run, detour: PageBuffer | None) -> None:
        if detour is not None:
            for at, start in zip(run.wanted, run.starts, strict=True):
                page = detour[start - run.offset :][: self._reader.page_bytes]
                scatter(page, self._buffers[at])

    def _note_failure(self, run: Run, error: OSError) -> None:
        (at,) = run.wanted
        self._outcomes[self._found.positions[at]] = self._failed(at, error)

    def _absent(self, slot: int, state: int) -> TieredKVError:
        if state == LOST:
            message = f"disk slot {slot}: its page was found damaged and dropped"
            return CorruptPageError(message, tier="disk")
        return TierIOError(f"disk slot {slot} holds no page", tier="disk", errno=errno.ENODATA)

    def _verify(self, run: Run) -> None:
        found = self._found
        digests = b"".join([checksum_of(*self._buffers[at]) for at in run.wanted])
        if digests == found.checksum[run.wanted].tobytes():
            return
        for number, at in enumerate(run.wanted):
            digest = digests[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
            if digest != found.checksum[at].tobytes():
                self._outcomes[found.positions[at]] = self._spoiled(at)

    def _spoiled(self, at: int) -> CorruptPageError:
        found, segment = self._found, int(self._found.segment[at])
        path, key = self._reader.files.path(segment), found.keys[at]
        return CorruptPageError(
            f"page {key.hex()[:8]} on disk does not agree with its checksum ({path} at "
            f"{int(found.block[at]) * BLOCK_BYTES}): it counts as a miss; `check` with fix drops "
            "it",
            key=key,
            tier="disk",
            path=path,
        )

    def _failed(self, at: int, error: OSError) -> TierIOError:
        path = self._reader.files.path(int(self._found.segment[at]))
        return TierIOError(
            f"page {self._found.keys[at].hex()[:8]} cannot be read from {path}: "
            f"{error.strerror or error}",
            tier="disk",
            errno=error.errno,
        )
