"""Copies between layer-first pools and contiguous host pages."""
