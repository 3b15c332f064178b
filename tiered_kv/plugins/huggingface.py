"""Hugging Face transformers: a KV cache whose prefix comes from a store and goes back to it.

::

    with open_store(model, StoreConfig(hbm="8GiB", host="64GiB")) as store, attach(model, store):
        model.generate(**inputs)  # restores what is stored of the prompts, saves what is new

or, call by call::

    cache = TieredCache.restore(store, input_ids)
    output = model.generate(input_ids, **{CACHE_ARGUMENT: cache})
    cache.save(output)

For transformers 5.0 and newer, decoders that keep K and V of every past token (full, sliding and
chunked attention; MHA, GQA, MQA and MLA), greedy search and sampling. What is not supported is
refused in one line.
"""

from __future__ import annotations

from tiered_kv.plugins.huggingface_cache import TieredCache
from tiered_kv.plugins.huggingface_generate import Attachment, Reuse, attach, open_store
from tiered_kv.plugins.huggingface_model import CACHE_ARGUMENT, layout_for, model_fingerprint
from tiered_kv.plugins.huggingface_restore import LatePagesError

__all__ = [
    "CACHE_ARGUMENT",
    "Attachment",
    "LatePagesError",
    "Reuse",
    "TieredCache",
    "attach",
    "layout_for",
    "model_fingerprint",
    "open_store",
]
