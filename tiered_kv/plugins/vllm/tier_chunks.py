"""RequestChunks: the chunks of one request in prompt order, for parents and recency."""

from __future__ import annotations

from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx


class RequestChunks:
    """Which chunk of a request lies where. Kept in vLLM's request context, grows with the request.

    vLLM 0.32 tells a tier the end of a chunk given its key; the chunk before one is found the other
    way round, so the context's own table is read once and turned over.
    """

    def __init__(self) -> None:
        self._at: dict[tuple[int, int], OffloadKey] = {}  # group, last token + 1
        self._seen = 0

    @classmethod
    def of(cls, request: ReqContext) -> RequestChunks:
        """The chunks known by now. Costs as much as there are new ones since the last call."""
        chunks: RequestChunks | None = request.get_state(cls)
        if chunks is None:
            chunks = cls()
            request.set_state(chunks)
        positions: dict[OffloadKey, int] = request._offload_key_positions
        for key, end in islice(positions.items(), chunks._seen, None):
            chunks._at[get_offload_group_idx(key), end] = key
        chunks._seen = len(positions)
        return chunks

    def parent(self, key: OffloadKey, request: ReqContext, chunk_tokens: int) -> OffloadKey | None:
        """The chunk before this one in its group, `chunk_tokens` earlier; None for the first."""
        group, end = place_of(key, request)
        return self._at.get((group, end - chunk_tokens))

    def by_group(self) -> list[list[OffloadKey]]:
        """All chunks, those of a group in prompt order."""
        groups: dict[int, list[OffloadKey]] = {}
        for group, end in sorted(self._at):
            groups.setdefault(group, []).append(self._at[group, end])
        return list(groups.values())


def place_of(key: OffloadKey, request: ReqContext) -> tuple[int, int]:
    """(group, last token + 1) of a chunk: what sorts chunks into prompt order."""
    return get_offload_group_idx(key), request.get_offload_key_position(key) or 0
