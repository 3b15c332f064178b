"""How long a prefix can be restored when a model keeps more than the KV of each page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hits:
    """What of a prompt is there.

    Attributes:
        pages: the longest prefix that can be restored: every page's KV, and all that goes with it.
        by_pool: pages up to which each pool goes; none for a pool that has nothing.
        restorable: every length that could be restored, in order. A state (Mamba, a window) is kept
            at some lengths and not at those between.
    """

    pages: int
    by_pool: dict[str, int]
    restorable: list[int]


def leading(present: Sequence[bool]) -> int:
    """How many are there from the first on."""
    return next((at for at, is_here in enumerate(present) if not is_here), len(present))


def restorable_hits(
    kv: Sequence[bool], transfers: Sequence[Any], present: Callable[[Any, int], Sequence[bool]]
) -> Hits:
    """Fold what the pools have, as SGLang's hit policies say.

    Args:
        kv: for each page of a prompt whether its KV is there.
        transfers: SGLang's `PoolTransfer`s: what else must be there.
        present: for a transfer and so many pages, which of them its pool has; for "block_groups",
            which of the transfer's own keys.

    Raises:
        ValueError: a policy that is not known here.
    """
    pages = leading(kv)
    by_pool = {"kv": pages}
    restorable = list(range(1, pages + 1))
    for transfer in transfers:
        policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        has = present(transfer, pages)
        if policy == "all_pages":
            reach = leading(has)
            restorable = [length for length in restorable if length <= reach]
        elif policy == "trailing_pages":
            window = max(1, len(transfer.keys or ()))
            lengths = _window_ends(has, window)
            reach = max(lengths, default=0)
            restorable = [length for length in restorable if length in lengths]
        elif policy == "block_groups":  # another form of pages that are there: gates nothing
            reach = _covered(has, transfer.block_pages, transfer.group_pages)
        else:
            raise ValueError(f"hit policy {policy!r} of pool {transfer.name} is not known")
        by_pool[str(getattr(transfer.name, "value", transfer.name))] = reach
    found = {name: reach for name, reach in by_pool.items() if reach}
    return Hits(restorable[-1] if restorable else 0, found, restorable)


def _window_ends(has: Sequence[bool], window: int) -> set[int]:
    """Prefix lengths whose last `window` pages (or all, if fewer) are there."""
    ends, run = set(), 0
    for at, is_here in enumerate(has):
        run = run + 1 if is_here else 0
        if run >= min(window, at + 1):
            ends.add(at + 1)
    return ends


def _covered(has: Sequence[bool], block_pages: int, group_pages: int) -> int:
    """Pages that the leading complete groups of keys stand for."""
    return leading(has) // group_pages * block_pages if group_pages > 0 else 0
