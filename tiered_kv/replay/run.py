"""Replay a workload on an engine, turn by turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tiered_kv.replay.engines.base import Engine
from tiered_kv.replay.report import TurnRecord
from tiered_kv.replay.requests import Workload

Watch = Callable[[TurnRecord], None]


@dataclass(slots=True)
class Replayed:
    """The records of a replay so far."""

    turns: list[TurnRecord] = field(default_factory=list)
    wall_s: float = 0.0
    interrupted: bool = False


def replay(
    engine: Engine, workload: Workload, *, limit: int | None = None, watch: Watch | None = None
) -> Replayed:
    """Serve every request of a workload in order; blocks. Time between requests is not slept.

    A KeyboardInterrupt ends the replay early and is not raised again: the result says so.

    Args:
        engine: answers the requests.
        workload: where they come from.
        limit: stop after so many.
        watch: called after every request.
    """
    done = Replayed()
    start = time.perf_counter()
    try:
        for position, request in enumerate(workload):
            if limit is not None and position >= limit:
                break
            outcome = engine.serve(request)
            workload.answered(request, outcome.reply_ids)
            done.turns.append(TurnRecord.of(position, request, outcome))
            if watch is not None:
                watch(done.turns[-1])
    except KeyboardInterrupt:
        done.interrupted = True
    done.wall_s = time.perf_counter() - start
    return done
