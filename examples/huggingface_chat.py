"""A chat whose KV survives a restart: only the tokens that are new are computed again.

Runs on a CPU in a few seconds, with a tiny model of random weights that talks nonsense:

    python examples/huggingface_chat.py
"""

from __future__ import annotations

import tempfile
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tiered_kv import StoreConfig, TieredStore
from tiered_kv.plugins.huggingface import CACHE_ARGUMENT, TieredCache, layout_for, model_fingerprint

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    eos_token_id=None,
)
model = Qwen3ForCausalLM(config).eval()
layout = layout_for(model, page_tokens=64)
chat = torch.randint(512, (1, 1500))

with tempfile.TemporaryDirectory() as directory:
    settings = StoreConfig(
        hbm=8 * layout.page_bytes,  # a third of the chat: the rest comes and goes in pieces
        host=32 * layout.page_bytes,
        disk=directory,
        disk_size="256MiB",
        model_name=model_fingerprint(model),
    )
    for turn in range(4):
        with TieredStore.open(layout, settings) as store:  # each turn in a store opened anew
            start = time.perf_counter()
            cache = TieredCache.restore(store, chat)
            reply = model.generate(
                chat, max_new_tokens=16, do_sample=False, **{CACHE_ARGUMENT: cache}
            )
            seconds = time.perf_counter() - start
            saved_pages = cache.save(reply)
        expected = model.generate(chat, max_new_tokens=16, do_sample=False)
        print(
            f"turn {turn + 1}: {chat.shape[1]} tokens, {cache.restored_tokens} restored "
            f"{cache.restored_by_tier}, {seconds:.2f} s, {saved_pages} pages saved, "
            f"same as without a store: {torch.equal(reply, expected)}"
        )
        chat = torch.cat([reply, torch.randint(512, (1, 100))], dim=1)  # the user's next message
