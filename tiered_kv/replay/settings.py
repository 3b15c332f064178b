"""What a replay is told: the store's settings, and what to replay on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, model_validator

from tiered_kv.config import Size, StoreConfig
from tiered_kv.replay.conversations import Kind
from tiered_kv.replay.live.settings import LiveSettings
from tiered_kv.replay.traces import MOONCAKE_BLOCK_TOKENS

EngineName = Literal["timed", "hf", "openai", "vllm"]

LIVE_ENGINES = ("openai", "vllm")
STORE_ENGINES = ("timed", "hf")
DEFAULT_MODEL = "tiny-qwen3"
DEFAULT_PAGE_BYTES = 64 * 1024
DEFAULT_PREFILL_TOKENS_PER_S = 8000.0


class ReplaySettings(StoreConfig, LiveSettings):
    """Replay multi-turn conversations or a recorded trace through a store or a live engine."""

    hbm: Size = Field(
        default=ByteSize(64 << 20),
        description="GPU memory for hot pages (host memory where there is no GPU)",
    )
    host: Size = Field(default=ByteSize(256 << 20), description="pinned host memory for warm pages")
    prefill_tokens_per_s: float | None = Field(
        default=None,
        gt=0,
        description="engine timed: how fast the engine that is stood in for computes a prompt "
        f"(default {DEFAULT_PREFILL_TOKENS_PER_S:.0f}); nothing is left unloaded because of it",
    )
    decode_tokens_per_s: float = Field(
        default=40.0, gt=0, description="engine timed: how fast it computes an answer"
    )
    engine: EngineName = Field(
        default="timed",
        description="timed: no model, a clock computes; hf: a transformers model; openai: an "
        "OpenAI-compatible server at --url; vllm: vLLM in this process",
    )
    model: str | None = Field(
        default=None,
        description="engines hf, vllm: tiny-qwen3 (default) or micro-qwen3 (random weights), a "
        "directory, a hub id; engine openai: a name that the server offers (default: its first)",
    )
    dtype: str = Field(
        default="float32", description="engine hf: type of the model's weights and KV"
    )
    trace: Path | None = Field(
        default=None,
        description="file to replay: a Mooncake-schema JSONL trace, or ShareGPT or OpenAI-messages "
        "JSON or JSONL; none: conversations are generated",
    )
    trace_block_tokens: int = Field(
        default=MOONCAKE_BLOCK_TOKENS, ge=1, description="tokens a block of the trace"
    )
    limit: int | None = Field(default=None, ge=1, description="stop after so many requests")
    conversations: int = Field(default=6, ge=1, description="generated: how many run interleaved")
    turns: int = Field(default=6, ge=1, description="generated: turns of each conversation")
    draw_turns: bool = Field(
        default=False,
        description="generated: draw the turns of each (lognormal, --turns is the median)",
    )
    kind: Kind = Field(
        default="sessions", description="generated: like coding sessions, or like a chat"
    )
    context_tokens: int = Field(
        default=3200, ge=1, description="generated: length of a conversation's last prompt"
    )
    system_tokens: int = Field(
        default=256, ge=0, description="generated: leading tokens that all conversations share"
    )
    reply_tokens: int = Field(
        default=16, ge=1, description="tokens of an answer (for a trace and a real model: at most)"
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="of the conversations and a random model's weights",
    )
    page_tokens: int = Field(
        default=64,
        ge=1,
        description="tokens a page (with a Mooncake trace and engine timed: its blocks'; engines "
        "openai, vllm: only to count repeated tokens)",
    )
    page_bytes: Size | None = Field(
        default=None,
        description="engine timed: bytes a page (default 64KiB); engine hf: the model says",
    )

    @model_validator(mode="after")
    def _fits_its_engine(self) -> ReplaySettings:
        if self.engine == "hf" and self.page_bytes is not None:
            raise ValueError(
                "page_bytes is for engine timed: with engine hf the model and page_tokens set it"
            )
        if self.system_tokens >= self.context_tokens:
            raise ValueError(
                f"system_tokens={self.system_tokens} must be less than "
                f"context_tokens={self.context_tokens}"
            )
        return self

    def store_config(self, model_name: str) -> StoreConfig:
        """The store's part. Speed gates no load, so that decisions repeat on any machine."""
        values = {name: getattr(self, name) for name in StoreConfig.model_fields}
        values["prefill_tokens_per_s"] = None
        values["model_name"] = self.model_name or model_name
        return StoreConfig.parse(**values)

    def told(self) -> dict[str, Any]:
        """What was set, of what this engine takes, as JSON values; never the API key."""
        names = {name for name in ReplaySettings.model_fields if self.engine in engines_of(name)}
        told = self.model_dump(mode="json", include=names - {"api_key"})
        if self.engine in ("hf", "vllm"):
            told["model"] = self.model or DEFAULT_MODEL
        return {name: value for name, value in told.items() if value is not None}


def engines_of(setting: str) -> tuple[str, ...]:
    """The engines that a setting means something to; the command line refuses it with others."""
    if setting in StoreConfig.model_fields:
        return STORE_ENGINES
    if setting in LiveSettings.model_fields:
        return _LIVE_ONLY.get(setting, LIVE_ENGINES)
    return _STORE_ONLY.get(setting, (*STORE_ENGINES, *LIVE_ENGINES))


_LIVE_ONLY = {
    "url": ("openai",),
    "api_key": ("openai",),
    "endpoint": ("openai",),
    "kv_transfer_config": ("vllm",),
    "engine_args": ("vllm",),
}
_STORE_ONLY = dict.fromkeys(("page_bytes", "decode_tokens_per_s", "dtype"), STORE_ENGINES)
