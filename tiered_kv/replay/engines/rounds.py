"""Prompts longer than HBM, in rounds: shared by the replay with bytes and the one without."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from tiered_kv.keys import KeyChain, Namespace, page_keys
from tiered_kv.replay.requests import TIERS, IdArray, Request

_REPLY_VOCABULARY = 4096


def load_in_rounds(
    keys: KeyChain,
    room_pages: int,
    stored_pages: Callable[[KeyChain], int],
    get: Callable[[KeyChain], list[str]],
) -> list[str]:
    """Get the longest stored prefix, however long; the tier each page came from.

    Only the last round asks for the pages behind the hit, so that the store counts each miss once.

    Args:
        keys: the prompt's pages.
        room_pages: pages HBM holds.
        stored_pages: how much of the front of a chain is stored.
        get: brings what it can of a chain, gives its pages free again, and names their tiers.
    """
    tiers: list[str] = []
    is_last = False
    while not is_last:
        rest = keys[len(tiers) :]
        is_last = stored_pages(rest) <= room_pages
        wanted = rest if is_last else rest[:room_pages]
        arrived = get(wanted)
        tiers.extend(arrived)
        is_last = is_last or len(arrived) < len(wanted)
    return tiers


def store_in_rounds(
    keys: KeyChain, first: int, room_pages: int, put: Callable[[KeyChain], bool]
) -> None:
    """Put `keys[first:]`, `room_pages` at once; fewer and fewer where `put` finds no room."""
    while first < len(keys) and room_pages:
        batch = keys[first : first + room_pages]
        if put(batch):
            first += len(batch)
        else:
            room_pages //= 2


class PromptKeys:
    """Page keys of prompts, and the answers that a replay without a model makes up.

    Args:
        layout_fingerprint: of the store.
        ids_a_page: ids of a request that name one page.
        page_tokens: tokens such a page covers.
    """

    def __init__(self, layout_fingerprint: str, ids_a_page: int, page_tokens: int) -> None:
        self._namespace = Namespace(model="tiered-kv replay", layout=layout_fingerprint)
        self._ids_a_page = ids_a_page
        self._page_tokens = page_tokens

    def of_prompt(self, request: Request) -> KeyChain:
        """Keys of the prompt's pages: its full ones, or all its blocks."""
        return page_keys(request.ids, self._ids_a_page, self._namespace)

    def of_answered(self, request: Request, prompt: KeyChain, reply: IdArray) -> KeyChain:
        """Keys of all that was computed: with token ids, the answer but its last token too."""
        if self._ids_a_page == 1 or not len(reply):
            return prompt
        ids = np.concatenate([request.ids, reply[:-1]])
        return page_keys(ids, self._ids_a_page, self._namespace)

    def reply(self, request: Request) -> IdArray:
        """The recorded answer, or ids drawn from the prompt."""
        if request.reply_ids is not None:
            return request.reply_ids
        digest = hashlib.sha256(request.ids.tobytes()).digest()
        random = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        return random.integers(0, _REPLY_VOCABULARY, request.reply_tokens, dtype=np.uint32)

    def tokens_by_tier(self, tiers: list[str], prompt_tokens: int) -> dict[str, int]:
        """Tokens that came from each tier; a prompt's last page may be partly filled."""
        tokens = dict.fromkeys(TIERS, 0)
        for position, tier in enumerate(tiers):
            left = prompt_tokens - position * self._page_tokens
            tokens[tier] += min(self._page_tokens, left)
        return tokens
