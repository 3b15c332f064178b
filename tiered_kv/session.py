"""Session: a conversation by its id, as the tokens that it consists of so far."""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np

from tiered_kv.keys import KeyChain, Namespace, as_token_array, page_keys
from tiered_kv.storage.transcripts import Tokens, Transcripts

_LEAST_BYTES = 16 << 10  # for their directory and one of a few thousand tokens
_log = logging.getLogger(__name__)


class Session:
    """One conversation: what has been said in it, so that a turn needs only what is new.

    It holds tokens, not pages: `store.match(session.keys())` says what is stored of it, and
    `store.prefetch` and `store.hint` take the same keys. Two sessions that begin alike share the
    pages of what they share, unless their salts differ. Two objects of one id know what was kept
    when they were made; what is kept last counts. Made by `TieredStore.session`.

    Attributes:
        session_id: its name; the same name under another salt, adapter or model is another session.
        salt: tenant.
        lora: adapter its K and V are computed with.
    """

    def __init__(
        self,
        session_id: str,
        namespace: Namespace,
        transcripts: Transcripts,
        page_tokens: int,
    ) -> None:
        self.session_id = session_id
        self.salt = namespace.salt
        self.lora = namespace.lora
        self._name = hashlib.sha256(namespace.root() + session_id.encode()).digest()
        self._transcripts = transcripts
        self._namespace = namespace
        self._page_tokens = page_tokens
        self._hold(transcripts.read(self._name))

    @property
    def tokens(self) -> Tokens:
        """All tokens so far, uint32, read-only; none for a conversation that begins.

        Nor for one that was dropped because others took its place, or whose file was damaged: where
        that matters, compare their number with what the application knows.
        """
        return self._tokens

    def prompt(self, new_tokens: Any) -> Tokens:
        """The conversation with new tokens behind it: what a model is given. Changes nothing."""
        return np.concatenate([self._tokens, as_token_array(new_tokens)])

    def keys(self) -> KeyChain:
        """Keys of the full pages of the conversation so far."""
        return page_keys(self._tokens, self._page_tokens, self._namespace)

    def keep(self, token_ids: Any) -> None:
        """The conversation is these tokens from now on, in this process and after a restart.

        Blocks until they are on disk, if the store has a disk; otherwise they are kept in memory
        for as long as the store is open.

        Args:
            token_ids: all of them, from the first: what `generate` returned. They need not begin
                with those before: a conversation may be edited.

        Raises:
            CapacityError: the conversation is larger than the room for all sessions.
            TierIOError: the disk failed. As above, the session is what it was.
            StoreClosedError: the store was closed.
        """
        tokens = as_token_array(token_ids)
        self._transcripts.write(self._name, tokens)
        self._hold(tokens)

    def forget(self) -> None:
        """Drop the tokens. Its pages are found by nobody who does not know them, and fade."""
        self._transcripts.remove(self._name)
        self._hold(None)

    def _hold(self, tokens: Tokens | None) -> None:
        self._tokens: Tokens = np.zeros(0, np.uint32) if tokens is None else tokens.copy()
        self._tokens.flags.writeable = False


def open_transcripts(disk: Any, host_bytes: int) -> Transcripts:
    """Where a store keeps its sessions: beside the pages on disk, or in memory.

    Args:
        disk: the store's disk tier; None, or one without a folder for them: memory.
        host_bytes: of the host tier; a 256th of it, at least 1 MiB, is for sessions in memory.
    """
    folder, n_bytes = getattr(disk, "session_folder", (None, 0))
    if n_bytes >= _LEAST_BYTES:
        return Transcripts(folder, n_bytes)
    if folder is not None:
        _log.debug("%s: no room for sessions in disk_size; they are kept in memory", folder)
    return Transcripts(None, max(1 << 20, host_bytes // 256))
