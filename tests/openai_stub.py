"""A small OpenAI-compatible server for tests: streams, counts, and fails on request.

Plain asyncio on a thread of its own, so that the client under test may run in this process or in
another. It keeps a prefix cache of whole blocks, as an engine does, to have something to report.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

BLOCK_TOKENS = 16
MODEL = "stub-model"
GATE_S = 20.0
"""How long a request waits for company before the stub gives up and answers 500."""

Fate = Literal[
    "answer",
    "stall",
    "break",
    "hang up",
    "no json",
    "odd form",
    "empty",
    "error event",
    "429",
    "500",
    "400",
    "too long",
    "abort",
]


@dataclass
class Stub:
    """How the server behaves, and what it has seen. Change the first part before it starts.

    `fate` decides for each model request, by its number (from 0; the client's first, short request
    is one) and body, what becomes of it. With `company`, answers start only once so many requests
    are in flight at once.
    """

    returns_ids: bool = True
    takes_ids: bool = True
    takes_extras: bool = True
    says_cached: bool = True
    has_metrics: bool = True
    has_v1: bool = True
    models_body: bytes | None = None
    max_model_len: int | None = 32_768
    api_key: str | None = None
    company: int = 0
    fate: Callable[[int, dict[str, Any]], Fate] = lambda number, body: "answer"

    bodies: list[dict[str, Any]] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    in_flight: int = 0
    in_flight_max: int = 0
    finished: int = 0
    given_up: int = 0
    queries: int = 0
    hits: int = 0
    external_hits: int = 0
    stalled: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def __enter__(self) -> Stub:
        self._blocks: set[tuple[int, ...]] = set()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(GATE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(GATE_S)
        assert not self._thread.is_alive()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def prompts(self) -> list[Any]:
        """Prompts of all model requests but the client's first, short one."""
        return [body.get("prompt", body.get("messages")) for body in self.bodies[1:]]

    async def cut(self) -> None:
        """Take no more connections and cut the open ones, as when a server dies."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(ready))
        self._loop.close()

    async def _serve(self, ready: threading.Event) -> None:
        self._over = asyncio.Event()
        self._gate = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        ready.set()
        await self._over.wait()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its response; False when the connection is to end."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.api_key is not None and headers.get("authorization") != f"Bearer {self.api_key}":
            return await _reply(writer, 401, _error("Unauthorized"))
        if path == "/metrics" and self.has_metrics:
            return await _reply(writer, 200, self._metrics().encode(), "text/plain")
        if path == "/v1/models" and self.has_v1 and method == "GET":
            return await _reply(writer, 200, self._models())
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            self.request_ids.append(headers.get("x-request-id", ""))
            return await self._generate(writer, json.loads(content), is_chat="chat" in path)
        return await _reply(writer, 404, b'{"detail":"Not Found"}')

    def _models(self) -> bytes:
        if self.models_body is not None:
            return self.models_body
        model = {"id": MODEL, "object": "model", "max_model_len": self.max_model_len}
        return json.dumps({"object": "list", "data": [model, {"id": "other"}]}).encode()

    def _metrics(self) -> str:
        return (
            "# HELP vllm:prefix_cache_queries_total tokens\n"
            "# TYPE vllm:prefix_cache_queries_total counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {self.queries}.0\n'
            "# TYPE vllm:prefix_cache_hits_total counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {self.hits}.0\n'
            "# TYPE vllm:external_prefix_cache_queries_total counter\n"
            f'vllm:external_prefix_cache_queries_total{{engine="0"}} {self.queries}.0\n'
            "# TYPE vllm:external_prefix_cache_hits_total counter\n"
            f'vllm:external_prefix_cache_hits_total{{engine="0"}} {self.external_hits}.0\n'
            "# TYPE vllm:num_requests_running gauge\n"
            f'vllm:num_requests_running{{engine="0"}} {self.in_flight}.0\n'
        )

    async def _generate(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool
    ) -> bool:
        number = len(self.bodies)
        self.bodies.append(body)
        if not self.takes_extras and ("ignore_eos" in body or "return_token_ids" in body):
            return await _reply(writer, 400, _error("Unrecognized request argument: ignore_eos"))
        if not self.takes_ids and isinstance(body.get("prompt"), list):
            return await _reply(writer, 400, _error("prompt must be a string"))
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            fate = self.fate(number, body)
            if number and self.company and not await self._has_company():
                fate = "500"
            is_kept = await self._meet(fate, writer, body, is_chat=is_chat)
            self.finished += fate == "answer"
            return is_kept
        except (ConnectionError, asyncio.CancelledError):
            self.given_up += 1
            raise
        finally:
            self.in_flight -= 1

    async def _has_company(self) -> bool:
        if self.in_flight >= self.company:
            self._gate.set()
        try:
            await asyncio.wait_for(self._gate.wait(), GATE_S)
        except asyncio.TimeoutError:
            return False
        return True

    async def _meet(
        self, fate: Fate, writer: asyncio.StreamWriter, body: dict[str, Any], *, is_chat: bool
    ) -> bool:
        refusals: dict[Fate, tuple[int, str]] = {
            "429": (429, "slow down"),
            "500": (500, "EngineCore encountered an issue"),
            "400": (400, "logit_bias is odd"),
            "too long": (400, "This model's maximum context length is 8 tokens. However, ..."),
        }
        if fate in refusals:
            status, message = refusals[fate]
            return await _reply(writer, status, _error(message))
        if fate == "hang up":
            writer.transport.abort()
            return False
        await _start_stream(writer)
        events = [event async for event in self._events(body, is_chat=is_chat)]
        if fate == "answer":
            for event in events:
                await _send(writer, f"data: {event}\n\n")
            return await _end_stream(writer)
        return await self._fail(fate, writer, events)

    async def _fail(self, fate: Fate, writer: asyncio.StreamWriter, events: list[str]) -> bool:
        if fate == "empty":
            await _send(writer, "data: [DONE]\n\n")
            return await _end_stream(writer)
        await _send(writer, f"data: {events[0]}\n\n")
        if fate == "stall":
            self.stalled.set()
            await self._watch_for_the_end(writer)
            raise ConnectionError("the client has gone")
        if fate == "break":
            writer.transport.abort()
            return False
        last = {
            "no json": "<html>bad gateway</html>",
            "odd form": '{"choices": [7]}',
            "error event": json.dumps({"error": {"message": "KV load failed", "code": 500}}),
            "abort": json.dumps({"choices": [{"text": "", "finish_reason": "abort"}]}),
        }[fate]
        await _send(writer, f"data: {last}\n\ndata: [DONE]\n\n")
        return await _end_stream(writer)

    async def _watch_for_the_end(self, writer: asyncio.StreamWriter) -> None:
        """Until the client closes its side; comments are sent, as some servers do."""
        while not writer.transport.is_closing():
            await _send(writer, ": still thinking\n\n")
            await asyncio.sleep(0.01)

    async def _events(self, body: dict[str, Any], *, is_chat: bool) -> AsyncIterator[str]:
        prompt = _tokens_of(body)
        cached = self._look_up(prompt)
        reply = [(sum(prompt) + at) % 200 for at in range(body["max_tokens"])]
        if is_chat:
            yield json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for at, token in enumerate(reply):
            finish = "length" if at == len(reply) - 1 else None
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            if is_chat:
                choice["delta"] = {"content": f"w{token} "}
            else:
                choice["text"] = f"w{token} "
            if self.returns_ids and body.get("return_token_ids"):
                choice["token_ids"], choice["text"] = [token], ""
            yield json.dumps({"choices": [choice]})
        self._remember([*prompt, *reply[:-1]])  # the last token has no KV yet
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(reply)}
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"

    def _look_up(self, prompt: list[int]) -> int:
        cached = 0
        while tuple(prompt[: cached + BLOCK_TOKENS]) in self._blocks:
            cached += BLOCK_TOKENS
        cached = min(cached, (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        self.queries += len(prompt)
        self.hits += cached
        self.external_hits += cached // 2
        return cached

    def _remember(self, tokens: list[int]) -> None:
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            self._blocks.add(tuple(tokens[:end]))


def _tokens_of(body: dict[str, Any]) -> list[int]:
    """Token ids as they are; text as one token a byte."""
    prompt = body.get("prompt", body.get("messages"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        return prompt
    return list((prompt if isinstance(prompt, str) else json.dumps(prompt)).encode())


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "Error"}}).encode()


async def _reply(
    writer: asyncio.StreamWriter, status: int, body: bytes, kind: str = "application/json"
) -> bool:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return True


async def _start_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def _send(writer: asyncio.StreamWriter, text: str) -> None:
    data = text.encode()
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def _end_stream(writer: asyncio.StreamWriter) -> bool:
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True
