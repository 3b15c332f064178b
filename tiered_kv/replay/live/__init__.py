"""Replay against a live engine: conversations at real gaps, several at once, timed outside it."""
