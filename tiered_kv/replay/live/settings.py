"""What a replay against a live engine is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, SecretStr, field_validator

Endpoint = Literal["completions", "chat"]

DEFAULT_URL = "http://127.0.0.1:8000/v1"


class LiveSettings(BaseModel):
    """Settings of the engines that have their own cache: `openai` (a server) and `vllm`."""

    url: str = Field(
        default=DEFAULT_URL,
        description="engine openai: the server's base address, which ends in /v1",
    )
    api_key: SecretStr | None = Field(
        default=None,
        description="engine openai: sent as a bearer token; better given as TIERED_KV_API_KEY, "
        "since other users of the machine can read arguments",
    )
    endpoint: Endpoint = Field(
        default="completions",
        description="engine openai: completions sends token ids where the server returns them "
        "(exact prefixes), else text; chat sends messages",
    )
    clients: int = Field(
        default=16, ge=1, description="engines openai, vllm: most requests in flight at once"
    )
    speed_up: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="engines openai, vllm: pauses between turns are divided by this",
    )
    request_timeout_s: float = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        description="engines openai, vllm: a request not answered in full by then has failed",
    )
    request_log: Path | None = Field(
        default=None,
        description="engines openai, vllm: file to which one JSON line a request is appended",
    )
    rounds: int = Field(
        default=1,
        ge=1,
        description="engines openai, vllm: replay the same conversations so often; engine vllm is "
        "started anew for each round",
    )
    vocabulary: int | None = Field(
        default=None,
        ge=2,
        le=2**32,
        description="engines openai, vllm: token ids are drawn below this (default openai: 256, "
        "which every model has; vllm: the model's vocabulary)",
    )
    kv_transfer_config: str | None = Field(
        default=None, description="engine vllm: vLLM's KVTransferConfig, as a JSON object"
    )
    engine_args: str | None = Field(
        default=None,
        description="engine vllm: vLLM's engine arguments, as a JSON object such as "
        '{"block_size": 32, "max_model_len": 4096, "kv_cache_memory_bytes": 67108864}',
    )

    @field_validator("kv_transfer_config", "engine_args")
    @classmethod
    def _is_json_object(cls, text: str | None) -> str | None:
        if text is not None:
            parse_json_object(text)
        return text


def parse_json_object(text: str) -> dict[str, Any]:
    """The object that a JSON text holds.

    Raises:
        ValueError: the text is not JSON, or holds something else.
    """
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); give an object such as {{}}") from error
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, not {type(value).__name__}")
    return value
