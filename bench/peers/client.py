"""The driver's end of a worker: start it, ask it, and end it with all it has started."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from bench import rows
from bench.peers.catalogue import Peer
from bench.peers.protocol import ProtocolError, Reply, Request, decode_reply, encode

ROOT = rows.RESULTS.parents[1]
_STOP_S = 10.0
_TAIL_BYTES = 4000


class WorkerError(Exception):
    """A worker that failed, died or did not answer; the message is one line."""


def python_of(peer: Peer, venvs: Path) -> Path:
    """The interpreter of a peer's environment."""
    if peer.venv is None:
        return Path(sys.executable)
    return venvs / peer.venv / "bin" / "python"


def missing(peer: Peer, venvs: Path) -> str | None:
    """Why a peer cannot be started here, and what to do about it; None if it can."""
    if python_of(peer, venvs).exists():
        return None
    return f"{peer.venv} is not there: run `make bench-peers`, which makes it"


class Client:
    """One worker. Every wait has a deadline.

    Args:
        folder: for the peer's files.
        log: where it writes what it has to say besides.
    """

    def __init__(self, peer: Peer, venvs: Path, folder: Path, log: Path) -> None:
        self.peer = peer
        self.folder = folder
        self._log = log
        venv = venvs / peer.venv if peer.venv else Path(sys.prefix)
        own = {key: value.format(venv=venv) for key, value in peer.environment.items()}
        environment = {**os.environ, **own, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        command = [str(python_of(peer, venvs)), "-m", "bench.peers.worker", peer.name]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self._received = bytearray()

    def ask(self, request: Request, deadline_s: float) -> Reply:
        """Send and wait. Raises WorkerError."""
        self.send(request)
        return self.receive(request.do, deadline_s)

    def send(self, request: Request) -> None:
        """Raises WorkerError if it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(request).encode())
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(f"{request.do}: {self._last_words()}") from error

    def receive(self, what: str, deadline_s: float) -> Reply:
        """The next reply.

        Raises:
            WorkerError: it says that it failed, is gone, or says nothing in time.
        """
        line = self._line(what, time.monotonic() + deadline_s)
        try:
            reply = decode_reply(line)
        except ProtocolError as error:
            raise WorkerError(f"{what}: {error}") from error
        if reply.error is not None:
            raise WorkerError(f"{what}: {reply.error}")
        return reply

    def _line(self, what: str, deadline: float) -> str:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise WorkerError(f"{what}: no answer in time")
                piece = os.read(fd, 1 << 16)
                if not piece:
                    raise WorkerError(f"{what}: {self._last_words()}")
                self._received += piece
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        return line.decode()

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        written = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        return f"ended with exit code {self._process.poll()}: {(lines or ['it said nothing'])[-1]}"

    def stop(self) -> None:
        """End it: nothing it has started stays behind. Twice is harmless."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """End it now, in whatever it is."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
