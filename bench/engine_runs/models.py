"""Random models for the engines: Qwen3 in shape, seeded, in float32.

python -m bench.engine_runs.models NAME FOLDER     writes one; needs transformers
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engine_runs.conversations import VOCABULARY


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Shape of a model; its KV is float32, as its weights are.

    `spread` is the standard deviation of the weights: large enough that 32 other tokens early in a
    prompt give another answer (nearly always). With less the model repeats its last token, and
    wrong KV would not be seen.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    spread: float

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    @property
    def parameters(self) -> int:
        """Weights, norms apart."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + 2 * VOCABULARY * self.hidden


SIZES = {
    "tiny": ModelSize(2, 64, 4, 2, 32, 128, 0.2),
    "100m": ModelSize(14, 768, 12, 4, 64, 2304, 0.02),
    "200m": ModelSize(16, 1024, 16, 4, 64, 3072, 0.02),
}


def save(name: str, folder: Path) -> None:
    """Write the model; a folder that is there holds all of it."""
    import torch
    import transformers

    size = SIZES[name]
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "initializer_range": size.spread,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**settings)
    model_class: Any = transformers.AutoModelForCausalLM
    model = model_class.from_config(config, dtype=torch.float32)
    half = folder.with_name(f"{folder.name}.half")
    model.save_pretrained(half)
    half.rename(folder)


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
