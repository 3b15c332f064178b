"""`tiered-kv check DIRECTORY`: is what is on disk what was put there?"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import CliPositionalArg

from tiered_kv.cli import EXIT_DONE, EXIT_FAILED
from tiered_kv.cli.options import Options, parse
from tiered_kv.cli.stored import opened

SCHEMA_VERSION = 1


class CheckOptions(Options):
    """Verify every page of a store on disk. Exit code 0: clean, 1: problems, 2: not possible."""

    directory: CliPositionalArg[Path] = Field(description="the directory that --disk named")
    fix: bool = Field(False, description="drop damaged pages, so that they become misses")


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    options = parse(CheckOptions, arguments, "check")
    with opened(options.directory) as tier:
        report = tier.check(fix=options.fix)
    for problem in report.problems:
        print(problem, file=sys.stderr)
    if report.hanging_pages:
        print(
            f"{report.hanging_pages:,} pages hang from pages that are damaged or not here; they "
            "hit again once those are computed (opening the store frees them if those are gone)",
            file=sys.stderr,
        )
    fixed = f", {report.fixed:,} fixed" if options.fix else ""
    print(
        f"{options.directory}: {report.pages:,} pages checked, "
        f"{len(report.problems):,} problems{fixed}",
        file=sys.stderr,
    )
    if options.print_json:
        found = {
            "schema_version": SCHEMA_VERSION,
            "directory": str(options.directory),
            "pages": report.pages,
            "problems": report.problems,
            "fixed": report.fixed,
            "hanging_pages": report.hanging_pages,
            "is_clean": report.is_clean,
        }
        print(json.dumps(found))
    return EXIT_DONE if report.is_clean else EXIT_FAILED
