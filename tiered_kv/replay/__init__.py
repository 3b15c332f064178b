"""Replay: multi-turn conversations and recorded traces through a store, with real bytes.

The modules are imported where they are needed (`tiered_kv.replay.run`, `tiered_kv.replay.traces`,
...), so that reading a trace costs no torch and no engine.
"""
