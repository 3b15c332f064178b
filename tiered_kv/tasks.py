"""What a run gives the streams to do: batches of moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiered_kv.plan import Move
from tiered_kv.streams import Ahead, Event, HalvesStream, Stream

Batch = Sequence[Move]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A batch for one stream.

    Attributes:
        work: makes the moves; returns those whose bytes are in place, or queued on the device.
        ready: events of the caller's that come first.
        done: fires when every move of the batch has arrived or failed.
    """

    stream: Stream
    batch: Batch
    work: Callable[[Batch], Batch]
    ready: Sequence[Event] = ()
    done: Event = field(default_factory=Event)


@dataclass(frozen=True, slots=True, eq=False)
class HalvesTask:
    """A batch for a stream that begins the next before it ends the first.

    Attributes:
        begin: begins the moves; what it returns ends them, as `Task.work` does.
        ahead: what may be left to end when it begins.
        n_bytes: what it counts there.
        done: as in `Task`.
    """

    stream: HalvesStream
    batch: Batch
    begin: Callable[[Batch], Callable[[], Batch]]
    ahead: Ahead
    n_bytes: int
    ready: Sequence[Event] = ()
    done: Event = field(default_factory=Event)
