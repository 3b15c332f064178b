"""How much of a prompt was said before: what a cache without limits could give."""

from __future__ import annotations

import numpy as np

from tiered_kv.keys import Namespace, page_keys
from tiered_kv.replay.requests import IdArray

_NAMESPACE = Namespace(model="repeats", layout="")
_KEY_BYTES = 16  # of 32: a set of 1 M keys is 16 MB smaller, and nobody attacks it


class RepeatCounter:
    """Counts the leading tokens of prompts that began an earlier prompt and its answer.

    Args:
        page_tokens: whole pages of so many tokens are compared.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._seen: set[bytes] = set()

    def repeated_tokens(self, prompt: IdArray) -> int:
        """Leading tokens of a prompt that were seen before it, in whole pages."""
        pages = 0
        for key in page_keys(prompt, self._page_tokens, _NAMESPACE):
            if key[:_KEY_BYTES] not in self._seen:
                break
            pages += 1
        return pages * self._page_tokens

    def saw(self, prompt: IdArray, reply: IdArray) -> None:
        """Remember a prompt and its answer, less the answer's last token (it has no KV yet)."""
        ids = np.concatenate([prompt, reply[:-1]])
        self._seen.update(key[:_KEY_BYTES] for key in page_keys(ids, self._page_tokens, _NAMESPACE))
