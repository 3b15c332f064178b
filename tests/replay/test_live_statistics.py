"""Quantiles: right where they are given, refused where the sample is too small for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.replay.live.statistics import LEAST_N, Distribution, _lower_rank

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=400)


@settings(deadline=None)
@given(VALUES)
def test_mean_and_median_are_those_of_numpy(values: list[float]) -> None:
    found = Distribution.of(values)
    assert found.n == len(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.p50 == pytest.approx(np.median(values))


@pytest.mark.parametrize("n", [299, 300, 1000])
def test_quantiles_are_those_of_numpy(n: int) -> None:
    values = np.random.default_rng(n).lognormal(size=n).tolist()
    found = Distribution.of(values)
    assert found.p90 == pytest.approx(np.quantile(values, 0.9))
    assert found.p99 == pytest.approx(np.quantile(values, 0.99))


@pytest.mark.parametrize(("name", "share"), [("p90", 0.9), ("p99", 0.99)])
def test_a_quantile_is_refused_below_the_n_that_shows_it(name: str, share: float) -> None:
    """A p99 of 20 requests is their maximum under another name."""
    least = LEAST_N[name]
    assert 1 - share**least >= 0.95 > 1 - share ** (least - 1)
    values = [float(value) for value in range(least)]
    assert getattr(Distribution.of(values), name) is not None
    assert getattr(Distribution.of(values[1:]), name) is None


def test_no_values_give_no_numbers() -> None:
    found = Distribution.of([None, None])
    assert found == Distribution(0)
    assert found.as_json() == {
        "n": 0,
        "mean": None,
        "p50": None,
        "p50_ci95": None,
        "p90": None,
        "p99": None,
    }


@pytest.mark.parametrize("n", [6, 7, 20, 99, 200, 201, 1000])
def test_the_interval_of_the_median_holds_it_19_times_in_20(n: int) -> None:
    """By the binomial alone: the true median lies between the k-th and the (n-k+1)-th value."""
    rank = _lower_rank(n)
    tail = sum(math.comb(n, k) for k in range(rank)) / 2**n
    next_tail = sum(math.comb(n, k) for k in range(rank + 1)) / 2**n
    assert tail <= 0.027
    assert next_tail > 0.02
    low, high = Distribution.of(float(value) for value in range(n)).p50_ci95 or (0, 0)
    assert (low, high) == (rank - 1, n - rank)


def test_an_interval_of_five_values_is_refused() -> None:
    assert Distribution.of([1.0, 2.0, 3.0, 4.0, 5.0]).p50_ci95 is None


def test_json_is_rounded_to_microseconds() -> None:
    found = Distribution.of([0.12345678] * 6).as_json()
    assert found["p50"] == 0.123457
    assert found["p50_ci95"] == [0.123457, 0.123457]
