"""The rows of a batch: which tokens are whose, where they stand, what is known of them.

transformers pads on the left, so that all rows end in the same column. Padding never enters a key
or a page: a row is found by its own tokens, whatever batch it came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tiered_kv.keys import as_token_array

if TYPE_CHECKING:
    Tokens = np.ndarray[Any, np.dtype[np.uint32]]

FORWARD_TOKENS = 64
"""What one more forward pass is reckoned at, in tokens of prefill.

Its fixed cost is reading the weights: 1 pass of 1 token against 64 of a larger one's.
"""


@dataclass(slots=True)
class Row:
    """One sequence of a batch.

    Attributes:
        index: its line in the batch.
        tokens: those known, without padding: the prompt, then what `save` was given.
        padding: columns of padding before them.
        tiers: where each of its restored pages came from, in order.
    """

    index: int
    tokens: Tokens
    padding: int = 0
    tiers: list[str] = field(default_factory=list)

    @property
    def columns(self) -> int:
        """Columns of the batch that the known tokens reach to."""
        return self.padding + len(self.tokens)

    @property
    def pages(self) -> int:
        """Pages restored."""
        return len(self.tiers)

    def cut(self, pages: int) -> None:
        """No more than the first `pages` count."""
        del self.tiers[pages:]

    def part(self, output: Any) -> Tokens:
        """This row's tokens in its line of what `generate` returned: all behind the padding."""
        return as_token_array(output)[self.padding :]

    def extend(self, tokens: Tokens, held: int) -> None:
        """Know more tokens of the sequence; `held` is of how many there are K and V.

        Raises:
            ValueError: they do not begin with those known already, or are too many.
        """
        known = min(len(tokens), len(self.tokens))
        if len(tokens) > held + 1:  # the last one generated has not been fed back yet
            raise ValueError(
                f"token_ids has {len(tokens)} tokens, the cache holds only {held}: give it those "
                "of the sequence it was used for"
            )
        differs = np.flatnonzero(tokens[:known] != self.tokens[:known])
        if len(differs):
            raise ValueError(
                f"token_ids differs at token {differs[0]} from what the cache was restored for: "
                "give the whole sequence, prompt and reply"
            )
        if len(tokens) > len(self.tokens):
            self.tokens = tokens


def rows_of(token_ids: Any, attention_mask: Any = None) -> list[Row]:
    """The rows of a prompt as a tokenizer makes it.

    Args:
        token_ids: list, numpy array or tensor, [tokens] or [rows, columns], padded on the left.
        attention_mask: of the same shape, 0 for padding; None: nothing is padding.

    Raises:
        ValueError: no token in a row, padding that is not on the left, or shapes that differ.
    """
    lines = token_ids if len(getattr(token_ids, "shape", ())) == 2 else [token_ids]
    rows = [Row(index, as_token_array(line)) for index, line in enumerate(lines)]
    if attention_mask is not None:
        mask = np.asarray(_on_cpu(attention_mask))
        mask = mask if mask.ndim == 2 else mask[None]
        if mask.shape != (len(rows), len(rows[0].tokens)):
            raise ValueError(
                f"attention_mask has shape {list(mask.shape)}, token_ids "
                f"{[len(rows), len(rows[0].tokens)]}: they must be the same"
            )
        for row, line in zip(rows, mask, strict=True):
            row.padding = _left_padding(line, row.index)
            row.tokens = row.tokens[row.padding :]
    if not rows or not all(len(row.tokens) for row in rows):
        raise ValueError("token_ids is empty: generate() needs at least one token a row")
    return rows


def _on_cpu(array: Any) -> Any:
    return array.detach().cpu() if hasattr(array, "detach") else array


def _left_padding(mask: np.ndarray[Any, Any], row: int) -> int:
    padding = int((mask == 0).sum())
    if (mask[:padding] != 0).any() or (mask[padding:] != 1).any():
        raise ValueError(
            f"row {row} of attention_mask is not zeros, then ones: pad on the left "
            "(padding_side='left'), and mask nothing else"
        )
    return padding


def shared_columns(rows: Sequence[Row], ends: Sequence[int], *, can_compute: bool) -> int:
    """How many leading columns of the batch to keep, of all rows.

    transformers computes the same columns of every row. A row with less than the others holds them
    back, unless what it lacks `can_compute` beforehand, for that row alone: then the number is
    taken that leaves least to compute in all.

    Args:
        rows: the batch.
        ends: for each row, the column where what is stored of it ends.
    """

    def cost(columns: int) -> int:
        behind = [columns - end for end in ends if end < columns]
        return len(rows) * (rows[0].columns - columns) + sum(behind) + FORWARD_TOKENS * len(behind)

    columns = min(sorted(set(ends), reverse=True), key=cost) if can_compute else min(ends)
    has_any = any(row.padding < min(end, columns) for row, end in zip(rows, ends, strict=True))
    return columns if has_any else 0
