"""A replay's report for people: a table by turn and a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, Protocol, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.replay.report import ReplayReport, TurnRecord
from tiered_kv.replay.requests import TIERS

_MOST_ROWS = 12


class HasTurn(Protocol):
    """A request with its place: what a row of a table is made of."""

    @property
    def position(self) -> int:
        """Which request, from 0."""

    @property
    def turn(self) -> int | None:
        """Which turn of its conversation, from 0; None where not known."""


AnyTurn = TypeVar("AnyTurn", bound=HasTurn)


@dataclass(frozen=True, slots=True)
class TurnGroup(Generic[AnyTurn]):
    """Requests shown in one row."""

    label: str
    turns: Sequence[AnyTurn]


def grouped(turns: Sequence[AnyTurn]) -> list[TurnGroup[AnyTurn]]:
    """Requests by turn of their conversation, or by tenths of the trace where turns are not known.

    More than twelve turns are put together in ranges that hold about equally many requests.
    """
    if not turns:
        return []
    if any(turn.turn is None for turn in turns):
        parts = _cut(list(turns), 10)
        return [
            TurnGroup(f"{part[0].position + 1:,}-{part[-1].position + 1:,}", part) for part in parts
        ]
    by_turn: dict[int, list[AnyTurn]] = {}
    for turn in sorted(turns, key=lambda record: record.turn or 0):
        by_turn.setdefault(turn.turn or 0, []).append(turn)
    if len(by_turn) <= _MOST_ROWS:
        return [TurnGroup(str(index + 1), found) for index, found in by_turn.items()]
    return _ranges(by_turn, -(-len(turns) // _MOST_ROWS))


def _cut(turns: list[AnyTurn], parts: int) -> list[list[AnyTurn]]:
    size = max(1, -(-len(turns) // parts))
    return [turns[start : start + size] for start in range(0, len(turns), size)]


def _ranges(by_turn: dict[int, list[AnyTurn]], least: int) -> list[TurnGroup[AnyTurn]]:
    groups: list[TurnGroup[AnyTurn]] = []
    first: int | None = None
    found: list[AnyTurn] = []
    for index, turns in by_turn.items():
        first = index if first is None else first
        found = [*found, *turns]
        if len(found) >= least or index == max(by_turn):
            label = f"{first + 1}" if first == index else f"{first + 1}-{index + 1}"
            groups.append(TurnGroup(label, found))
            first, found = None, []
    return groups


def print_report(report: ReplayReport, console: Console) -> None:
    """Print the table by turn and the summary."""
    if report.turns:
        console.print(turn_table(report.turns))
    for name, value in summary(report):
        console.print(f"[bold]{name:<22}[/bold]{value}", highlight=False)


def turn_table(turns: Sequence[TurnRecord]) -> Table:
    """One row a turn: means of tokens, medians of times."""
    what = "request" if any(turn.turn is None for turn in turns) else "turn"
    table = Table(
        title="Mean tokens of a prompt and reused from each tier; median TTFT",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in (what, "n", "prompt", *TIERS, "store", "recompute", "ratio", "equal"):
        table.add_column(column, justify="right", no_wrap=True)
    for group in grouped(turns):
        table.add_row(*_cells(group))
    return table


def _cells(group: TurnGroup[TurnRecord]) -> list[str]:
    turns = group.turns
    wrong = sum(not turn.outputs_equal for turn in turns)
    reused = [sum(turn.reused_tokens.get(tier, 0) for turn in turns) / len(turns) for tier in TIERS]
    return [
        group.label,
        str(len(turns)),
        f"{sum(turn.prompt_tokens for turn in turns) / len(turns):,.0f}",
        *(f"{tokens:,.0f}" for tokens in reused),
        duration(median(turn.ttft_store_s for turn in turns)),
        duration(median(turn.ttft_recompute_s for turn in turns)),
        f"{median(turn.ttft_ratio for turn in turns):.2f}",
        f"{wrong} NOT" if wrong else "yes",
    ]


def summary(report: ReplayReport) -> list[tuple[str, str]]:
    """What is worth saying of the whole replay, as (name, text)."""
    done, planned = len(report.turns), report.requests_planned
    rows = [("requests", f"{done:,} of {planned:,} in {report.wall_s:.1f} s")]
    if report.interrupted:
        rows.append(("interrupted", "this is what was done until then"))
    rows.append(("outputs equal", _outputs(report)))
    rows.append(("came back from", _origins(report)))
    rows.append(("hit tokens", _hits(report)))
    if report.decided_tokens is not None:
        rows.append(("decided without bytes", _decided(report)))
    rows.append(("TTFT store/recompute", _ratios(report)))
    rows.append(("bytes read", _sizes(report.bytes_read)))
    rows.append(("bytes written", _sizes(report.bytes_written)))
    rows.append(
        ("checksums", f"{report.checksums_verified:,} verified, {report.checksums_failed:,} failed")
    )
    if report.pages_compared:
        compared = f"{report.pages_compared:,} byte for byte, {report.pages_wrong:,} wrong"
        rows.append(("pages compared", compared))
    if report.failed_writes:
        failed = f"{report.failed_writes:,} pages: the disk is full or broken; see the log"
        rows.append(("writes to disk failed", failed))
    rows.append(("peak memory", _memory(report)))
    missed = ", ".join(f"{reason} {pages:,}" for reason, pages in report.why_miss.items() if pages)
    rows.append(("why pages missed", missed or "no page missed"))
    return rows


def _outputs(report: ReplayReport) -> str:
    wrong = sum(not turn.outputs_equal for turn in report.turns)
    if wrong:
        return f"NO: {wrong:,} of {len(report.turns):,} differ"
    differences = [t.logit_difference for t in report.turns if t.logit_difference is not None]
    largest = f"; logits of first tokens within {max(differences):.1e}" if differences else ""
    return f"yes, all {len(report.turns):,}{largest}"


def _origins(report: ReplayReport) -> str:
    served = [tier for tier in TIERS if report.hit_tokens.get(tier)]
    if len(served) == len(TIERS):
        return f"all three tiers: {', '.join(served)}"
    return f"{' and '.join(served)} only" if served else "nowhere: no page was reused"


def _hits(report: ReplayReport) -> str:
    hits, prompts = report.hit_tokens, max(1, report.prompt_tokens)
    parts = ", ".join(f"{tier} {tokens:,}" for tier, tokens in hits.items())
    share = 100 * sum(hits.values()) / prompts
    return f"{parts}: {share:.1f} % of {report.prompt_tokens:,} prompt tokens"


def _decided(report: ReplayReport) -> str:
    if report.is_as_decided:
        return "the same index and policy give the same hits"
    decided = report.decided_tokens or {}
    return "NO: " + ", ".join(f"{tier} {tokens:,}" for tier, tokens in decided.items())


def _ratios(report: ReplayReport) -> str:
    if report.ttft_ratio_median is None:
        return "no returning turn"
    text = f"median {report.ttft_ratio_median:.2f} on returning turns"
    if report.ttft_ratio_median_long is not None:
        text += f", {report.ttft_ratio_median_long:.2f} where 2,000 tokens or more were reused"
    return text


def _memory(report: ReplayReport) -> str:
    memory = report.memory
    what = "process growth" if memory.measure == "process_rss" else "tiers and index"
    peak = "not measurable here" if memory.peak_bytes is None else _size(memory.peak_bytes)
    return f"{peak} of {_size(memory.budget_bytes)} allowed ({what})"


def _sizes(by_tier: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {_size(by_tier.get(tier, 0))}" for tier in TIERS)


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    if seconds < 0.001:
        return f"{seconds * 1000:.2f} ms"
    return f"{seconds * 1000:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
