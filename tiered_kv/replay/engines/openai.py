"""An engine behind an OpenAI-compatible server: vLLM, SGLang, or any other that streams."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tiered_kv.errors import ConfigError
from tiered_kv.replay.engines.openai_stream import error_message, failure_of_status, read_answer
from tiered_kv.replay.live.answer import Answer, LiveRequest, Messages, Prompt, RequestFailedError
from tiered_kv.replay.live.counters import Counters, parse_counters
from tiered_kv.replay.live.settings import Endpoint
from tiered_kv.replay.messages import Message
from tiered_kv.replay.requests import as_ids
from tiered_kv.replay.tokenizer import Tokenizer, message_text

_CONNECT_S = 10.0
_MODELS_S = 60.0
_METRICS_S = 10.0  # read after Ctrl-C too

_KEEP_S = 2.0
"""An idle connection is not used again after this: servers close theirs (uvicorn after 5 s), and a
request sent at that moment would fail.
"""

_SAFE_VOCABULARY = 256
_FIRST_PROMPT = tuple(range(40, 48))
"""Too short to fill a page of any engine, so that it leaves no prefix behind."""

_ERROR_BODY_BYTES = 64 * 1024


class OpenAIEngine:
    """Streams answers from a server's `/completions` or `/chat/completions`, over one pool.

    Prompts are token ids where the server gives an answer's ids back (`return_token_ids`: vLLM and
    SGLang do); then a conversation repeats exactly, answers included. Otherwise they are text.
    Answers are greedy, and of full length where the server knows `ignore_eos`.

    Args:
        url: base address, such as ``http://127.0.0.1:8000/v1``.
        api_key: sent as a bearer token; None sends none.
        model: one that the server offers; None takes the first.
        endpoint: "completions" or "chat".
        vocabulary: ids of prompts lie below this; None: 256. An id that the model lacks is an
            error of the server at best, and ends it at worst.
        is_text: prompts are text whatever the server can.
        timeout_s: for the first, short request; later ones have their caller's deadline.

    Raises:
        ConfigError: the address or the key cannot be used.
    """

    name = "openai"

    def __init__(
        self,
        *,
        url: str,
        api_key: str | None = None,
        model: str | None = None,
        endpoint: Endpoint = "completions",
        vocabulary: int | None = None,
        is_text: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = _base_url(url)
        self._model = model
        self._endpoint = endpoint
        self._path = "/completions" if endpoint == "completions" else "/chat/completions"
        self._extras: dict[str, Any] = {"ignore_eos": True}
        self._timeout_s = timeout_s
        self._needs_ids = False
        self.takes_ids = endpoint == "completions" and not is_text
        self.vocabulary = vocabulary or _SAFE_VOCABULARY
        self.tokenizer: Tokenizer | None = None
        self.max_tokens: int | None = None
        self._client = httpx.AsyncClient(
            headers=_headers(api_key),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # the caller has the deadline
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_S),
            trust_env=not _is_loopback(self._url),  # a proxy would be measured too
        )

    async def open(self) -> None:
        """Find the model, and what the server can, by one short request."""
        self._choose_model(await self._models())
        if self.takes_ids:
            self._extras["return_token_ids"] = True
        try:
            first = await self._first_answer()
        except RequestFailedError as error:
            if error.reason != "refused":
                raise self._unusable(error) from error
            first = await self._first_answer_without_extras(error)
        if first is None or first.ids is None:
            self.takes_ids = False
            self._extras.pop("return_token_ids", None)
        self._needs_ids = self.takes_ids

    async def answer(self, request: LiveRequest) -> Answer:
        """Stream one answer; if cancelled, the connection is closed, and the server gives up."""
        body = {
            "model": self._model,
            **self._spelled(request.prompt),
            "max_tokens": request.reply_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extras,
        }
        content = json.dumps(body).encode()
        sent_s = time.perf_counter()
        try:
            async with self._client.stream(
                "POST",
                self._url + self._path,
                content=content,
                headers={"Content-Type": "application/json", "X-Request-Id": request.request_id},
            ) as response:
                if response.status_code != 200:
                    raise failure_of_status(response.status_code, await _error_body(response))
                answer = await read_answer(_timed_lines(response), sent_s)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise RequestFailedError("unreachable", _words(error)) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise RequestFailedError("stream_broken", _words(error)) from error
        if self._needs_ids and answer.ids is None:
            raise RequestFailedError("stream_broken", "the answer came without its token ids")
        return answer

    async def counters(self) -> Counters | None:
        """The server's `/metrics`, beside its `/v1`; None where there are none of an engine."""
        address = self._url.removesuffix("/v1") + "/metrics"
        with contextlib.suppress(httpx.HTTPError):
            response = await self._client.get(address, timeout=_METRICS_S)
            if response.status_code == 200:
                return parse_counters(response.text) or None
        return None

    async def begin_round(self, number: int) -> None:
        """Nothing: a server is not ours to start anew."""

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    def facts(self) -> dict[str, Any]:
        """Address, model, and what the server can."""
        prompts = "ids" if self.takes_ids else "messages" if self._endpoint == "chat" else "text"
        return {
            "url": self._url,
            "model": self._model,
            "max_tokens": self.max_tokens,
            "endpoint": self._endpoint,
            "prompts": prompts,
            "fixed_reply_length": bool(self._extras.get("ignore_eos")),
        }

    async def _models(self) -> list[dict[str, Any]]:
        try:
            response = await self._client.get(self._url + "/models", timeout=_MODELS_S)
        except httpx.HTTPError as error:
            raise ConfigError(
                f"--url {self._url}: no server answers there ({_words(error)}); start one, or give "
                "the address it listens at"
            ) from error
        if response.status_code in (401, 403):
            raise ConfigError(
                f"--url {self._url}: the server wants another key (HTTP {response.status_code}); "
                "give it in TIERED_KV_API_KEY or by --api-key"
            )
        if response.status_code == 404:
            raise ConfigError(
                f"--url {self._url}: has no /models (HTTP 404); give the server's base address, "
                "which mostly ends in /v1"
            )
        if response.status_code != 200:
            raise ConfigError(
                f"--url {self._url}: /models answers HTTP {response.status_code}: "
                f"{error_message(response.text)}"
            )
        return _model_list(self._url, response)

    def _choose_model(self, models: list[dict[str, Any]]) -> None:
        names = [str(model.get("id")) for model in models]
        if self._model is None:
            self._model = names[0]
        elif self._model not in names:
            raise ConfigError(
                f"--model {self._model}: the server offers {', '.join(names)}; give one of these, "
                "or none for the first"
            )
        longest = models[names.index(self._model)].get("max_model_len")
        self.max_tokens = longest if isinstance(longest, int) else None

    async def _first_answer(self) -> Answer | None:
        """The answer to a short request; None if the model had nothing to say."""
        prompt: Prompt = as_ids(_FIRST_PROMPT)
        if not self.takes_ids:
            prompt = (Message("user", "hello"),)
        request = LiveRequest(prompt, 2, "tkv-first")
        try:
            return await asyncio.wait_for(self.answer(request), self._timeout_s)
        except (asyncio.TimeoutError, TimeoutError) as error:
            message = f"not answered within {self._timeout_s:g} s (--request-timeout-s)"
            raise RequestFailedError("timeout", message) from error
        except RequestFailedError as error:
            if error.reason == "no_tokens":
                return None
            raise

    async def _first_answer_without_extras(self, refused: RequestFailedError) -> Answer | None:
        """A server that knows neither token ids nor our extra fields may still do."""
        self._extras.clear()
        self.takes_ids = False
        try:
            return await self._first_answer()
        except RequestFailedError:
            raise self._unusable(refused) from refused

    def _unusable(self, error: RequestFailedError) -> ConfigError:
        other = "chat" if self._endpoint == "completions" else "completions"
        return ConfigError(
            f"--url {self._url}: a first, short request to {self._path} for model {self._model} "
            f"failed: {error.message}; --endpoint {other} asks in another way"
        )

    def _spelled(self, prompt: Prompt) -> dict[str, Any]:
        if not isinstance(prompt, tuple):
            return {"prompt": prompt.tolist()}
        if self._endpoint == "chat":
            return {"messages": [{"role": one.role, "content": one.text} for one in prompt]}
        return {"prompt": _plain_text(prompt)}


