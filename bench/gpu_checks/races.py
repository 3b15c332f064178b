"""Do copies wait for the kernels that write and read their pages? Each race is staged on purpose.

A store that copies on streams of its own must wait in both directions: a put for the kernel that
still writes the page (else the host copy is stale: vllm #45704), a load for the kernel that still
reads the slot (else the reader sees the next page: vllm #47282). The same race is also run with the
waiting switched off, by handing the store an event that has long fired: pages must then come out
wrong, or the race was not staged and the zero beside it says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bench.gpu_checks.rig import (
    Rig,
    Store,
    all_hbm,
    checksums,
    on_device,
    open_store,
    read_pages,
    until,
    write_pages,
    wrong_pages,
)
from tiered_kv.layout import KVLayout
from tiered_kv.streams import Event, ThreadStream

_DELAY_S = 0.05  # of the kernel in front of the one that matters: many times what a copy takes
_STEALS = 20  # attempts to get at slots that are still being read


class Caller(Protocol):
    """An engine: it queues work that takes long, and goes on."""

    after: Any  # what it gives the store to wait for

    def idle(self) -> Any:
        """An event that has fired: given to the store, it switches the waiting off."""

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work behind something slow; returns at once."""

    def let_go(self) -> None:
        """The slow thing may end now."""

    def finish(self) -> None:
        """Block until the work is done."""

    def stream(self) -> AbstractContextManager[Any]:
        """The stream this engine works on, as the current one."""

    def close(self) -> None:
        """End it."""


class CudaCaller:
    """An engine on a CUDA stream: a spinning kernel, then the work. The store makes the event."""

    after = None

    def __init__(self, device: torch.device, own_stream: bool) -> None:
        self._device = device
        self._own: Any = torch.cuda.Stream(device) if own_stream else None  # type: ignore[no-untyped-call]
        self._still: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._cycles = _cycles_for(_DELAY_S)

    def idle(self) -> Any:
        """An event recorded on a stream that does nothing."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._still)
        return event

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work on the current stream behind a spin."""
        torch.cuda._sleep(self._cycles)  # type: ignore[no-untyped-call]
        work()

    def let_go(self) -> None:
        """It ends by itself."""

    def finish(self) -> None:
        """Block until the GPU is through."""
        torch.cuda.synchronize(self._device)

    def stream(self) -> AbstractContextManager[Any]:
        """The stream this engine works on, as the current one."""
        return nullcontext() if self._own is None else torch.cuda.stream(self._own)

    def close(self) -> None:
        """Streams end with the process."""


class ThreadCaller:
    """An engine on a thread, held up by a gate: the same race without a GPU and without a clock."""

    def __init__(self) -> None:
        self._stream = ThreadStream("engine")
        self._gate = Event()
        self.after = Event()

    def idle(self) -> Any:
        """An event that has fired."""
        fired = Event()
        fired.fire()
        return fired

    def queue(self, work: Callable[[], None]) -> None:
        """Queue work on the thread, behind the gate."""
        gate = self._gate = Event()

        def slow() -> None:
            gate.wait()
            work()

        self.after = self._stream.submit(slow)

    def let_go(self) -> None:
        """Open the gate."""
        self._gate.fire()

    def finish(self) -> None:
        """Block until the work is done."""
        self.after.wait()

    def stream(self) -> AbstractContextManager[Any]:
        """There is no current stream on a CPU."""
        return nullcontext()

    def close(self) -> None:
        """End the thread."""
        self._stream.close()


def _cycles_for(seconds: float) -> int:
    """GPU clock cycles of a spin, from the time of a short one."""
    cycles = 20_000_000
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    start.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    end.record()
    end.synchronize()
    return int(cycles * seconds * 1e3 / start.elapsed_time(end))


@dataclass(slots=True)
class Stage:
    """A store whose HBM holds exactly the pages of one request, and an engine beside it."""

    rig: Rig
    store: Store
    layout: KVLayout
    caller: Caller
    pages: int

    def put(self) -> tuple[Any, list[bytes]]:
        """Store pages of new content; their keys and checksums."""
        content = self.rig.content(self.pages, self.layout.page_bytes)
        slots = all_hbm(self.store)
        pages = torch.from_numpy(content).to(self.rig.device)
        write_pages(self.store, on_device(self.store, slots), pages)
        self.rig.synchronize()
        keys = self.rig.keys(self.layout, self.pages)
        assert self.store.put(keys, slots).wait() == self.pages
        return keys, checksums(content)

    def read_later(self, slots: list[int], into: list[torch.Tensor]) -> None:
        """The engine reads slots, but not before something slow has ended."""
        at = on_device(self.store, slots)
        self.caller.queue(lambda: into.append(read_pages(self.store, at)))


