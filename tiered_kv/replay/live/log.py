"""The log of a live replay: one JSON line a request, written while the replay goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import aiofiles

from tiered_kv.errors import ConfigError
from tiered_kv.replay.live.record import LiveRecord

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0


class RequestLog:
    """Appends records to a file, in the order they come. An async context manager.

    `write` never blocks; a task of its own writes and flushes line by line, so that a replay that
    is killed leaves what it had done. A disk that fails later costs the log, not the replay: one
    warning, and no more lines.

    Args:
        path: the file; None writes nothing.
        run_id: enters every line, since a file may hold several runs.
    """

    def __init__(self, path: Path | None, run_id: str) -> None:
        self._path = path
        self._run_id = run_id
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> RequestLog:
        """Open the file.

        Raises:
            ConfigError: it cannot be opened for writing.
        """
        if self._path is not None:
            try:
                file = await aiofiles.open(self._path, "a", encoding="utf-8")
            except OSError as error:
                raise ConfigError(
                    f"--request-log {self._path}: cannot be written: {error.strerror}"
                ) from error
            self._writer = asyncio.create_task(self._write_lines(file))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is None:
            return
        self._lines.put_nowait(None)
        done, _pending = await asyncio.wait({self._writer}, timeout=_CLOSE_S)
        if not done:
            logger.warning("--request-log %s: its last lines are still not written", self._path)
            self._writer.cancel()

    def write(self, record: LiveRecord) -> None:
        """Queue one line."""
        if self._writer is not None and not self._writer.done():
            self._lines.put_nowait(json.dumps({"run": self._run_id, **record.as_json()}) + "\n")

    async def _write_lines(self, file: Any) -> None:
        try:
            while (line := await self._lines.get()) is not None:
                await file.write(line)
                await file.flush()
        except OSError as error:
            logger.warning(
                "--request-log %s: no more is written: %s", self._path, error.strerror or error
            )
        finally:
            with contextlib.suppress(OSError):  # a full disk says so again on close
                await file.close()
