"""Plugins: one module an engine, imported by name; importing this package imports no engine."""
