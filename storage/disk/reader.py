"""Reading pages back: long runs straight into the caller's buffers, every page verified."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

from tiered_kv.errors import CorruptPageError, TieredKVError, TierIOError
from tiered_kv.storage.base import PageBuffer
from tiered_kv.storage.disk.direct_io import BLOCK_BYTES, aligned_buffer, is_aligned
from tiered_kv.storage.disk.extent import CHECKSUM_BYTES, checksum_of, hashing_threads
from tiered_kv.storage.disk.geometry import Geometry
from tiered_kv.storage.disk.parts import PageParts, pieces, scatter
from tiered_kv.storage.disk.precedence import Precedence
from tiered_kv.storage.disk.records import LOST, Located, Records
from tiered_kv.storage.disk.runs import RUN_BYTES, Run, plan_runs, run_bytes
from tiered_kv.storage.disk.segment import SegmentFiles

_HAND_OVER_S = 2e-4
Outcome = TieredKVError | None


class _Request(NamedTuple):
    """One call of `read`: where its pages lie, where they go, what became of each slot."""

    found: Located
    into: list[Sequence[PageBuffer]]
    outcomes: list[Outcome]


class PageReader:
    """Carries out reads on its own threads. Safe to call from several threads.

    Some threads read, others verify what has been read, so that the medium waits for no checksum.

    Memory of its own: one bounce buffer of a run a thread, and only where buffers of callers are
    not aligned or pages are no multiple of a block.
    """

    def __init__(
        self,
        files: SegmentFiles,
        records: Records,
        geometry: Geometry,
        threads: int,
        precedence: Precedence,
    ):
        self._files = files
        self._records = records
        self._page_bytes = geometry.page_bytes
        self._stride = geometry.stride_bytes
        self._threads = threads
        self._medium = threading.Semaphore(threads)  # held while it is being read
        self._precedence = precedence
        self._own = threading.local()
        self._ignored = aligned_buffer(2 * BLOCK_BYTES)  # what lies between pages is read to here
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tiered-kv-disk-read")
        self._verifiers = ThreadPoolExecutor(
            hashing_threads(geometry.page_bytes), thread_name_prefix="tiered-kv-disk-verify"
        )

    def read(self, slots: Sequence[int], into: Sequence[PageParts]) -> list[Outcome]:
        """Fill one buffer a slot; blocks. One outcome a slot, as `Tier.read` says."""
        with self._precedence.reading():
            found = self._records.locate(slots)
            outcomes: list[Outcome] = [None] * len(slots)
            for position, state in found.absent.items():
                outcomes[position] = self._absent(slots[position], state)
            buffers = [pieces(into[position]) for position in found.positions]
            request = _Request(found, buffers, outcomes)
            longest = run_bytes(len(found.keys) * self._stride, self._threads)
            runs = plan_runs(found.segment, found.block, self._stride, longest)
            if len(runs) == 1:  # the hop to another thread costs more than it gives
                if self._fetch(request, runs[0], self._vectors(request, runs[0])):
                    self._verify(request, runs[0])
                return outcomes
            fetched = [self._begin(request, run, at) for at, run in enumerate(runs)]
            for verified in [future.result() for future in fetched]:
                if verified is not None:
                    verified.result()
            return outcomes

    def close(self) -> None:
        """Let reads under way finish and stop the threads."""
        self._pool.shutdown(wait=True)
        self._verifiers.shutdown(wait=True)

    def _absent(self, slot: int, state: int) -> TieredKVError:
        if state == LOST:
            message = f"disk slot {slot}: its page was found damaged and dropped"
            return CorruptPageError(message, tier="disk")
        return TierIOError(f"disk slot {slot} holds no page", tier="disk", errno=errno.ENODATA)

    def _begin(self, request: _Request, run: Run, at: int) -> Future[Future[None] | None]:
        begun = threading.Event()
        vectors = self._vectors(request, run)
        fetched = self._pool.submit(self._carry_out, request, run, vectors, begun)
        if at < self._threads:  # one may be free, and needs the interpreter's lock to begin:
            begun.wait(_HAND_OVER_S)  # going on, we would keep it from that for 5 ms
        return fetched

    def _carry_out(
        self,
        request: _Request,
        run: Run,
        vectors: list[PageBuffer] | None,
        begun: threading.Event,
    ) -> Future[None] | None:
        """Runs on a reading thread; what comes is verified by another."""
        begun.set()
        if self._fetch(request, run, vectors):
            return self._verifiers.submit(self._verify, request, run)
        return None

    def _vectors(self, request: _Request, run: Run) -> list[PageBuffer] | None:
        """What a run is read into; None if that cannot be done in place."""
        wanted = [request.into[at] for at in run.wanted]
        if self._files.direct_io and not is_aligned(*chain.from_iterable(wanted)):
            return None
        vectors: list[PageBuffer] = []
        end = run.offset
        for parts, start in zip(wanted, run.starts, strict=True):
            if start > end:  # padding and the header between two extents
                vectors.append(self._ignored[: start - end])
            vectors.extend(parts)
            end = start + self._page_bytes
        return vectors

    def _fetch(self, request: _Request, run: Run, vectors: list[PageBuffer] | None) -> bool:
        """Read a run; whether it has come and is yet to be verified."""
        try:
            self._move(request, run, vectors)
            return True
        except OSError as error:
            if len(run.wanted) == 1:
                self._note_failure(request, run, error)
                return False
            for at, start in zip(run.wanted, run.starts, strict=True):
                # only the pages that cannot be read may fail
                self._fetch_alone(request, Run(run.segment, [at], [start], self._stride))
            return False
        finally:
            self._records.release(run.segment, len(run.wanted))
            self._precedence.has_read(run.n_bytes)

    def _fetch_alone(self, request: _Request, run: Run) -> None:
        try:
            self._move(request, run, self._vectors(request, run))
        except OSError as error:
            self._note_failure(request, run, error)
        else:
            self._verify(request, run)

    def _note_failure(self, request: _Request, run: Run, error: OSError) -> None:
        (at,) = run.wanted
        request.outcomes[request.found.positions[at]] = self._failed(request.found, at, error)

    def _move(self, request: _Request, run: Run, vectors: list[PageBuffer] | None) -> None:
        if vectors is not None:
            self._files.read(run.segment, vectors, run.offset)
            return
        bounce = self._bounce()
        self._files.read(run.segment, [bounce[: run.n_bytes]], run.offset)
        for at, start in zip(run.wanted, run.starts, strict=True):
            scatter(bounce[start - run.offset :][: self._page_bytes], request.into[at])

    def _bounce(self) -> PageBuffer:
        buffer: PageBuffer | None = getattr(self._own, "bounce", None)
        if buffer is None:
            buffer = self._own.bounce = aligned_buffer(max(RUN_BYTES, self._stride))
        return buffer

    def _verify(self, request: _Request, run: Run) -> None:
        found, into = request.found, request.into
        digests = b"".join([checksum_of(*into[at]) for at in run.wanted])
        if digests == found.checksum[run.wanted].tobytes():
            return
        for number, at in enumerate(run.wanted):
            digest = digests[number * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
            if digest != found.checksum[at].tobytes():
                request.outcomes[found.positions[at]] = self._spoiled(found, at)

    def _spoiled(self, found: Located, at: int) -> CorruptPageError:
        path, key = self._files.path(int(found.segment[at])), found.keys[at]
        return CorruptPageError(
            f"page {key.hex()[:8]} on disk does not agree with its checksum ({path} at "
            f"{int(found.block[at]) * BLOCK_BYTES}): it counts as a miss; `check` with fix drops "
            "it",
            key=key,
            tier="disk",
            path=path,
        )

    def _failed(self, found: Located, at: int, error: OSError) -> TierIOError:
        path = self._files.path(int(found.segment[at]))
        return TierIOError(
            f"page {found.keys[at].hex()[:8]} cannot be read from {path}: "
            f"{error.strerror or error}",
            tier="disk",
            errno=error.errno,
        )
