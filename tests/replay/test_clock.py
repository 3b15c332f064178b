"""Simulated time."""

from __future__ import annotations

from tiered_kv.replay.clock import ComputeSpeed, SimulatedClock


def test_computing_takes_time_by_the_token() -> None:
    speed = ComputeSpeed(prefill_tokens_per_s=1000, decode_tokens_per_s=10)
    assert speed.prefill_s(500) == 0.5
    assert speed.decode_s(11) == 1.0


def test_the_last_prompt_token_is_always_computed() -> None:
    assert ComputeSpeed(prefill_tokens_per_s=1000).prefill_s(0) == 0.001
    assert ComputeSpeed().decode_s(0) == 0.0


def test_the_clock_jumps_over_pauses_and_never_back() -> None:
    clock = SimulatedClock()
    clock.wait_until(100.0)
    clock.advance(5.0)
    clock.wait_until(101.0)
    assert clock.now_s == 105.0
