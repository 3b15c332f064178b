"""Versions of vLLM that the plugins work with; its interfaces change from one to the next."""

from __future__ import annotations

from tiered_kv.errors import ConfigError

VLLM_VERSIONS = ("0.32",)


def check_version(version: str) -> None:
    """Refuse a vLLM that the plugins were not written for.

    Raises:
        ConfigError: another version; one line that names it and those that work.
    """
    if not version.startswith(tuple(f"{known}." for known in VLLM_VERSIONS)):
        known = ", ".join(f"{known}.x" for known in VLLM_VERSIONS)
        raise ConfigError(f"tiered-kv works with vLLM {known}, and this is {version}")