def _plain_text(messages: Messages) -> str:
    """The messages in our plain form, open for the assistant's answer.

    A text ends where an answer begins, so that the next prompt starts with the whole of this one
    and its answer.
    """
    return "".join(message_text(one) for one in messages) + "<|assistant|>\n"


async def _timed_lines(response: httpx.Response) -> AsyncIterator[tuple[str, float]]:
    async for line in response.aiter_lines():
        yield line, time.perf_counter()


async def _error_body(response: httpx.Response) -> str:
    """The start of an error's body; what breaks off is taken as it is."""
    body = b""
    with contextlib.suppress(httpx.HTTPError):
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) >= _ERROR_BODY_BYTES:
                break
    return body[:_ERROR_BODY_BYTES].decode("utf-8", errors="replace")


def _model_list(url: str, response: httpx.Response) -> list[dict[str, Any]]:
    try:
        found: Any = response.json()
    except ValueError:
        found = None
    models = found.get("data") if isinstance(found, dict) else None
    if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
        raise ConfigError(
            f"--url {url}: /models answers, but not as an OpenAI-compatible server does; give the "
            "server's base address, which mostly ends in /v1"
        )
    if not models:
        raise ConfigError(f"--url {url}: the server offers no model")
    return models


def _base_url(url: str) -> str:
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: is no address ({error})") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise ConfigError(f"--url {url}: must be like http://127.0.0.1:8000/v1")
    if parts.userinfo:
        raise ConfigError("--url: must hold no user or password; give a key in TIERED_KV_API_KEY")
    if parts.query or parts.fragment:
        raise ConfigError(f"--url {url}: must end with its path, such as /v1")
    return str(parts).rstrip("/")


def _headers(api_key: str | None) -> dict[str, str]:
    if api_key is None:
        return {}
    if not api_key or not api_key.isascii() or not api_key.isprintable():
        raise ConfigError("--api-key: must be printable ASCII on one line, and not empty")
    return {"Authorization": f"Bearer {api_key}"}


def _is_loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
