"""One operation of one peer after the other, round after round: A B C A B C."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers import cold
from bench.peers.catalogue import PEERS
from bench.peers.client import ROOT, Client, WorkerError
from bench.peers.pages import LOOKUP_KEYS, WARM_UP_ROUNDS
from bench.peers.protocol import OPERATIONS, Reply, Request
from bench.peers.results import Outcome, Sample, add_synced

_SETUP_S = 240.0  # an engine's imports, with those of all the others beside them
_OPERATION_S = 120.0
_CACHED_SHARE = 0.01  # of a set: a catalog that is mapped stays in the page cache


class Driver:
    """Runs the peers of an outcome; what fails is left out from there on."""

    def __init__(self, outcome: Outcome, folder: Path, venvs: Path) -> None:
        self._outcome = outcome
        self._folder = folder
        self._venvs = venvs
        self._clients: dict[str, Client] = {}
        self._sync_s: dict[tuple[str, int, int], float] = {}
        self._operations: dict[str, list[str]] = {}

    def run(self) -> None:
        """All page sizes, each in new processes; the first rounds of each warm up."""
        for page_bytes in self._outcome.page_bytes:
            try:
                self._page_size(page_bytes)
            finally:
                for client in self._clients.values():
                    client.kill()
                self._clients.clear()
        add_synced(self._outcome, self._sync_s)

    def _start(self, name: str, page_bytes: int) -> None:
        folder = self._folder / f"{name}-{page_bytes}"
        folder.mkdir()
        log = self._folder / f"{name}.log"
        self._clients[name] = Client(PEERS[name], self._venvs, folder, log)

    def _page_size(self, page_bytes: int) -> None:
        pages = self._outcome.set_bytes // page_bytes
        print(f"{page_bytes >> 10} KiB pages:", end="", flush=True)
        for name in self._outcome.peers:
            if name not in self._outcome.failed:
                self._start(name, page_bytes)
        self._all(
            "setup",
            _SETUP_S,
            lambda client: {
                "page_bytes": page_bytes,
                "pages": pages,
                "folder": str(client.folder),
            },
            self._opened,
        )
        for number in range(1 - WARM_UP_ROUNDS, self._outcome.rounds + 1):
            self._round(page_bytes, number)
            print(f" {number if number > 0 else 'warm-up'}", end="", flush=True)
        self._all("close", _OPERATION_S)
        for client in self._clients.values():
            client.stop()
            shutil.rmtree(client.folder)
        print()

    def _opened(self, client: Client, reply: Reply) -> None:
        self._operations[client.peer.name] = list(reply.facts["operations"])
        self._outcome.facts[client.peer.name] = reply.facts

    def _round(self, page_bytes: int, number: int) -> None:
        """Rounds count from 1; those before warm up."""
        names = list(self._clients)
        first = number % max(1, len(names))
        self._all("begin", _OPERATION_S, lambda _: {"number": number + WARM_UP_ROUNDS})
        for operation in OPERATIONS:
            for name in names[first:] + names[:first]:
                if name in self._clients and operation in self._operations[name]:
                    with self._leaving_out(name):
                        self._one(self._clients[name], page_bytes, operation, number)
        self._all("clear", _OPERATION_S)

    def _one(self, client: Client, page_bytes: int, operation: str, number: int) -> None:
        name = client.peer.name
        if operation == "get_cold":
            self._make_cold(client)
        reply = client.ask(Request(operation), _OPERATION_S)
        if operation == "put_durable":
            self._sync_s[name, page_bytes, number] = cold.sync(client.folder)
        if operation.startswith("get"):
            checked = client.ask(Request("verify"), _OPERATION_S)
            self._outcome.verified_pages += int(checked.facts["verified_pages"])
        if number > 0:
            is_lookup = operation.startswith("lookup")
            count = LOOKUP_KEYS if is_lookup else self._outcome.set_bytes
            best = sorted(zip(reply.seconds, reply.cpu_seconds, strict=True))
            seconds, cpu_seconds = best[len(best) // 2]
            self._outcome.samples.append(
                Sample(name, page_bytes, operation, number, seconds, cpu_seconds, count)
            )

    def _make_cold(self, client: Client) -> None:
        client.ask(Request("empty_host"), _OPERATION_S)
        cold.sync(client.folder)
        cached = cold.drop(client.folder)
        outcome, name = self._outcome, client.peer.name
        outcome.cached_bytes[name] = max(cached, outcome.cached_bytes.get(name, 0))
        if outcome.is_cold and cached > max(_CACHED_SHARE * outcome.set_bytes, 1 << 20):
            raise WorkerError(
                f"get_cold: {cached:,} bytes of its files stayed in the page cache: not cold"
            )

    def _all(
        self,
        do: str,
        deadline_s: float,
        arguments: Callable[[Client], dict[str, Any]] = lambda _: {},
        then: Callable[[Client, Reply], None] = lambda _, __: None,
    ) -> None:
        """A chore of every worker, all at the same time."""
        asked = []
        for name, client in list(self._clients.items()):
            with self._leaving_out(name):
                client.send(Request(do, arguments(client)))
                asked.append((name, client))
        for name, client in asked:
            with self._leaving_out(name):
                then(client, client.receive(do, deadline_s))

    @contextmanager
    def _leaving_out(self, name: str) -> Iterator[None]:
        """A worker that fails is ended, named, and asked no more."""
        try:
            yield
        except WorkerError as error:
            client = self._clients.pop(name)
            client.kill()
            shutil.rmtree(client.folder, ignore_errors=True)
            self._outcome.failed[name] = sanitised(str(error), self._folder, self._venvs)
            print(f"\n{name}: FAILED: {self._outcome.failed[name]}", file=sys.stderr)


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="tiered-kv-peers-", dir=parent) as folder:
        yield Path(folder)


def sanitised(text: str, folder: Path, venvs: Path) -> str:
    """Without the paths of this machine."""
    names: Sequence[tuple[Path, str]] = (
        (folder, "DIR"),
        (venvs, "REPOSITORY"),
        (ROOT, "REPOSITORY"),
        (Path(sys.prefix), "PREFIX"),
        (Path.home(), "~"),
    )
    for path, name in sorted(names, key=lambda one: -len(str(one[0]))):
        if len(str(path)) > 1:
            text = text.replace(str(path), name)
    return text
