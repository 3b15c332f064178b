"""The models a replay can run: by hub id, by path, or small ones built at random."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from tiered_kv.errors import ConfigError
from tiered_kv.replay.tokenizer import ByteTokenizer, ModelTokenizer, Tokenizer


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Size of a random model of the Qwen3 family.

    The default computes 3,000 tokens in about a second on two CPU cores and keeps 2 KiB of KV a
    token and layer pair, so that on such a machine, as on a GPU with a large model, loading is
    cheaper than computing.
    """

    layers: int = 4
    hidden: int = 512
    intermediate: int = 1536
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 4096
    max_tokens: int = 32_768


TINY_MODELS: dict[str, TinyShape] = {
    "tiny-qwen3": TinyShape(),
    "micro-qwen3": TinyShape(
        layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocabulary=512
    ),
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, with what replay needs to know of it."""

    model: Any
    tokenizer: Tokenizer
    name: str

    @property
    def config(self) -> dict[str, Any]:
        """The model's configuration, as in its config.json."""
        config: dict[str, Any] = self.model.config.to_dict()
        return config

    @property
    def vocabulary(self) -> int:
        """Token ids lie below this."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def max_tokens(self) -> int | None:
        """The longest context the model's positions allow, where it says so."""
        value = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return None if value is None else int(value)


def load_model(name: str, *, dtype: str, device: str, seed: int) -> LoadedModel:
    """Build or load a model in evaluation mode.

    Args:
        name: a name of `TINY_MODELS`, a directory, or an id of the Hugging Face hub (which
            downloads it).
        dtype: torch's name of the weights' type, such as "float32".
        device: a torch device.
        seed: of the weights of a random model. The caller's random state is left as it was.

    Raises:
        ConfigError: transformers is not installed, or there is no such model or type.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--engine hf: needs transformers; install tiered-kv[hf] or use --engine timed"
        ) from error
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ConfigError(f"--dtype {dtype}: not a torch type; for example float32 or bfloat16")
    if name in TINY_MODELS:
        model: Any = _tiny(TINY_MODELS[name], seed)
        tokenizer: Tokenizer = ByteTokenizer(TINY_MODELS[name].vocabulary)
        return LoadedModel(model.to(device=device, dtype=torch_dtype).eval(), tokenizer, name)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries, line by line
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch_dtype)
        pretrained = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"--model {name}: cannot be loaded ({reason}); give {', '.join(TINY_MODELS)}, "
            "a directory with config.json and weights, or a hub id"
        ) from error
    return LoadedModel(model.to(device).eval(), ModelTokenizer(pretrained), name)


def _tiny(shape: TinyShape, seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)
