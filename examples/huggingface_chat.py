"""A chat whose KV survives a restart: a turn needs only what is new, and computes only that.

Runs on a CPU in a few seconds, with a tiny model of random weights that talks nonsense:

    python examples/huggingface_chat.py
"""

from __future__ import annotations

import tempfile
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tiered_kv import StoreConfig
from tiered_kv.plugins.huggingface import attach, layout_for, open_store

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
    pad_token_id=None,
)
model = Qwen3ForCausalLM(config).eval()
page_bytes = layout_for(model).page_bytes
options = {"max_new_tokens": 16, "do_sample": False}
conversation = torch.zeros((1, 0), dtype=torch.long)  # only to compare with

with tempfile.TemporaryDirectory() as directory:
    settings = StoreConfig(
        hbm=8 * page_bytes,  # a third of the chat: the rest comes and goes in pieces
        host=32 * page_bytes,
        disk=directory,
        disk_size="256MiB",
    )
    for turn in range(4):
        said = torch.randint(512, (1, 100 if turn else 1500))  # the user's message
        # each turn in a store opened anew, as after a restart
        with open_store(model, settings) as store, attach(model, store) as attached:
            start = time.perf_counter()
            reply = model.generate(said, session=store.session("user-42"), **options)
            seconds = time.perf_counter() - start
        conversation = torch.cat([conversation, said], dim=1)
        expected = model.generate(conversation, **options)
        print(
            f"turn {turn + 1}: {conversation.shape[1]} tokens, {attached.last.restored_tokens} "
            f"restored {attached.last.restored_by_tier}, {seconds:.2f} s, "
            f"{attached.last.saved_pages} pages saved, "
            f"same as without a store: {torch.equal(reply, expected)}"
        )
        conversation = expected
