"""One peer in a process and an environment of its own, doing what the driver says.

    python -m bench.peers.worker NAME

Whatever a peer prints goes to stderr: stdout carries replies alone.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from bench.peers.adapter import Adapter, Setup
from bench.peers.catalogue import PEERS
from bench.peers.pages import LOOKUP_KEYS, Content, digests
from bench.peers.protocol import ProtocolError, Reply, Request, decode_request, encode

LOOKUP_REPEATS = 5


class Worker:
    """Carries requests out on one peer, opened at one page size after another."""

    def __init__(self, name: str) -> None:
        self._peer = PEERS[name]
        self._adapter: Adapter | None = None
        self._content: Content | None = None
        self._digests: list[bytes] = []

    def answer(self, request: Request) -> Reply:
        """Never raises: what fails is an error in the reply."""
        try:
            return self._do(request)
        except Exception as error:
            traceback.print_exc()
            return Reply(error=f"{type(error).__name__}: {_one_line(error)}")

    def _do(self, request: Request) -> Reply:
        if request.do == "setup":
            return self._setup(**request.arguments)
        adapter = self._adapter
        if adapter is None:
            raise RuntimeError(f"{request.do} before setup")
        if request.do == "begin":
            return self._begin(adapter, int(request.arguments["number"]))
        if request.do == "verify":
            return self._verify(adapter)
        if request.do in ("empty_host", "clear"):
            getattr(adapter, request.do)()
            return Reply()
        if request.do == "close":
            self.close()
            return Reply()
        return self._timed(adapter, request.do)

    def _setup(self, page_bytes: int, pages: int, folder: str) -> Reply:
        self.close()
        made = Setup(page_bytes, pages, Path(folder), self._peer.options)
        self._adapter = self._peer.adapter()(made)
        if self._content is None:
            self._content = Content(made.set_bytes)
        return Reply(
            facts={
                "operations": list(self._adapter.operations),
                "configuration": self._adapter.configuration(),
                "versions": self._adapter.versions(),
            }
        )

    def _begin(self, adapter: Adapter, number: int) -> Reply:
        assert self._content is not None
        adapter.begin(number)
        self._digests = self._content.fill(adapter.sources(), number)
        return Reply()

    def _timed(self, adapter: Adapter, do: str) -> Reply:
        if do not in adapter.operations:
            raise RuntimeError(f"{self._peer.name} has no {do}")
        if do.startswith("lookup"):
            return self._lookup(adapter, is_present=do == "lookup_present")
        adapter.prepare(do)
        if do.startswith("get"):
            for page in adapter.targets():
                page[:] = 0
        return _reply([_taken(getattr(adapter, do))])

    def _lookup(self, adapter: Adapter, *, is_present: bool) -> Reply:
        keys = adapter.present if is_present else adapter.absent
        found: list[int] = []
        taken = [_taken(lambda: found.append(adapter.lookup(keys))) for _ in range(LOOKUP_REPEATS)]
        wanted = LOOKUP_KEYS if is_present else 0
        if set(found) != {wanted}:
            raise RuntimeError(f"lookup found {found} of {LOOKUP_KEYS} keys, not {wanted}")
        return _reply(taken)

    def _verify(self, adapter: Adapter) -> Reply:
        came = digests(adapter.targets())
        wrong = sum(got != put for got, put in zip(came, self._digests, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {len(came)} pages came back wrong")
        return Reply(facts={"verified_pages": len(came)})

    def close(self) -> None:
        """Close the peer, if it is open."""
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.close()


def _taken(run: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def _reply(taken: list[tuple[float, float]]) -> Reply:
    return Reply(tuple(wall for wall, _ in taken), tuple(cpu for _, cpu in taken))


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def serve(worker: Worker, requests: TextIO, replies: TextIO) -> None:
    """Until there are no more requests."""
    for line in requests:
        try:
            reply = worker.answer(decode_request(line))
        except ProtocolError as error:
            reply = Reply(error=str(error))
        replies.write(encode(reply))
        replies.flush()
    worker.close()


def main(arguments: list[str]) -> int:
    """Serve the peer that is named."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Worker(arguments[0]), sys.stdin, replies)
    replies.flush()
    os._exit(0)  # some peers leave threads behind that never end


if __name__ == "__main__":
    main(sys.argv[1:])
