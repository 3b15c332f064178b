"""Means and quantiles, with quantiles refused that a sample is too small for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

LEAST_N = {"p90": 29, "p99": 299}
"""Samples a quantile needs: of fewer, all lie below it more often than once in 20 times."""

_EXACT_N = 200  # above, the binomial is normal to within one rank


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample in numbers.

    Attributes:
        n: how many values.
        mean: their mean; None without any.
        p50: their median; None without any.
        p50_ci95: a 95 % interval of the median, from the ranks alone; None below 6 values.
        p90: None below 29 values.
        p99: None below 299 values.
    """

    n: int
    mean: float | None = None
    p50: float | None = None
    p50_ci95: tuple[float, float] | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """The distribution of the values that are there."""
        found = sorted(value for value in values if value is not None)
        if not found:
            return cls(0)
        return cls(
            n=len(found),
            mean=math.fsum(found) / len(found),
            p50=quantile(found, 0.5),
            p50_ci95=median_interval(found),
            p90=quantile(found, 0.9) if len(found) >= LEAST_N["p90"] else None,
            p99=quantile(found, 0.99) if len(found) >= LEAST_N["p99"] else None,
        )

    def as_json(self) -> dict[str, object]:
        """The distribution as JSON values, rounded to microseconds."""

        def rounded(value: float | None) -> float | None:
            return None if value is None else round(value, 6)

        interval = self.p50_ci95
        return {
            "n": self.n,
            "mean": rounded(self.mean),
            "p50": rounded(self.p50),
            "p50_ci95": None if interval is None else [rounded(edge) for edge in interval],
            "p90": rounded(self.p90),
            "p99": rounded(self.p99),
        }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Linear between neighbours, as numpy's default."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median_interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """The values whose ranks hold the median between them 19 times in 20, whatever its spread."""
    n = len(ordered)
    rank = _lower_rank(n)
    return None if rank < 1 else (ordered[rank - 1], ordered[n - rank])


def _lower_rank(n: int) -> int:
    """The largest rank k with P(fewer than k of n values below the median) <= 2.5 %."""
    if n > _EXACT_N:
        return math.floor((n - 1.96 * math.sqrt(n)) / 2)
    below, rank = 0, 0
    while rank < n // 2:
        below += math.comb(n, rank)
        if below > 0.025 * 2**n:
            break
        rank += 1
    return rank
