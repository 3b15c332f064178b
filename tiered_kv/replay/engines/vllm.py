"""vLLM in this process: its own scheduler and batches, fed from an event loop.

vllm is imported when the engine is opened, and by nothing else: it takes seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import gc
import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from tiered_kv.errors import ConfigError
from tiered_kv.replay.engines.models import TINY_MODELS, load_model
from tiered_kv.replay.live.answer import Answer, FailureReason, LiveRequest, RequestFailedError
from tiered_kv.replay.live.counters import Counters, parse_counters
from tiered_kv.replay.live.settings import parse_json_object
from tiered_kv.replay.requests import IdArray, as_ids
from tiered_kv.replay.settings import DEFAULT_MODEL, ReplaySettings
from tiered_kv.replay.tokenizer import ModelTokenizer, Tokenizer

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_IDLE_S = 0.001  # between steps that only let a connector go on; vLLM's own loop sleeps as long
_CLOSE_S = 60.0
_WARM_UP_TOKENS = 512

_TINY_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
}
"""For the random models: exact, quick to start, small. `--engine-args` overrides each."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(slots=True)
class _Asked:
    """A request in the engine, and what has come of it. Only the engine's thread changes it."""

    request: LiveRequest
    settle: Callable[[Answer | RequestFailedError], None]
    sent_s: float
    first_s: float | None = None
    ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None


