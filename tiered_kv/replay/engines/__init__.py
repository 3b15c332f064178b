"""What answers the requests of a replay: `timed` computes by a clock, `hf` with a real model."""
