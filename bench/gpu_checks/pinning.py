"""What does pinned host memory cost, and does a page across two registrations come through?

Pinned are the store's own slab (touched in parallel, then registered in chunks) and, as the
baseline, one pinned tensor of torch's of the same size; then registration alone, over chunk sizes.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.gpu_checks.rig import LAYERS, Rig, checksums
from bench.rows import size_text
from tiered_kv.storage.hbm import HbmTier
from tiered_kv.storage.host import HostTier
from tiered_kv.storage.slab import Slab

_CHUNKS = (64 << 20, 1 << 30, 8 << 30)
_GIB = 1 << 30


def check_pinning(rig: Rig) -> None:
    """Seconds for each GiB of the slab, of torch's own pinned memory, and of registering alone."""
    n_bytes = rig.pick(8 * _GIB if rig.has_gpu else _GIB, 16 << 20)
    gib = n_bytes / _GIB
    touched, pinned, torchs = [], [], []
    for _ in range(rig.pick(2, 1)):
        touched.append(_slab_s(n_bytes, pin=False) / gib)
        if rig.has_gpu:
            pinned.append(_slab_s(n_bytes, pin=True) / gib)
            torchs.append(_torch_s(n_bytes) / gib)
    _report(rig, "touched", "slab, not pinned", touched, n_bytes)
    if not rig.has_gpu:
        rig.found("pinning", "registering", "nothing to pin for: no GPU")
        return
    _report(rig, "slab", "slab, touched and pinned", pinned, n_bytes)
    _report(rig, "torch", "torch, pin_memory=True", torchs, n_bytes)
    slab = Slab(n_bytes)
    try:
        for chunk in _CHUNKS:
            seconds, status = _register_s(slab, min(chunk, n_bytes))
            case = f"registering alone, {size_text(chunk)} at a time"
            if status:
                rig.found("pinning", case, f"CUDA error {status}", passed=False)
            else:
                _report(rig, f"register_{chunk >> 20}MiB", case, [seconds / gib], n_bytes)
    finally:
        slab.close()


def check_straddling(rig: Rig) -> None:
    """Pages of 3 MiB, of which one lies across the first GiB of the host slab: where a chunk ends.

    A copy that touches two registrations can be refused (sglang #36798): then chunks must end
    between pages.
    """
    page_bytes = 3 << 20 if rig.has_gpu else 96 << 10
    across = _GIB // page_bytes if rig.has_gpu else 2
    layout = rig.layout(page_bytes)
    host = HostTier(page_bytes, (across + 4) * page_bytes, pin=rig.has_gpu)
    hbm = HbmTier(layout, 2 * page_bytes, str(rig.device))
    try:
        expected = rig.content(1, page_bytes)
        rows = torch.from_numpy(expected[0]).to(rig.device).tensor_split(LAYERS)
        for layer, row in zip(hbm.layers, rows, strict=True):
            layer[0].copy_(row)
        rig.synchronize()
        page = host.view(across)
        hbm.read([0], [page])
        down = checksums(page[None]) == checksums(expected)
        hbm.write_layers([1], [page], 0, LAYERS)
        rig.synchronize()
        back = torch.cat([layer[1] for layer in hbm.layers]).cpu().numpy()[None]
        up = checksums(back) == checksums(expected)
        result = f"down {'right' if down else 'WRONG'}, up {'right' if up else 'WRONG'}"
        rig.found("straddling", f"page {across} of {size_text(page_bytes)}", result, down and up)
    finally:
        hbm.close()
        host.close()


def _slab_s(n_bytes: int, *, pin: bool) -> float:
    started = time.perf_counter()
    slab = Slab(n_bytes, pin=pin)
    taken = time.perf_counter() - started
    assert slab.is_pinned == pin, "the slab could not be pinned: see its warning"
    slab.close()
    return taken


def _torch_s(n_bytes: int) -> float:
    started = time.perf_counter()
    memory = torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=True)
    taken = time.perf_counter() - started
    del memory
    getattr(torch._C, "_host_emptyCache", int)()  # else the next one is this block, at no cost
    return taken


def _register_s(slab: Slab, chunk: int) -> tuple[float, int]:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    base, done, status = slab.array.ctypes.data, 0, 0
    started = time.perf_counter()
    while done < slab.n_bytes and not status:
        status = int(runtime.cudaHostRegister(base + done, min(chunk, slab.n_bytes - done), 0))
        done += 0 if status else chunk
    taken = time.perf_counter() - started
    for at in range(0, done, chunk):
        runtime.cudaHostUnregister(base + at)
    return taken, status


def _report(rig: Rig, metric: str, case: str, s_per_gib: list[float], n_bytes: int) -> None:
    made = rig.log.add("pinning", f"{metric}_s_per_gib", "s/GiB", s_per_gib, n_bytes=n_bytes)
    rig.found("pinning", f"{case}, {size_text(n_bytes)}", f"{made.p50:.3f} s/GiB")
