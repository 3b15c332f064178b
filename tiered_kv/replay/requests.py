"""What is replayed: a `Request`, its `Outcome`, and the `Workload` requests come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

IdArray = np.ndarray[Any, np.dtype[np.uint32]]
"""Token ids, or the block ids of a trace: uint32, one dimension."""

TIERS = ("hbm", "host", "disk")


def as_ids(values: Any) -> IdArray:
    """Ids as uint32, copied only if they are not that already."""
    return np.asarray(values, dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered.

    Attributes:
        session: which conversation it belongs to; None in a trace that does not say.
        turn: position in its conversation, from 0; None in a trace that does not say.
        arrival_s: simulated time of arrival.
        ids: the prompt, as token ids, or as the block ids of a trace (`Workload.ids_a_page` tells).
        prompt_tokens: length of the prompt in tokens.
        reply_tokens: how many tokens to answer.
        reply_ids: the answer, where the input has it; None lets the engine's own answer go on.
    """

    session: int | None
    turn: int | None
    arrival_s: float
    ids: IdArray
    prompt_tokens: int
    reply_tokens: int
    reply_ids: IdArray | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request.

    Attributes:
        reused_tokens: prompt tokens that came back from each tier.
        ttft_store_s: seconds to the first token with the store.
        ttft_recompute_s: seconds to the first token when the whole prompt is computed.
        outputs_equal: whether the answer is the one that recomputation gives (`timed`: whether
            every page that came back held its own bytes).
        logit_difference: largest difference of the first token's logits; None without a model.
        reply_ids: the answer that the conversation goes on with.
    """

    reused_tokens: Mapping[str, int]
    ttft_store_s: float
    ttft_recompute_s: float
    outputs_equal: bool
    reply_ids: IdArray = field(repr=False)
    logit_difference: float | None = None


class Workload(Protocol):
    """Requests in order of arrival. A later prompt may contain earlier answers: hence `answered`.

    `ids_a_page` is how many of a request's ids name one page, `page_tokens` how many tokens such a
    page covers: both are the page size where ids are tokens; 1 and the block size where they are
    blocks.
    """

    ids_a_page: int
    page_tokens: int

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def answered(self, request: Request, reply_ids: IdArray) -> None:
        """Take note of a reply. To be called before the next request is asked for."""
