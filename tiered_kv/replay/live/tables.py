"""A live replay's report for people: a table by turn for each round, and a summary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tiered_kv.replay.live.answer import FAILURE_REASONS
from tiered_kv.replay.live.record import LiveRecord
from tiered_kv.replay.live.report import LiveReport, Round, Times, Tokens
from tiered_kv.replay.live.statistics import LEAST_N, Distribution
from tiered_kv.replay.tables import TurnGroup, duration, grouped

_WAITED_S = 0.1
"""A median wait for a free client above this is worth a word."""


def print_live_report(report: LiveReport, console: Console) -> None:
    """Print each round's table and summary, then what concerns them all."""
    for number, one in enumerate(report.rounds):
        title = f"round {number + 1}" if len(report.rounds) > 1 else ""
        if one.done:
            console.print(_turn_table(one, title))
        _print_rows(console, _Summary(report, one).rows())
    _print_rows(console, _overall(report))


def _print_rows(console: Console, rows: Iterator[tuple[str, str]]) -> None:
    for name, value in rows:
        console.print(f"[bold]{name:<24}[/bold] ", end="", highlight=False)
        console.print(value, highlight=False, markup=False)


def _turn_table(one: Round, title: str) -> Table:
    what = "turn" if one.by_turn else "request"
    table = Table(
        title=f"{title + ': ' if title else ''}mean tokens of a prompt, and times",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    names = ("mean", "p50", "p90", "p99")
    times = [f"{what} {name}" for what in ("TTFT", "TPOT") for name in names]
    ordered = sorted(one.records, key=lambda record: record.position)
    rows = [_cells(group) for group in grouped(ordered)]
    columns = (what, "n", "prompt", "cached", *times)
    shown = [at for at in range(len(columns)) if any(row[at] != "-" for row in rows)]
    for at in shown:
        table.add_column(columns[at], justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[at] for at in shown))
    return table


def _cells(group: TurnGroup[LiveRecord]) -> list[str]:
    done = [record for record in group.turns if record.is_done]
    tokens, times = Tokens.of(done), Times.of(done)
    n = max(1, len(done))
    return [
        group.label,
        str(len(done)),
        f"{tokens.prompt / n:,.0f}",
        "-" if tokens.cached is None else f"{tokens.cached / n:,.0f}",
        *_quantiles(times.ttft_s),
        *_quantiles(times.tpot_s),
    ]


def _quantiles(found: Distribution) -> list[str]:
    values = (found.mean, found.p50, found.p90, found.p99)
    return ["-" if value is None else duration(value) for value in values]


@dataclass(frozen=True, slots=True)
class _Summary:
    """What is worth saying of one round, as (name, text)."""

    report: LiveReport
    one: Round

    def rows(self) -> Iterator[tuple[str, str]]:
        yield "requests", self._requests()
        if self.one.interrupted:
            yield "interrupted", "this is what was done until then"
        if self.one.is_gone:
            yield "engine gone", "the replay ended when it could no longer be reached"
        for reason, count in self.one.failures.items():
            yield f"failed: {reason}", f"{count:,}: {self._example(reason)}"
        yield "cached tokens", self._cached()
        yield from self._counted()
        yield "TTFT", self._ttft()
        yield "throughput", self._throughput()
        waited = Distribution.of(record.waited_s for record in self.one.records)
        if waited.p50 is not None and waited.p50 > _WAITED_S:
            yield "waited for a client", f"median {duration(waited.p50)}: raise --clients"

    def _requests(self) -> str:
        one = self.one
        done, sent = len(one.done), len(one.records)
        failed = f", {sent - done:,} failed" if sent > done else ""
        left = f", {one.planned - sent:,} unfinished" if one.planned > sent else ""
        flight = f"at most {one.in_flight_max} at once"
        return f"{done:,} of {one.planned:,}{failed}{left} in {one.wall_s:.1f} s, {flight}"

    def _example(self, reason: str) -> str:
        for record in self.one.records:
            if record.failure == reason and record.message:
                return record.message
        return next(text for name, text in FAILURE_REASONS.items() if name == reason)

    def _cached(self) -> str:
        tokens = Tokens.of(self.one.records)
        if tokens.cached is None:
            if not self.one.done:
                return "no request was answered"
            return (
                "not said by the server: start vLLM with --enable-prompt-tokens-details, "
                "SGLang with --enable-cache-report"
            )
        text = f"{tokens.cached:,} of {_share(tokens.cached, tokens.prompt)} prompt tokens"
        if tokens.repeated is not None:
            text += f"; {tokens.repeated:,} had been said before in this round"
        shares = [half.cached_share for half in self.one.halves]
        if None not in shares:
            first, second = (f"{100 * (share or 0):.1f} %" for share in shares)
            text += f" (first half {first}, second {second})"
        return text

    def _counted(self) -> Iterator[tuple[str, str]]:
        counted = self.one.counted
        if counted is None:
            return
        if counted.was_reset:
            yield "engine's counters", "fell: it was started anew meanwhile"
            return
        if counted.cached_by_source:
            sources = (f"{name} {n:,}" for name, n in counted.cached_by_source.items())
            yield "cached tokens by place", ", ".join(sources)
        names = {"prefix_cache": "prefix cache", "external_prefix_cache": "external cache"}
        for key, name in names.items():
            pair = counted.pair(key)
            if pair is not None and pair[0]:
                yield f"{name} hits", f"{pair[1]:,} of {_share(pair[1], pair[0])} tokens asked"

    def _ttft(self) -> str:
        first = [record.ttft_s for record in self.one.done if record.turn == 0]
        parts = []
        for name, found in (
            ("all", Times.of(self.one.done).ttft_s),
            ("first turns", Distribution.of(first)),
            ("returning turns", Times.of(self.one.returning).ttft_s),
        ):
            if found.p50 is not None:
                parts.append(f"{name} {_median(found)}")
        return "median " + "; ".join(parts) if parts else "no request was answered"

    def _throughput(self) -> str:
        rates = self.one.as_json()["throughput"]
        return (
            f"{rates['requests_per_s']:,.2f} requests/s, {rates['prompt_tokens_per_s']:,.0f} "
            f"prompt and {rates['completion_tokens_per_s']:,.0f} answer tokens/s"
        )


def _overall(report: LiveReport) -> Iterator[tuple[str, str]]:
    facts = report.facts
    where = facts.get("url") or f"vLLM {facts.get('vllm')} in this process"
    yield "engine", f"{facts.get('model')} at {where}, prompts as {facts.get('prompts')}"
    if report.is_stopped:
        yield "interrupted", "between two rounds"
    if report.answers is not None:
        compared, differing = report.answers
        same = "all equal" if not differing else f"{differing:,} differ"
        yield "answers of rounds", f"{compared:,} compared with round 1: {same}"
    if not facts.get("fixed_reply_length"):
        yield "answers", "the server takes no ignore_eos: they end where the model ends them"
    sizes = [len(one.done) for one in report.rounds]
    if sizes and max(sizes) < LEAST_N["p99"]:
        yield "quantiles", f"p90 from {LEAST_N['p90']} requests on, p99 from {LEAST_N['p99']}"


def _median(found: Distribution) -> str:
    assert found.p50 is not None
    text = duration(found.p50)
    if found.p50_ci95 is None:
        return f"{text} (n {found.n})"
    low, high = (duration(edge) for edge in found.p50_ci95)
    return f"{text} (95 %: {low} to {high}, n {found.n})"


def _share(part: int, whole: int) -> str:
    return f"{whole:,} ({100 * part / max(1, whole):.1f} %)"
