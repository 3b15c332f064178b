"""What a call of `generate` asks for: its tokens, its mask, and whether a cache can serve it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin

from tiered_kv.errors import ConfigError
from tiered_kv.keys import as_token_array
from tiered_kv.plugins.huggingface_model import CACHE_ARGUMENT
from tiered_kv.plugins.huggingface_rows import rows_of

if TYPE_CHECKING:
    from tiered_kv.plugins.huggingface_rows import Row, Tokens
    from tiered_kv.session import Session

_ASSISTED = "assisted decoding recomputes the whole prompt on top of a filled cache"
_BEAMS = "beam search moves the rows of a cache over one another"
_OTHER_LOOP = "its loop may do with the cache what no page can follow"
_REFUSED = {
    "num_beams": _BEAMS,
    "constraints": _BEAMS,
    "force_words_ids": _BEAMS,
    "num_return_sequences": "several replies share one row; give the prompt as often as needed",
    "penalty_alpha": "contrastive search repeats the rows of a cache",
    "assistant_model": _ASSISTED,
    "prompt_lookup_num_tokens": _ASSISTED,
    "assistant_early_exit": _ASSISTED,
    "use_mtp": _ASSISTED,
    "dola_layers": _OTHER_LOOP,
    "custom_generate": _OTHER_LOOP,
    "token_healing": "it changes the prompt after it was looked up",
    "cache_implementation": "a TieredCache takes the place of any other",
}
"""Settings of `generate` that a TieredCache cannot serve when they are on, and why."""

_INPUTS = {"input_ids", "attention_mask", "token_type_ids", "logits_to_keep"}
_CACHES = {CACHE_ARGUMENT, "cache", "past_key_values"}


class Request:
    """A call of `generate`, understood; refused here if a cache cannot serve it.

    Args:
        model: what is attached.
        arguments: of the call, by name.
        session: the conversation that the input continues, or None.
        salt, lora: of the attachment.

    Attributes:
        token_ids: the whole prompts, [rows, columns].
        attention_mask: of the same shape.
        arguments: for the model's own `generate`, these two among them.
        salt, lora: what enters the keys.

    Raises:
        ConfigError: one line that names the setting or the input, and why.
    """

    def __init__(
        self, model: Any, arguments: dict[str, Any], session: Session | None, salt: str, lora: str
    ) -> None:
        self._model = model
        self._given = arguments
        self._session = session
        self.salt, self.lora = salt, lora
        self._refuse_other_search()
        self._refuse_other_inputs()
        self.token_ids = self._whole_prompts()
        self.attention_mask = self._mask()
        rows = self._rows()
        self._paddings = [row.padding for row in rows]
        self._prompts = [len(row.tokens) for row in rows]
        rest = {k: v for k, v in arguments.items() if k not in ("inputs", "input_ids")}
        self.arguments = {
            **{k: v for k, v in rest.items() if k not in _CACHES},
            "inputs": self.token_ids,
            "attention_mask": self.attention_mask,
        }

    @property
    def prompt_tokens(self) -> int:
        """Of all rows, without padding."""
        return sum(self._prompts)

    def sequences(self, token_ids: torch.Tensor) -> list[Tokens]:
        """The tokens of each row of what was generated so far, no padding on either side."""
        lines = [
            as_token_array(line)[padding:]
            for line, padding in zip(token_ids, self._paddings, strict=True)
        ]
        if len(lines) == 1:
            return lines  # transformers pads a row that has ended while others go on
        return [self._ended(line, start) for line, start in zip(lines, self._prompts, strict=True)]

    def keep(self, output: Any) -> None:
        """Note in the session what the conversation is now."""
        if self._session is not None:
            self._session.keep(sequences_of(output)[0])

    def _ended(self, tokens: Tokens, start: int) -> Tokens:
        """A row up to its end token; without one, up to its last token that is not padding."""
        reply = tokens[start:]
        ends = np.flatnonzero(np.isin(reply, self._token_list("eos_token_id")))
        if len(ends):
            return tokens[: start + ends[0] + 1]
        real = np.flatnonzero(~np.isin(reply, self._token_list("pad_token_id")))
        return tokens[: start + (real[-1] + 1 if len(real) else 0)]

    def _whole_prompts(self) -> torch.Tensor:
        ids = self._given.get("inputs")
        ids = self._given.get("input_ids") if ids is None else ids
        if ids is None:
            raise ConfigError("generate() has no input_ids: what is stored is found by tokens")
        ids = torch.as_tensor(ids)
        session = self._session
        if session is None:
            return ids
        if ids.ndim > 1 and ids.shape[0] != 1:
            raise ConfigError(
                f"generate(session=...) with {ids.shape[0]} rows: a session is one conversation"
            )
        if self.lora != session.lora or self.salt not in ("", session.salt):
            raise ConfigError(
                f"session {session.session_id!r} has salt={session.salt!r}, lora={session.lora!r}, "
                f"the model was attached with salt={self.salt!r}, lora={self.lora!r}: they must be "
                "the same"
            )
        self.salt = session.salt
        whole = session.prompt(ids.reshape(-1)).astype(np.int64)
        return torch.from_numpy(whole)[None].to(ids.device)

    def _mask(self) -> torch.Tensor:
        """The mask given, or the one that transformers would guess."""
        mask, ids = self._given.get("attention_mask"), self.token_ids
        if self._session is not None:
            if mask is not None and not bool((torch.as_tensor(mask) == 1).all()):
                raise ConfigError("generate(session=...) takes new tokens without padding")
            return torch.ones_like(ids)
        if mask is not None:
            return torch.as_tensor(mask)
        pads = torch.as_tensor(self._token_list("pad_token_id"), dtype=ids.dtype, device=ids.device)
        is_pad = torch.isin(ids, pads)
        if not set(self._token_list("pad_token_id")) & set(self._token_list("eos_token_id")):
            return (~is_pad).long()
        if ids.shape[0] > 1 and bool(is_pad[:, 0].any()):
            raise ConfigError(
                "generate() needs attention_mask: a row begins with the pad token, which is also "
                "the end token, so that padding cannot be told"
            )
        return torch.ones_like(ids)

    def _rows(self) -> list[Row]:
        try:
            return rows_of(self.token_ids, self.attention_mask)
        except ValueError as error:
            guessed = "; none was given: wherever the pad token stands is taken for padding"
            is_given = self._given.get("attention_mask") is not None
            raise ConfigError(f"generate(): {error}{'' if is_given else guessed}") from error

    def _refuse_other_search(self) -> None:
        for name, why in _REFUSED.items():
            value = self._setting(name)
            if value and not (name.startswith("num_") and value == 1):
                shown = f"{name}={value!r}" if isinstance(value, int | float | str) else name
                raise ConfigError(
                    f"generate({shown}): TieredCache takes greedy search and sampling alone: {why}"
                )
        if CACHE_ARGUMENT != "cache" and self._setting("prefill_chunk_size"):
            raise ConfigError(
                "generate(prefill_chunk_size=...): transformers before 5.24 computes the whole "
                "prompt on top of a filled cache then; take a newer one"
            )
        if self._setting("use_cache") is False:
            raise ConfigError("generate(use_cache=False): there is nothing to restore into")

    def _refuse_other_inputs(self) -> None:
        known = {*inspect.signature(GenerationMixin.generate).parameters, *_INPUTS, *_CACHES}
        settings = GenerationConfig().to_dict()  # type: ignore[no-untyped-call]
        known.update(settings, ("tokenizer", "assistant_tokenizer"))
        for name, value in self._given.items():
            is_zero = name == "token_type_ids" and value is not None and not bool(value.any())
            if value is None or is_zero or (name in known and name != "token_type_ids"):
                continue
            raise ConfigError(
                f"generate({name}=...): what it puts into K and V is not in the tokens' keys; use "
                "TieredCache.restore, with multimodal= for images and sounds"
            )
        if self._session is not None and has_cache(self._given):
            raise ConfigError("generate(session=...) brings the cache itself: leave yours out")

    def _setting(self, name: str) -> Any:
        """A generation setting as transformers resolves it: the call's, then the model's."""
        own = getattr(self._model, "generation_config", None)
        configs = (self._given.get("generation_config"), own)
        values = [self._given.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in values if value is not None), None)

    def _token_list(self, name: str) -> list[int]:
        value = self._setting(name)
        if value is None:
            return []
        return [int(token) for token in torch.as_tensor(value).reshape(-1).tolist()]


def has_cache(arguments: dict[str, Any]) -> bool:
    """Whether a call brings a cache of its own."""
    return any(arguments.get(name) is not None for name in _CACHES)


def sequences_of(output: Any) -> torch.Tensor:
    """The tokens [rows, columns] of what `generate` returned."""
    tokens: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
    return tokens
