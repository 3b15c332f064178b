"""Medians, quantiles and intervals: against numpy, and against what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.bench.statistics import (
    LEAST_P95,
    LEAST_P99,
    LEAST_PAIRS,
    ci95,
    median,
    p95_or_none,
    p99_or_none,
    percentile,
    ratio_ci95,
)

SAMPLES = st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=80)


@settings(deadline=None)
@given(SAMPLES, st.floats(0, 100))
def test_quantiles_are_those_of_numpy(samples: list[float], q: float) -> None:
    assert percentile(samples, q) == pytest.approx(np.percentile(samples, q))
    assert median(samples) == pytest.approx(np.median(samples))


@pytest.mark.parametrize("q", [-1, 101])
def test_a_percentile_outside_0_to_100_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], q)


def test_a_median_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        median([])


@pytest.mark.parametrize(
    ("quantile", "least", "share"),
    [(p95_or_none, LEAST_P95, 0.95), (p99_or_none, LEAST_P99, 0.99)],
    ids=["p95", "p99"],
)
def test_a_quantile_is_refused_below_the_n_that_shows_it(
    quantile: object, least: int, share: float
) -> None:
    """Of fewer it is their maximum under another name."""
    assert 1 - share**least >= 0.95 > 1 - share ** (least - 1)
    values = [float(value) for value in range(least)]
    assert callable(quantile)
    assert quantile(values[:-1]) is None
    assert quantile(values) == pytest.approx(np.quantile(values, share))


def test_the_interval_of_a_median_holds_it_19_times_in_20() -> None:
    """Lognormal samples of 15: the true median is 1."""
    random = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        edges = ci95(random.lognormal(size=15).tolist())
        assert edges is not None
        inside += edges[0] <= 1 <= edges[1]
    assert inside >= 950


def test_no_interval_is_given_where_none_exists() -> None:
    assert ci95([1.0] * (LEAST_PAIRS - 1)) is None
    assert ratio_ci95([1.0] * 5, [2.0] * 5) == (0.5, None)


def test_the_interval_of_a_ratio_holds_it_about_19_times_in_20() -> None:
    """Both sides share their noise, as two samples taken in turn do."""
    random = np.random.default_rng(2)
    inside = 0
    for _ in range(100):
        noise = random.lognormal(sigma=0.2, size=15)
        limit = noise * random.lognormal(sigma=0.05, size=15)
        ours = 0.8 * noise * random.lognormal(sigma=0.05, size=15)
        edges = ratio_ci95(ours.tolist(), limit.tolist()).ci95
        assert edges is not None
        inside += edges[0] <= 0.8 <= edges[1]
    assert inside >= 90


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(1, 100), min_size=6, max_size=30), st.floats(0.1, 10))
def test_a_fixed_multiple_has_a_ratio_without_spread(limit: list[float], factor: float) -> None:
    value, edges = ratio_ci95([factor * one for one in limit], limit)
    assert edges is not None
    assert [value, *edges] == pytest.approx([factor] * 3)


def test_equal_samples_give_equal_intervals() -> None:
    random = np.random.default_rng(3)
    ours, limit = (random.lognormal(size=15).tolist() for _ in range(2))
    assert ratio_ci95(ours, limit) == ratio_ci95(ours, limit)


def test_samples_that_are_not_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs"):
        ratio_ci95([1.0, 2.0], [1.0])
