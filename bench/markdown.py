"""What reports in Markdown share: their file's name and their tables."""

from __future__ import annotations

import re
from collections.abc import Sequence


def file_name(theme: str, host: str, timestamp: str) -> str:
    """<theme>_<host>_<yyyymm>.md."""
    words = re.sub(r"\((r|tm)\)|processor|cpu", "", host.split(",")[0].lower())
    slug = re.sub(r"[^a-z0-9.]+", "-", words).strip("-")
    return f"{theme}_{slug}_{timestamp[:4]}{timestamp[5:7]}.md"


def table(lines: Sequence[Sequence[str]]) -> str:
    """A table, its first line the heads of its columns."""
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])
