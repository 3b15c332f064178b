"""attach: a model whose `generate` restores from a store and saves to it, until detached."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from tiered_kv.config import StoreConfig
from tiered_kv.errors import ConfigError, StoreClosedError, TieredKVError
from tiered_kv.plugins.huggingface_cache import TieredCache
from tiered_kv.plugins.huggingface_model import CACHE_ARGUMENT, layout_for, model_fingerprint
from tiered_kv.plugins.huggingface_request import Request, has_cache, sequences_of
from tiered_kv.plugins.huggingface_restore import LatePagesError
from tiered_kv.store import TieredStore

_SIGNATURE = inspect.signature(GenerationMixin.generate)
_log = logging.getLogger(__name__)


def open_store(model: Any, config: StoreConfig, page_tokens: int = 64) -> TieredStore:
    """A store for what a model caches: its layout, and its fingerprint as `model_name`.

    Raises:
        ConfigError: the model keeps something else than K and V of every past token, `model_name`
            is set already, or what `TieredStore` raises.
        LayoutMismatchError: the directory holds pages of another geometry.
    """
    if config.model_name:
        raise ConfigError(
            f"model_name={config.model_name!r}: open_store names the model by its weights; leave "
            "it out, or use TieredStore.open"
        )
    named = config.model_copy(update={"model_name": model_fingerprint(model)})
    return TieredStore.open(layout_for(model, page_tokens), named)


def attach(model: Any, store: TieredStore, *, salt: str = "", lora: str = "") -> Attachment:
    """Let `model.generate` restore from a store and save to it, within a `with` block.

    ::

        with attach(model, store):
            model.generate(**inputs, max_new_tokens=64)
            model.generate(new_tokens, session=store.session("user-42"), max_new_tokens=64)

    Each call restores what is stored of its prompts, computes the rest, and saves what is new when
    it ends, also when it ends by an exception or Ctrl-C. With `session=` the input is what is new
    of that conversation, and the whole of it is returned and kept. A store that fails costs the
    reuse, not the answer: it is logged. A call that brings a cache of its own is left alone. When
    the block ends, however it ends, the model is what it was.

    Args:
        model: a transformers model; what `TieredCache` does not support is refused in one line.
        store: opened by `open_store(model, config)`.
        salt: tenant of calls without a session; two salts never share a page.
        lora: the adapter the model runs with, "" for none.

    Raises:
        ConfigError: by `with`: another model's store, or a model that is attached already; by
            `generate`: beam search, assisted or contrastive decoding, inputs that are not tokens.
    """
    return Attachment(model, store, salt, lora)


@dataclass(frozen=True, slots=True)
class Reuse:
    """What one call of `generate` did not have to compute.

    Attributes:
        prompt_tokens: of all rows, without padding.
        restored_tokens, restored_by_row, restored_by_tier: as in `TieredCache`.
        saved_pages: that the store did not have.
    """

    prompt_tokens: int
    restored_tokens: int
    restored_by_row: tuple[int, ...]
    restored_by_tier: dict[str, int]
    saved_pages: int


class Attachment:
    """A model's tie to a store; made by `attach`, in force inside its `with` block.

    Attributes:
        last: of the call of `generate` that ended last; None before the first.
    """

    last: Reuse | None

    def __init__(self, model: Any, store: TieredStore, salt: str, lora: str) -> None:
        self._model = model
        self._store = store
        self._salt = salt
        self._lora = lora
        self._original: Any = None
        self._own: Any = None  # a `generate` of the instance's, not of its class
        self._generate: Any = None
        self.last = None

    def __enter__(self) -> Attachment:
        model = self._model
        if isinstance(getattr(model.generate, "attachment", None), Attachment):
            raise ConfigError("the model is attached already: leave that `with` block first")
        self._refuse_another_model()
        self._original = model.generate
        self._own = vars(model).get("generate")

        @functools.wraps(self._original)
        def generate(*args: Any, session: Any = None, **kwargs: Any) -> Any:
            if self._generate is generate:
                return self._call(_arguments(args, kwargs), session)
            if session is not None:  # somebody has kept this function longer than the block
                raise ConfigError("generate(session=...): the model is no longer attached")
            return self._original(*args, **kwargs)

        generate.attachment = self  # type: ignore[attr-defined]
        self._generate = model.generate = generate
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Give the model its own `generate` back. Twice is harmless.

        A call that runs in another thread ends as it began.
        """
        ours, self._generate = self._generate, None
        if ours is not None and vars(self._model).get("generate") is ours:
            del self._model.generate
            if self._own is not None:
                self._model.generate = self._own

    def _refuse_another_model(self) -> None:
        named, own = self._store.config.model_name, model_fingerprint(self._model)
        if named != own:
            raise ConfigError(
                f"the store's model_name is {named!r}, this model's is {own!r}: open it with "
                "open_store(model, config), or another model's pages would be taken for its own"
            )
        layout = layout_for(self._model, self._store.layout.page_tokens)
        if layout != self._store.layout:
            raise ConfigError(
                f"the store's layout ({self._store.layout.model}, {self._store.layout.dtype}) is "
                f"not the model's ({layout.model}, {layout.dtype}): open it with open_store(model, "
                "config)"
            )

    # -- one call ----------------------------------------------------------------------------------

    def _call(self, arguments: dict[str, Any], session: Any) -> Any:
        if has_cache(arguments) and session is None:
            return self._original(**arguments)
        request = Request(self._model, arguments, session, self._salt, self._lora)
        try:
            output = self._run(request, request.arguments, overlap=True)
        except LatePagesError as error:
            _log.warning("generating once more, with what had come by then: %s", error)
            streamer = request.arguments.get("streamer")
            again = {"streamer": None if streamer is None else _AfterPrompt(streamer)}
            output = self._run(request, {**request.arguments, **again}, overlap=False)
        request.keep(output)
        return output

    def _run(self, request: Request, arguments: dict[str, Any], *, overlap: bool) -> Any:
        cache = self._restored(request, overlap)
        if cache is None:
            return self._original(**arguments)
        seen = _Seen()
        criteria = [*(arguments.get("stopping_criteria") or ()), seen]
        ours = {"stopping_criteria": StoppingCriteriaList(criteria), CACHE_ARGUMENT: cache}
        try:
            output = self._original(**{**arguments, **ours})
        except LatePagesError:
            raise
        except BaseException:
            self._end(request, cache, seen.token_ids)
            raise
        self._end(request, cache, sequences_of(output))
        return output

    def _restored(self, request: Request, overlap: bool) -> TieredCache | None:
        """The cache for a call; None: the store fails, do without."""
        try:
            return TieredCache.restore(
                self._store,
                request.token_ids,
                attention_mask=request.attention_mask,
                salt=request.salt,
                lora=request.lora,
                device=self._model.device,
                model=self._model,
                overlap=overlap,
            )
        except StoreClosedError:
            raise
        except TieredKVError:
            _log.exception("nothing restored, nothing will be saved of this call")
            return None

    def _end(self, request: Request, cache: TieredCache, token_ids: Any) -> None:
        """Save what a call has computed, and say what it has reused."""
        saved = 0
        try:
            saved = cache.save_rows(None if token_ids is None else request.sequences(token_ids))
        except Exception:  # the answer is worth more than its pages
            _log.exception("what this call computed could not be saved")
        self.last = Reuse(
            request.prompt_tokens,
            cache.restored_tokens,
            cache.restored_by_row,
            cache.restored_by_tier,
            saved,
        )


class _Seen(StoppingCriteria):
    """Stops nothing: remembers the tokens so far, for a call that does not come to its end."""

    token_ids: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.token_ids = input_ids
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _AfterPrompt:
    """A streamer that has been given the prompt already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._streamer.put(value)
        self._has_prompt = True

    def end(self) -> None:
        self._streamer.end()


def _arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of `generate` by name."""
    bound = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
    del bound["self"]
    return {**bound, **bound.pop("kwargs", {})}
