"""io_uring by system calls alone: one thread keeps the medium busy, and no other is woken for it.

Only what this package needs: reads and writes, begun together and waited for. Nothing is
registered with the kernel, so no memory is locked.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import struct
import time
import weakref
from typing import Any

from tiered_kv.storage.disk.columns import Column
from tiered_kv.storage.disk.direct_io import MAX_VECTORS, read_exact, write_exact
from tiered_kv.storage.disk.requests import MOST_REQUESTS, Request, Requests

_log = logging.getLogger(__name__)

_SETUP, _ENTER = 425, 426  # system calls: the same numbers on every architecture but alpha
_GET_EVENTS = 1
_COOP_TASKRUN, _SINGLE_ISSUER, _DEFER_TASKRUN = 1 << 8, 1 << 12, 1 << 13
_SINGLE_MMAP = 1
_OFFSET_RINGS, _OFFSET_ENTRIES = 0, 0x10000000
_NOP, _READV, _WRITEV = 0, 1, 2
_ENTRY = struct.Struct("<BBHiQQIIQ24x")  # opcode, flags, priority, fd, offset, address, length, ..
_COMPLETION = struct.Struct("<QiI")  # user data, result, flags
_DRAIN_TRIES, _DRAIN_PAUSE_S = 100, 5e-3
_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("entries", _U32),
        ("completion_entries", _U32),
        ("flags", _U32),
        ("polling", _U32 * 2),
        ("features", _U32),
        ("unused", _U32 * 4),
        ("submission", _U32 * 8),  # offsets of head, tail, mask, entries, flags, dropped, array
        ("submission_address", _U64),
        ("completion", _U32 * 8),  # offsets of head, tail, mask, entries, overflow, completions
        ("completion_address", _U64),
    )


def _system_call() -> Any:
    call = ctypes.CDLL(None, use_errno=True).syscall  # releases the interpreter's lock
    call.restype = ctypes.c_long
    return call


def _checked(returned: Any) -> int:
    result = int(returned)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Ring:
    """A submission and a completion queue shared with the kernel, for the thread that makes it.

    Without a polling thread of the kernel's, entries are taken within `enter`, by this very thread:
    what it has stored before is seen. Completions are posted within `enter` as well
    (DEFER_TASKRUN), and so what is read after it is whole. Kernels before 6.1 lack that, and may
    post from other cores; there a ring is made only where loads are never reordered (x86).

    Args:
        is_shared: for several threads, one at a time; posted to as by those older kernels.

    Raises:
        OSError: the kernel has no io_uring, or does not allow it here.
    """

    def __init__(self, entries: int, *, is_shared: bool = False) -> None:
        self._call = _system_call()
        parameters = _Parameters(flags=_COOP_TASKRUN | _SINGLE_ISSUER | _DEFER_TASKRUN)
        try:
            if is_shared:
                raise OSError(errno.EINVAL, "one thread's alone")
            self._fd = self._setup(entries, parameters)
        except OSError as error:
            if error.errno != errno.EINVAL or platform.machine() != "x86_64":
                raise
            parameters = _Parameters()
            self._fd = self._setup(entries, parameters)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        if not parameters.features & _SINGLE_MMAP:
            self._close_fd()
            raise OSError(errno.ENOSYS, "of a kernel before 5.4")
        sent, came = parameters.submission, parameters.completion
        n_bytes = max(
            sent[6] + 4 * parameters.entries, came[5] + 16 * parameters.completion_entries
        )
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self._rings = mmap.mmap(self._fd, n_bytes, flags, offset=_OFFSET_RINGS)
        size = _ENTRY.size * parameters.entries
        self._entries = mmap.mmap(self._fd, size, flags, offset=_OFFSET_ENTRIES)
        self._words = memoryview(self._rings).cast("I")
        self._sent_head, self._sent_tail = sent[0] // 4, sent[1] // 4
        self._came_head, self._came_tail, self._completions = came[0] // 4, came[1] // 4, came[5]
        self._n_entries, self._n_completions = parameters.entries, parameters.completion_entries
        for at in range(parameters.entries):
            self._words[sent[6] // 4 + at] = at
        self.tail = 0

    def push(self, operation: int, fd: int, address: int, length: int, offset: int) -> int:
        """Write the entry at `tail`; its number, which comes back. It counts once `tail` is larger.

        There must be room: no more entries than the ring has are pushed and not completed.
        """
        number = self.tail
        at = _ENTRY.size * (number % self._n_entries)
        _ENTRY.pack_into(self._entries, at, operation, 0, 0, fd, offset, address, length, 0, number)
        return number

    def enter(self, wait: int) -> None:
        """Hand over all up to `tail`; block until so many completions, or a signal, have come."""
        words = self._words
        words[self._sent_tail] = self.tail & 0xFFFFFFFF
        count = (self.tail - words[self._sent_head]) & 0xFFFFFFFF
        numbers = (self._fd, _U32(count), _U32(wait), _U32(_GET_EVENTS))
        try:
            _checked(self._call(ctypes.c_long(_ENTER), *numbers, None, ctypes.c_size_t(0)))
        except OSError as error:  # a signal; no memory just now; room for completions is made next
            if error.errno not in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                raise

    def taken(self) -> int:
        """Entries, of all ever pushed, that the kernel has taken."""
        return self.tail - ((self.tail - int(self._words[self._sent_head])) & 0xFFFFFFFF)

    def next_completion(self) -> tuple[int, int] | None:
        """The number and result of the oldest completion not passed; None if there is none."""
        head = self._words[self._came_head]
        if head == self._words[self._came_tail]:
            return None
        at = self._completions + _COMPLETION.size * (head % self._n_completions)
        number, result, _ = _COMPLETION.unpack_from(self._rings, at)
        return number, result

    def pass_completion(self) -> None:
        """Go on to the next."""
        self._words[self._came_head] = (self._words[self._came_head] + 1) & 0xFFFFFFFF

    def close(self) -> None:
        """Give it back to the kernel; nothing is under way. Twice is harmless."""
        self._words.release()
        self._rings.close()
        self._entries.close()
        self._close_fd()

    def _setup(self, entries: int, parameters: _Parameters) -> int:
        made = self._call(ctypes.c_long(_SETUP), _U32(entries), ctypes.byref(parameters))
        return _checked(made)


class RingRequests(Requests):
    """Requests by a ring of the thread that makes it.

    An exception may come between any two steps (a signal, want of memory), and then `drain` must
    know what the kernel still writes to: a request is noted before its entry counts, and forgotten
    before its completion is passed.

    Args:
        ring: one of its own if none is given.
        is_write: requests are written to the medium, not read.

    Raises:
        OSError: there can be no ring.
    """

    def __init__(self, ring: Ring | None = None, *, is_write: bool = False) -> None:
        self._ring = ring or Ring(MOST_REQUESTS)
        self._operation = _WRITEV if is_write else _READV
        self._at_once = write_exact if is_write else read_exact
        self._under_way: dict[int, tuple[Request, Column]] = {}  # the kernel may read the table

    def begin(self, request: Request) -> None:
        self._push(request, request.table)

    def submit(self) -> None:
        self._ring.enter(wait=0)

    def wait(self) -> list[Request]:
        done: list[Request] = []
        while self._under_way and not done:
            self._ring.enter(wait=1)
            done = self._reap()
        return done

    def poll(self) -> list[Request]:
        if not self._under_way:
            return []
        self._ring.enter(wait=0)
        return self._reap()

    def drain(self) -> None:
        ring, broke = self._ring, None
        ring.tail = ring.taken()
        for number in [number for number in self._under_way if number >= ring.tail]:
            self._forget(number, -errno.ECANCELED)
        failures, is_left = 0, True
        while is_left:  # once at least: a completion may have been forgotten and not passed
            try:
                while (completion := ring.next_completion()) is not None:
                    self._forget(*completion)
                    ring.pass_completion()
                is_left = bool(self._under_way)
                if is_left:
                    ring.enter(wait=1)
            except OSError:  # no memory for a moment; or it is broken, and it would be for ever
                failures += 1
                if failures == _DRAIN_TRIES:
                    raise
                time.sleep(_DRAIN_PAUSE_S)
            except BaseException as error:
                broke = error
        if broke is not None:
            raise broke

    def close(self) -> None:
        self._ring.close()

    def _push(self, request: Request, table: Column) -> None:
        count = min(len(table), MAX_VECTORS)
        address = table.ctypes.data
        offset = request.offset + request.done
        number = self._ring.push(self._operation, request.fd, address, count, offset)
        self._under_way[number] = (request, table)
        self._ring.tail = number + 1

    def _forget(self, number: int, result: int) -> None:
        """Note how a request has ended that is done in one go or not at all. Twice is harmless."""
        if number not in self._under_way:
            return
        request, _ = self._under_way[number]
        if not request.done and result == request.n_bytes:
            request.done = result
        elif not request.has_ended:
            error = -result if result < 0 else errno.EIO
            request.error = OSError(error, os.strerror(error))
        del self._under_way[number]

    def _reap(self) -> list[Request]:
        done: list[Request] = []
        while (completion := self._ring.next_completion()) is not None:
            number, result = completion
            request, _ = self._under_way[number]
            if self._is_done(request, result):
                done.append(request)
            else:
                self._push(request, request.rest())
            del self._under_way[number]
            self._ring.pass_completion()
        return done

    def _is_done(self, request: Request, result: int) -> bool:
        if result > 0:
            request.done += result
            return request.done >= request.n_bytes
        try:
            if result in (0, -errno.EIO):
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} at offset {request.offset}")
            # not now, or not in this way: what a plain system call says counts
            request.done = self._at_once(request.fd, request.vectors, request.offset)
        except OSError as error:
            request.error = error
        return True


def is_ring_allowed() -> bool:
    """Whether io_uring works in this process; says in the log why not."""
    try:
        ring = Ring(1)
    except (OSError, AttributeError, ValueError) as error:  # none on this system
        _log.info("no io_uring (%s): the disk tier uses threads", error)
        return False
    try:
        ring.push(_NOP, -1, 0, 0, 0)
        ring.tail = 1
        ring.enter(wait=1)
        return ring.next_completion() == (0, 0)
    except OSError as error:
        _log.info("io_uring does not work (%s): the disk tier uses threads", error)
        return False
    finally:
        ring.close()
