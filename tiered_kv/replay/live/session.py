"""A whole live replay: from settings to report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiered_kv.errors import ConfigError
from tiered_kv.replay.engines.base import LiveEngine
from tiered_kv.replay.live.counters import CounterChange
from tiered_kv.replay.live.drive import Driver, Pace
from tiered_kv.replay.live.log import RequestLog
from tiered_kv.replay.live.record import LiveRecord
from tiered_kv.replay.live.report import LiveReport, Round
from tiered_kv.replay.live.script import Conversation
from tiered_kv.replay.live.source import Source
from tiered_kv.replay.settings import ReplaySettings

Show = Callable[[int, int, str], None]
"""Told after every request: how many have ended, of how many, and a few words."""


def run_live_replay(settings: ReplaySettings, show: Show | None = None) -> LiveReport:
    """Replay against a live engine to its end or a Ctrl-C; blocks, and sleeps real pauses.

    The first SIGINT ends the replay: requests in flight are given up, and the report is of what was
    done until then. A second one is a KeyboardInterrupt, as is one before the first request. To be
    called on the main thread for that; elsewhere it runs to its end.

    Raises:
        ConfigError: an input or a setting that cannot be used, or an engine that does not answer.
        KeyboardInterrupt: see above.
    """
    return asyncio.run(_LiveReplay(settings, show).run())


class _LiveReplay:
    def __init__(self, settings: ReplaySettings, show: Show | None) -> None:
        self._settings = settings
        self._show = show
        self._source = Source.read(settings)
        self._run_id = f"tkv-{time.time_ns() // 1_000_000:x}-{secrets.token_hex(2)}"
        self._engine = _engine(settings, self._source)
        self._conversations: Sequence[Conversation] = ()
        self._rounds: list[Round] = []
        self._is_stopped = False
        self._ended = 0
        self._failed = 0

    async def run(self) -> LiveReport:
        stop = asyncio.Event()
        try:
            with _stopped_by_ctrl_c(stop):
                await self._open(stop)
                async with RequestLog(self._settings.request_log, self._run_id) as log:
                    await self._run_rounds(stop, log)
        finally:
            await self._engine.close()
        return LiveReport(
            engine=self._engine.name,
            rounds=self._rounds,
            facts=self._engine.facts(),
            source=self._source.facts(self._settings, self._conversations),
            settings=self._settings.told(),
            run_id=self._run_id,
            host=_host(),
            is_stopped=self._is_stopped,
        )

    async def _open(self, stop: asyncio.Event) -> None:
        if not await _is_done_before(stop, self._engine.open()):
            raise KeyboardInterrupt
        self._conversations = self._source.conversations(self._settings, self._engine)

    async def _run_rounds(self, stop: asyncio.Event, log: RequestLog) -> None:
        for number in range(self._settings.rounds):
            if number and not await _is_done_before(stop, self._engine.begin_round(number)):
                self._is_stopped = True
                return
            self._rounds.append(await self._run_round(number, stop, log))
            if stop.is_set() or self._rounds[-1].is_gone:
                return

    async def _run_round(self, number: int, stop: asyncio.Event, log: RequestLog) -> Round:
        arrivals = [step.arrival_s for one in self._conversations for step in one.steps]
        span_s = (max(arrivals) - min(arrivals)) / self._settings.speed_up

        def watch(record: LiveRecord, in_flight: int) -> None:
            log.write(record)
            self._ended += 1
            self._failed += not record.is_done
            if self._show is not None:
                words = self._words(in_flight, span_s - record.end_s)
                self._show(self._ended, self._planned * self._settings.rounds, words)

        driver = Driver(
            self._engine,
            self._conversations,
            Pace(self._settings.clients, self._settings.speed_up, self._settings.request_timeout_s),
            run_id=self._run_id,
            number=number,
            page_tokens=self._settings.page_tokens,
            watch=watch,
        )
        before = await self._engine.counters()
        done = await driver.run(stop)
        return Round(
            records=done.records,
            planned=self._planned,
            wall_s=done.wall_s,
            in_flight_max=done.in_flight_max,
            counted=CounterChange.between(before, await self._engine.counters()),
            interrupted=done.interrupted,
            is_gone=done.is_gone,
        )

    @property
    def _planned(self) -> int:
        return sum(len(conversation.steps) for conversation in self._conversations)

    def _words(self, in_flight: int, left_s: float) -> str:
        failed = f", {self._failed:,} failed" if self._failed else ""
        left = f", at least {left_s:,.0f} s to go" if left_s >= 1 else ""
        return f"{in_flight} in flight{failed}{left}"


def _engine(settings: ReplaySettings, source: Source) -> LiveEngine:
    """The engine that was asked for; imports what it needs, and no other."""
    if settings.engine == "openai":
        from tiered_kv.replay.engines.openai import OpenAIEngine

        return OpenAIEngine(
            url=settings.url,
            api_key=None if settings.api_key is None else settings.api_key.get_secret_value(),
            model=settings.model,
            endpoint=settings.endpoint,
            vocabulary=settings.vocabulary,
            is_text=source.has_dialogues,
            timeout_s=settings.request_timeout_s,
        )
    if settings.engine == "vllm":
        from tiered_kv.replay.engines.vllm import VllmEngine

        return VllmEngine(settings, is_text=source.has_dialogues)
    raise ConfigError(f"engine={settings.engine}: is no live engine; use run_replay")


@contextlib.contextmanager
def _stopped_by_ctrl_c(stop: asyncio.Event) -> Iterator[None]:
    """Sets `stop` at the first SIGINT; a second one acts as ever."""
    loop = asyncio.get_running_loop()

    def first() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, first)
    except (ValueError, RuntimeError, NotImplementedError):  # not on the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _is_done_before(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do some work, or give it up when `stop` is set; whether it was done."""
    task = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for one in (task, waiter):
            one.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


def _host() -> dict[str, Any]:
    """The machine that sent the requests; the engine may run on another."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()
