"""A slab: page-aligned host memory that one owner cuts into slots.

A private anonymous mapping with huge pages, because Python's own default (`mmap.mmap(-1, n)`) is a
shared one, which gets none: first touch 6.0 against 0.9 GB/s and gathers 1.3-1.7 times slower
(2-core Zen3 VM, 2026-11). It is touched at once, in parallel, so that no copy pays for page faults
later.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from tiered_kv.errors import CapacityError
from tiered_kv.storage.base import PageBuffer

_log = logging.getLogger(__name__)

ALIGNMENT = 4096  # what O_DIRECT may ask of a buffer
_TOUCH_CHUNK = 64 << 20
_PIN_CHUNK = 1 << 30  # one registration of >= 512 GiB fails and leaves a CUDA error (vllm #51080)


def align_up(n_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-n_bytes // alignment) * alignment


class Slab:
    """Host memory, zeroed, page-aligned, owned until `close`.

    Args:
        n_bytes: how much; rounded up to whole system pages.
        pin: register it with CUDA, so that copies to and from the GPU are asynchronous.
        slot_bytes: what it will be cut into: no registration ends inside a slot, for a copy across
            two of them fails (SGLang #36798).

    Raises:
        CapacityError: the system will not give that much memory.
    """

    def __init__(self, n_bytes: int, *, pin: bool = False, slot_bytes: int = ALIGNMENT) -> None:
        self.n_bytes = align_up(n_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, self.n_bytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(
                f"no {n_bytes:,} bytes of host memory to be had: {error}"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise_huge_pages()
        self.array: PageBuffer = np.frombuffer(self._map, dtype=np.uint8)
        self._touch()
        self._pinned: list[int] = []
        if pin:
            self._pin(max(1, _PIN_CHUNK // slot_bytes) * slot_bytes)

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA has all of it registered."""
        return bool(self._pinned)

    def tensor(self) -> torch.Tensor:
        """The whole slab as a uint8 tensor that shares its memory."""
        return torch.from_numpy(self.array)

    def _advise_huge_pages(self) -> None:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            _log.debug("no transparent huge pages here; copies will be somewhat slower")

    def _touch(self) -> None:
        address = self.array.ctypes.data
        offsets = range(0, self.n_bytes, _TOUCH_CHUNK)
        with ThreadPoolExecutor(4, thread_name_prefix="slab-touch") as pool:
            list(
                pool.map(
                    lambda at: ctypes.memset(address + at, 0, min(_TOUCH_CHUNK, self.n_bytes - at)),
                    offsets,
                )
            )

    def _pin(self, chunk_bytes: int) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for at in range(0, self.n_bytes, chunk_bytes):
            address = self.array.ctypes.data + at
            status = runtime.cudaHostRegister(address, min(chunk_bytes, self.n_bytes - at), 0)
            if int(status) != 0:
                self._unpin()
                _clear_cuda_error()
                _log.warning(
                    "could not pin %d bytes of host memory (CUDA error %d): copies to and from the "
                    "GPU will be synchronous and about half as fast; check `ulimit -l`",
                    self.n_bytes,
                    int(status),
                )
                return
            self._pinned.append(address)

    def _unpin(self) -> None:
        if not self._pinned:
            return
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for address in self._pinned:
            runtime.cudaHostUnregister(address)
        self._pinned = []

    def close(self) -> None:
        """Give the memory back. Views of it that are still held keep it mapped until they go."""
        self._unpin()
        self.array = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            _log.debug("views of a closed slab are still held; its memory goes with them")


def _clear_cuda_error() -> None:
    """Take the error of a failed registration away, lest the next kernel launch be blamed for it.

    torch has no call for that; a launch of our own collects it (vllm #51081).
    """
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
