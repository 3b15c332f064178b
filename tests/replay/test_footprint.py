"""Measuring this process's memory."""

from __future__ import annotations

import numpy as np
import pytest

from tiered_kv.replay.footprint import PeakMemory, resident_bytes


def test_a_peak_is_seen_after_it_has_gone() -> None:
    peak = PeakMemory()
    if peak.peak_bytes() is None:
        pytest.skip("this system does not tell the resident set's high-water mark")
    block = np.ones(64 << 20, dtype=np.uint8)
    now = resident_bytes()
    assert now is not None and now > block.nbytes
    del block
    found = peak.peak_bytes()
    assert found is not None
    assert 60 << 20 <= found < 96 << 20


def test_a_new_measurement_starts_at_nothing() -> None:
    if PeakMemory().peak_bytes() is None:
        pytest.skip("this system does not tell the resident set's high-water mark")
    block = np.ones(64 << 20, dtype=np.uint8)
    del block
    found = PeakMemory().peak_bytes()
    assert found is not None and found < 32 << 20
