"""Medians, quantiles and intervals of what was measured.

Nothing here assumes a distribution. The interval of a median comes from the ranks of the sample
(binomial; Hahn and Meeker, Statistical Intervals, 1991, 5.2). The interval of a ratio of medians is
a percentile bootstrap (Efron, 1979) that draws whole pairs, so that what was measured side by side
stays side by side. Quantiles are those of numpy's default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiered_kv.replay.live.statistics import LEAST_N, median_interval, quantile

LEAST_P95 = 59
LEAST_P99 = LEAST_N["p99"]
"""Samples a quantile needs: of fewer, all lie below it more often than once in 20 times."""

LEAST_PAIRS = 6
"""Below, no interval of 95 % exists: the whole sample lies on one side 1 time in 32 and more."""

_DRAWS = 4000
_SEED = 20261129


class Ratio(NamedTuple):
    """A ratio of medians and its 95 % interval, None below 6 pairs."""

    value: float
    ci95: tuple[float, float] | None


def median(samples: Sequence[float]) -> float:
    """The median. Raises ValueError of no samples."""
    return percentile(samples, 50)


def percentile(samples: Sequence[float], q: float) -> float:
    """The value below which q per cent (0 to 100) of the samples lie. Raises ValueError of none."""
    if not samples:
        raise ValueError("no samples: nothing was measured")
    if not 0 <= q <= 100:
        raise ValueError(f"q={q}: a percentile lies between 0 and 100")
    return quantile(sorted(samples), q / 100)


def p95_or_none(samples: Sequence[float]) -> float | None:
    """The 95th percentile; None below 59 samples, as for the 99th below 299."""
    return percentile(samples, 95) if len(samples) >= LEAST_P95 else None


def p99_or_none(samples: Sequence[float]) -> float | None:
    """The 99th percentile; None below 299 samples, whose p99 is their maximum by another name."""
    return percentile(samples, 99) if len(samples) >= LEAST_P99 else None


def ci95(samples: Sequence[float]) -> tuple[float, float] | None:
    """The two samples that hold the median between them 19 times in 20; None below 6 samples."""
    return median_interval(sorted(samples)) if len(samples) >= LEAST_PAIRS else None


def ratio_ci95(ours: Sequence[float], limit: Sequence[float]) -> Ratio:
    """Median of ours over median of the limit, from samples taken in turn (A B A B).

    Raises:
        ValueError: not one limit a sample, or none at all.
    """
    if len(ours) != len(limit):
        raise ValueError(f"{len(ours)} samples and {len(limit)} of their limit: they are pairs")
    value = median(ours) / median(limit)
    if len(ours) < LEAST_PAIRS:
        return Ratio(value, None)
    pairs = np.array([ours, limit])
    drawn = np.random.default_rng(_SEED).integers(0, len(ours), (_DRAWS, len(ours)))
    above, below = np.median(pairs[:, drawn], axis=2)
    low, high = np.quantile(above / below, (0.025, 0.975))
    return Ratio(value, (float(low), float(high)))
