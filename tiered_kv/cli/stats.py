"""`tiered-kv stats DIRECTORY`: what does a store on disk hold?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import CliPositionalArg

from tiered_kv.cli import EXIT_DONE
from tiered_kv.cli.options import Options, parse
from tiered_kv.cli.stored import StoredLayout, opened

SCHEMA_VERSION = 1


class StatsOptions(Options):
    """Say what a store on disk holds. Exit code 2: there is none, or it is in use."""

    directory: CliPositionalArg[Path] = Field(description="the directory that --disk named")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(StatsOptions, arguments, "stats")
    facts = _facts(options.directory)
    if options.print_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            shown = f"{value:,}" if isinstance(value, int) else value
            print(f"{name:<16}{shown}", file=sys.stderr)
    return EXIT_DONE


def _facts(directory: Path) -> dict[str, Any]:
    layout = StoredLayout.of(directory)
    with opened(directory) as tier:
        return {
            "schema_version": SCHEMA_VERSION,
            "directory": str(directory),
            "layout": layout.fingerprint,
            "page_bytes": layout.page_bytes,
            "pages": tier.used_bytes // layout.page_bytes,
            "capacity_pages": tier.capacity_pages,
            "used_bytes": tier.used_bytes,
            "capacity_bytes": layout.capacity_bytes,
        }