def put_race(stage: Stage, waits: bool) -> int:
    """Put pages that are still being written; how many came back other than written."""
    store, caller, rig = stage.store, stage.caller, stage.rig
    content = rig.content(stage.pages, stage.layout.page_bytes)
    new = torch.from_numpy(content).to(rig.device)
    slots = all_hbm(store)
    at = on_device(store, slots)
    write_pages(store, at, torch.zeros_like(new))
    rig.synchronize()
    keys = rig.keys(stage.layout, stage.pages)
    caller.queue(lambda: write_pages(store, at, new))
    put = store.put(keys, slots, after=caller.after if waits else caller.idle())
    if waits:
        caller.let_go()
    assert put.wait() == stage.pages
    caller.let_go()
    caller.finish()
    slots = all_hbm(store)
    assert store.get(keys, into=slots).wait() == stage.pages
    wrong = wrong_pages(read_pages(store, on_device(store, slots)), checksums(content))
    store.hbm.release(slots)
    return wrong


def into_race(stage: Stage, waits: bool) -> int:
    """Load into slots that are still being read; how many pages the reader saw wrong."""
    store, caller = stage.store, stage.caller
    first, expected = stage.put()
    second, _ = stage.put()
    slots = all_hbm(store)
    assert store.get(first, into=slots).wait() == stage.pages
    seen: list[torch.Tensor] = []
    stage.read_later(slots, seen)
    load = store.get(second, into=slots, after=caller.after if waits else caller.idle())
    if waits:
        caller.let_go()
    assert load.wait() == stage.pages
    caller.let_go()
    caller.finish()
    store.hbm.release(slots)
    return wrong_pages(seen[0], expected)


def lease_race(stage: Stage, waits: bool) -> int:
    """Give a lease back while its pages are still being read, and ask for others at once.

    The second request waits for nothing, as one on another stream would: only the lease protects.
    """
    store, caller = stage.store, stage.caller
    first, expected = stage.put()
    second, _ = stage.put()
    leased = store.get(first)
    assert leased.wait() == stage.pages
    seen: list[torch.Tensor] = []
    stage.read_later(leased.slots, seen)
    leased.release(after=caller.after if waits else caller.idle())

    def steal() -> int:
        with store.get(second, after=caller.idle()) as load:
            return load.wait()

    if waits:
        for _ in range(_STEALS):
            steal()
    else:
        until(steal)
    caller.let_go()
    caller.finish()
    until(steal)
    return wrong_pages(seen[0], expected)


RACES: dict[str, tuple[str, Callable[[Stage, bool], int]]] = {
    "put": ("put while a kernel still writes", put_race),
    "into": ("load into a slot a kernel still reads", into_race),
    "lease": ("release while a kernel still reads", lease_race),
}


def check_races(rig: Rig) -> None:
    """Stage all three, with and without waiting, on the default stream and on an engine's own."""
    pages, rounds = rig.pick(8, 2), rig.pick(10, 2)
    layout = rig.layout(rig.pick(2 << 20, 64 << 10))
    callers = _callers(rig)
    store = open_store(layout, pages, 4 * pages, rig.device)
    try:
        for where, caller in callers.items():
            stage = Stage(rig, store, layout, caller, pages)
            for name in RACES:
                with caller.stream():
                    _run(stage, name, where, rounds)
            caller.close()
    finally:
        store.close()


def _callers(rig: Rig) -> dict[str, Caller]:
    if not rig.has_gpu:
        return {"a thread": ThreadCaller()}
    return {
        "default stream": CudaCaller(rig.device, own_stream=False),
        "own stream": CudaCaller(rig.device, own_stream=True),
    }


def _run(stage: Stage, name: str, where: str, rounds: int) -> None:
    rig, total = stage.rig, rounds * stage.pages
    text, race = RACES[name]
    wrong = {True: 0, False: 0}
    for _ in range(rounds):
        for waits in wrong:
            wrong[waits] += race(stage, waits)
    for waits, count in wrong.items():
        rig.log.add(
            f"race_{name}",
            "wrong_pages",
            "pages",
            [count],
            waits=waits,
            engine=where,
            of_pages=total,
            page_bytes=stage.layout.page_bytes,
        )
    is_staged = wrong[False] > 0
    result = f"{wrong[True]} of {total} wrong; without waiting {wrong[False]}"
    if not is_staged:
        result += " (the race was not staged)"
    rig.found("race", f"{text}, {where}", result, wrong[True] == 0 and is_staged)
