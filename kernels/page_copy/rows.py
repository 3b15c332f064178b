"""Rows: pages that lie in one matrix, known by their numbers, so that a batch is one copy call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.intp]]
Positions = Numbers | slice


class Rows(Sequence[Bytes]):
    """Some rows of a matrix: a sequence of pages, each a view made when it is asked for.

    Args:
        matrix: uint8 ``[rows, page bytes]``; rows are contiguous, their distance is free.
        numbers: which rows, in order.

    Raises:
        IndexError: no such row.
    """

    def __init__(self, matrix: Bytes, numbers: Sequence[int]) -> None:
        check_numbers(numbers, len(matrix))
        self.matrix = matrix
        self.numbers = list(numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, at: int) -> Bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Rows: ...

    def __getitem__(self, at: int | slice) -> Bytes | Rows:
        if isinstance(at, slice):
            return Rows(self.matrix, self.numbers[at])
        row: Bytes = self.matrix[self.numbers[at]]
        return row

    def select(self, positions: Sequence[int]) -> Rows:
        """The rows at these positions."""
        return Rows(self.matrix, [self.numbers[at] for at in positions])

    def stretches(self, least: int) -> tuple[list[tuple[int, Positions]], Numbers]:
        """Rows that follow one another in the matrix without a gap, at least so many of them.

        Returns:
            For each stretch its first row, and the positions of its rows in order; then the
            positions of all rows in no stretch.
        """
        numbers, count = self.numbers, len(self.numbers)
        if count >= max(1, least) and numbers == list(range(numbers[0], numbers[0] + count)):
            return [(numbers[0], slice(0, count))], np.empty(0, np.intp)  # the common case: 5 us
        array = np.array(numbers, dtype=np.intp)
        order = np.argsort(array)
        breaks = np.flatnonzero(np.diff(array[order]) != 1) + 1
        groups = np.split(order, breaks)
        long: list[tuple[int, Positions]] = [
            (numbers[group[0]], group) for group in groups if len(group) >= least
        ]
        short = [group for group in groups if len(group) < least]
        return long, np.concatenate(short) if short else np.empty(0, np.intp)


def selected(pages: Sequence[Bytes], positions: Sequence[int]) -> Sequence[Bytes]:
    """The pages at these positions; of `Rows` as `Rows`."""
    if isinstance(pages, Rows):
        return pages.select(positions)
    return [pages[at] for at in positions]


def shapes_of(pages: Sequence[Bytes]) -> set[tuple[int, ...]]:
    """The shapes that pages have; one look at `Rows`, which are all alike."""
    if isinstance(pages, Rows):
        return {pages.matrix.shape[1:]}
    return {page.shape for page in pages}


def check_numbers(numbers: Sequence[int], count: int) -> None:
    """Refuse what numpy's batch copies would clip or count from the end.

    Raises:
        IndexError: a number outside 0..count-1.
    """
    if numbers and (min(numbers) < 0 or max(numbers) >= count):
        wrong = next(number for number in numbers if not 0 <= number < count)
        raise IndexError(f"{wrong} is outside 0..{count - 1}")
