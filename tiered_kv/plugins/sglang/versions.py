"""Versions of SGLang that the plugin works with; its interfaces change from one to the next."""

from __future__ import annotations

from importlib.metadata import version

from tiered_kv.errors import ConfigError

SGLANG_VERSIONS = ("0.5.23",)


def check_version(found: str) -> None:
    """Refuse an SGLang that the plugin was not written for; its post-releases are the same.

    Raises:
        ConfigError: another version; one line that names it and those that work.
    """
    if found.partition("+")[0].partition(".post")[0] not in SGLANG_VERSIONS:
        known = ", ".join(SGLANG_VERSIONS)
        raise ConfigError(f"tiered-kv works with SGLang {known}, and this is {found}")


def check_installed() -> None:
    """`check_version` of what is installed, before any of it is imported."""
    check_version(version("sglang"))