class VllmEngine:
    """One vLLM engine, its core in this process, on a thread of its own.

    Requests that are in flight together are batched by vLLM's scheduler as a server's would be;
    times are taken where a step of the engine returns, so they hold no HTTP.

    Args:
        settings: `model`, `kv_transfer_config`, `engine_args`, `vocabulary` and `seed` count.
        is_text: prompts come as text, and the model's tokenizer is needed.

    Raises:
        ConfigError: vllm is not installed.
    """

    name = "vllm"

    def __init__(self, settings: ReplaySettings, *, is_text: bool = False) -> None:
        _refuse_without_vllm()
        self._settings = settings
        self._is_text = is_text
        self._model = settings.model or DEFAULT_MODEL
        self._folder: Path | None = None
        self._thread: _EngineThread | None = None
        self.takes_ids = True
        self.vocabulary = settings.vocabulary or 0
        self.tokenizer: Tokenizer | None = None
        self.max_tokens: int | None = None

    async def open(self) -> None:
        """Start the engine; takes seconds, or minutes for a large model.

        Raises:
            ConfigError: the model, the engine arguments or the connector cannot be used.
        """
        if self._model in TINY_MODELS and self._folder is None:
            self._folder = await asyncio.to_thread(_save_tiny, self._model, self._settings.seed)
        if self._is_text and self.tokenizer is None:
            self.tokenizer = await asyncio.to_thread(_load_tokenizer, self._model, self._folder)
        self._thread = _EngineThread(self._arguments())
        await self._thread.started
        self.vocabulary = self._settings.vocabulary or self._thread.vocabulary
        self.max_tokens = self._thread.max_tokens
        try:
            await self.answer(LiveRequest(self._warm_up_prompt(), 2, "tkv-first"))
        except RequestFailedError as error:
            raise ConfigError(f"--engine vllm: a first request failed: {error.message}") from error

    async def answer(self, request: LiveRequest) -> Answer:
        """Answer one prompt; cancelling aborts it in the engine."""
        assert self._thread is not None
        assert not isinstance(request.prompt, tuple)
        return await self._thread.ask(request)

    async def counters(self) -> Counters:
        """What vLLM counts in this process, its connector included."""
        from prometheus_client import generate_latest

        return parse_counters(generate_latest().decode())

    async def begin_round(self, number: int) -> None:
        """Shut the engine down and start it anew: what it then hits, a connector has kept."""
        assert number > 0
        await self._stop()
        await self.open()

    async def close(self) -> None:
        """Shut the engine down, and remove the random model's files."""
        await self._stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def facts(self) -> dict[str, Any]:
        """Model, version and connector."""
        import vllm

        transfer = self._settings.kv_transfer_config
        connector = None if transfer is None else parse_json_object(transfer).get("kv_connector")
        return {
            "model": self._model,
            "max_tokens": self.max_tokens,
            "prompts": "ids",
            "fixed_reply_length": True,
            "vllm": vllm.__version__,
            "kv_connector": connector,
        }

    def _warm_up_prompt(self) -> IdArray:
        """What no conversation says: the first long prompt of a process pays for its memory."""
        tokens = min(_WARM_UP_TOKENS, (self.max_tokens or _WARM_UP_TOKENS) - 2)
        random = np.random.Generator(np.random.Philox(key=0x7761726D))
        return random.integers(0, self.vocabulary, tokens, dtype=np.uint32)

    async def _stop(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await asyncio.to_thread(thread.stop)

    def _arguments(self) -> dict[str, Any]:
        given = parse_json_object(self._settings.engine_args or "{}")
        defaults = _TINY_ARGS if self._model in TINY_MODELS else {}
        arguments = {
            "skip_tokenizer_init": True,
            "disable_log_stats": False,  # the counters hang on it
            "seed": self._settings.seed % 2**32,
            **defaults,
            **given,
            "model": str(self._folder or self._model),
        }
        if self._settings.kv_transfer_config is not None:
            arguments["kv_transfer_config"] = parse_json_object(self._settings.kv_transfer_config)
        return arguments


class _EngineThread:
    """The thread that starts an engine, steps it while there is work, and shuts it down.

    `started` is a future of the loop that made this; it holds the `ConfigError` of a start that
    failed.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._arguments = arguments
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._asked: dict[str, _Asked] = {}
        self._engine: Any = None
        self._dead: str | None = None
        self._stopping = False
        self.started: asyncio.Future[None] = self._loop.create_future()
        self.vocabulary = 0
        self.max_tokens = 0
        self._thread = threading.Thread(target=self._run, name="replay-vllm", daemon=True)
        self._thread.start()

    async def ask(self, request: LiveRequest) -> Answer:
        """Put a request into the engine and wait for its answer."""
        future: asyncio.Future[Answer] = self._loop.create_future()

        def settle(found: Answer | RequestFailedError) -> None:
            self._tell(future, found)

        asked = _Asked(request, settle, time.perf_counter())
        self._inbox.put(lambda: self._add(asked))
        try:
            return await future
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._abort(request.request_id))
            raise

    def stop(self) -> None:
        """End the thread and the engine; blocks, but no longer than a minute."""
        self._inbox.put(self._end)
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("vLLM has not shut down within %.0f s and is left behind", _CLOSE_S)

    def _end(self) -> None:
        self._stopping = True

    def _tell(self, future: asyncio.Future[_Result], found: _Result | Exception) -> None:
        """Settle a future of the loop, unless it is settled or the loop has gone."""

        def settle() -> None:
            if future.done():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)

    def _run(self) -> None:
        try:
            with _environment():
                self._start()
        except Exception as error:  # whatever vLLM, the model or a connector raises at start
            self._shut_down()
            self._tell(self.started, _start_error(error))
            return
        self._tell(self.started, None)
        while not self._stopping:
            self._take_messages()
            if not self._stopping and self._dead is None and self._has_work():
                self._step()
        for asked in self._asked.values():
            asked.settle(RequestFailedError("unreachable", "the engine was shut down"))
        self._shut_down()

    def _start(self) -> None:
        from vllm import EngineArgs
        from vllm.config import KVTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        known = {one.name for one in dataclasses.fields(EngineArgs)}
        for name in self._arguments:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"--engine-args: vLLM has no argument {name}{hint}")
        arguments = dict(self._arguments)
        if (transfer := arguments.pop("kv_transfer_config", None)) is not None:
            try:
                arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--kv-transfer-config: {_first_line(error)}") from error
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        config = self._engine.model_config
        self.vocabulary, self.max_tokens = config.get_vocab_size(), config.max_model_len

    def _take_messages(self) -> None:
        """Do what was asked for; waits for it only while the engine has nothing to do."""
        with contextlib.suppress(queue.Empty):
            if self._asked and self._dead is None:
                self._inbox.get_nowait()()
            elif self._dead is None and self._has_work():
                self._inbox.get(timeout=_IDLE_S)()
            else:
                self._inbox.get()()
            while True:
                self._inbox.get_nowait()()

    def _has_work(self) -> bool:
        """Whether requests, or a connector's transfers behind them, want the engine stepped."""
        return bool(self._engine.engine_core.engine_core.scheduler.has_requests())

    def _add(self, asked: _Asked) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._dead is not None:
            asked.settle(RequestFailedError("unreachable", self._dead))
            return
        request = asked.request
        assert not isinstance(request.prompt, tuple)
        parameters = SamplingParams(
            temperature=0,
            max_tokens=request.reply_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": request.prompt.tolist()}
        try:
            self._engine.add_request(request.request_id, prompt, parameters)
        except Exception as error:  # the request's fault: the engine has not taken it
            reason: FailureReason = "refused"
            if len(request.prompt) + request.reply_tokens > self.max_tokens:
                reason = "context_too_long"
            asked.settle(RequestFailedError(reason, _first_line(error)))
            return
        self._asked[request.request_id] = asked

    def _abort(self, request_id: str) -> None:
        if self._asked.pop(request_id, None) is not None and self._dead is None:
            self._engine.abort_request([request_id])

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # of the engine's core or a connector: it cannot go on
            self._dead = f"the engine died: {_first_line(error)}"
            for asked in self._asked.values():
                asked.settle(RequestFailedError("unreachable", self._dead))
            self._asked.clear()
            return
        now_s = time.perf_counter()
        for output in outputs:
            asked_for = self._asked.get(output.request_id)
            if asked_for is not None:
                self._take(asked_for, output, now_s)

    def _take(self, asked: _Asked, output: Any, now_s: float) -> None:
        (choice,) = output.outputs
        if choice.token_ids:
            asked.first_s = now_s if asked.first_s is None else asked.first_s
            asked.ids += choice.token_ids
        if output.num_cached_tokens is not None:
            asked.cached_tokens = output.num_cached_tokens
        if not output.finished:
            return
        del self._asked[output.request_id]
        if choice.finish_reason in ("error", "abort"):
            message = f"the engine ended the request with {choice.finish_reason}"
            asked.settle(RequestFailedError("server_error", message))
        elif asked.first_s is None:
            asked.settle(RequestFailedError("no_tokens", "the answer ended without a token"))
        else:
            asked.settle(
                Answer(
                    sent_s=asked.sent_s,
                    first_s=asked.first_s,
                    last_s=now_s,
                    prompt_tokens=len(asked.request.prompt),
                    completion_tokens=len(asked.ids),
                    cached_tokens=asked.cached_tokens,
                    ids=as_ids(asked.ids),
                    text="",
                    finish_reason=choice.finish_reason,
                )
            )

    def _shut_down(self) -> None:
        """Give back what the engine, or a start that failed, holds."""
        with contextlib.suppress(ImportError):
            from vllm.distributed import cleanup_dist_env_and_memory
            from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

            try:
                if self._engine is not None:
                    self._engine.engine_core.shutdown()
            finally:
                self._engine = None
                ensure_kv_transfer_shutdown()  # one left behind would be the next engine's
                cleanup_dist_env_and_memory()
                gc.collect()


def _refuse_without_vllm() -> None:
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        raise ConfigError(
            "--engine vllm: vllm is not installed; install tiered-kv[vllm], or replay against a "
            "server with --engine openai"
        )


def _save_tiny(name: str, seed: int) -> Path:
    """A random model as files, in a folder of its own under the system's temporary one."""
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-replay-"))
    loaded = load_model(name, dtype="float32", device="cpu", seed=seed)
    loaded.model.save_pretrained(folder)
    return folder


def _load_tokenizer(model: str, folder: Path | None) -> Tokenizer:
    from tiered_kv.replay.tokenizer import ByteTokenizer

    if folder is not None:
        return ByteTokenizer(TINY_MODELS[model].vocabulary)
    import transformers

    try:
        return ModelTokenizer(transformers.AutoTokenizer.from_pretrained(model))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model {model}: has no tokenizer ({_first_line(error)})") from error


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Settings of vLLM while it starts; what the user has set stays, the core's place excepted."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    for name, value in _ENVIRONMENT.items():
        if before[name] is None or name == "VLLM_ENABLE_V1_MULTIPROCESSING":
            os.environ[name] = value
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


def _start_error(error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    return ConfigError(f"--engine vllm: the engine does not start: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    """What an exception says first; of pydantic's, the first fault."""
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in fault["loc"])
        text = fault["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if where else text
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
