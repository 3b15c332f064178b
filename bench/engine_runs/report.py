"""The report of `bench.engines`, in Markdown: machine, commands, configuration, tables, limits."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench import markdown
from bench.engine_runs.comparison import (
    COLD,
    GROUPS,
    LONG,
    Comparison,
    by_turn,
    compare,
    differing_tokens,
)
from bench.engine_runs.conversations import LONG_TOKENS, Turn, Workload
from bench.engine_runs.models import SIZES
from bench.engine_runs.variants import BASELINE, BLOCK_TOKENS, VARIANTS, Sizes
from bench.rows import Origin, size_text

LONG_GOAL = 0.5
COLD_GOAL = 1.03


@dataclass(slots=True)
class Outcome:
    """All that a run of the bench has brought.

    Attributes:
        failed: variant -> why it did not run to its end.
        counters: variant -> vLLM's counters at the end of its last engine.
        limits: rates of this machine without any engine, bytes a second, by name.
        started_s: variant -> seconds that each of its engines took to start.
    """

    model: str
    workload: Workload
    sizes: Sizes
    rounds: int
    turns: list[Turn] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    counters: dict[str, dict[str, float]] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    started_s: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    configuration: dict[str, Any] = field(default_factory=dict)
    load_average: tuple[float, float] = (0.0, 0.0)
    wall_s: float = 0.0

    @property
    def variants(self) -> list[str]:
        """Those that have played, in their order."""
        return list(dict.fromkeys(turn.variant for turn in self.turns))

    def compared(self, group: str) -> list[Comparison]:
        """Every variant but the baseline."""
        found = (
            compare(self.turns, name, BASELINE, group) for name in self.variants if name != BASELINE
        )
        return [one for one in found if one is not None]


def render(outcome: Outcome, where: Origin, command: Sequence[str]) -> str:
    """The whole report."""
    parts = [
        "# TTFT of vLLM with and without offloading",
        f"Written by `bench/engines.py`. {where.timestamp}, commit {where.commit}.",
        _headline(outcome),
        "## Where and what",
        _facts(outcome, where, command),
        "## Against vLLM alone",
        _HOW_TO_READ,
        *(_ratio_table(outcome, group) for group in GROUPS if outcome.compared(group)),
        "## TTFT by turn",
        _turn_table(outcome, is_long=True),
        _turn_table(outcome, is_long=False),
        "## Same answers",
        _answers(outcome),
        "## What vLLM counted",
        _counters(outcome),
        "## Configuration",
        _configuration(outcome),
        "## What this does not show",
        _limits_of_this(outcome),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def verdicts(outcome: Outcome) -> list[str]:
    """One line a goal: what was asked, what it is, whether it is met."""
    lines = []
    for group, goal in ((LONG, LONG_GOAL), (COLD, COLD_GOAL)):
        for one in outcome.compared(group):
            if VARIANTS[one.variant].is_ours:
                # First prompts differ much in length: only their own ratios tell 3 % apart.
                reached, kind = (one.ratio, "") if group == LONG else (one.paired, ", paired")
                met = "met" if reached <= goal else "MISSED"
                lines.append(
                    f"{one.variant}, {group}{kind}: {reached:.3f} of {BASELINE}, goal {goal}: {met}"
                )
    lines += _against_peers(outcome)
    lines += [f"{name} did not run: {why}" for name, why in outcome.failed.items()]
    return lines


def _against_peers(outcome: Outcome) -> Iterable[str]:
    """Host tier against host tier, disk after a restart against the same, on shared long turns."""
    for ours in ("tiered-kv-host", "tiered-kv-disk"):
        level = ours.rsplit("-", 1)[1]
        for name in outcome.variants:
            if VARIANTS[name].is_peer and VARIANTS[name].restarts == VARIANTS[ours].restarts:
                found = compare(outcome.turns, ours, name, LONG)
                if found is not None:
                    ahead = "ahead" if found.ratio < 1 else "BEHIND"
                    yield (
                        f"{ours} against {name}, {LONG}: {found.ratio:.3f} of its TTFT on "
                        f"{found.turns} turns ({level} level): {ahead}"
                    )


def _headline(outcome: Outcome) -> str:
    return "\n".join(f"- {line}" for line in verdicts(outcome))


def _facts(outcome: Outcome, where: Origin, command: Sequence[str]) -> str:
    model, workload, sizes = SIZES[outcome.model], outcome.workload, outcome.sizes
    per_token = model.kv_bytes_per_token
    total = workload.total_tokens
    facts = {
        "machine": f"{where.host}; {platform.release()}; gpu: {where.gpu or 'none'}",
        "load average": "{:.2f} before, {:.2f} after".format(*outcome.load_average),
        "took": f"{outcome.wall_s / 60:.1f} min",
        "command": f"`{shlex.join(command)}`",
        "versions": "; ".join(
            f"{venv}: " + ", ".join(f"{k} {v}" for k, v in found.items())
            for venv, found in outcome.versions.items()
        ),
        "model": f"random weights, Qwen3 in shape, {model.parameters / 1e6:.0f} M parameters, "
        f"{model.layers} layers, float32, {size_text(per_token)} of KV a token",
        "conversations": f"{workload.conversations} x {workload.turns} turns, each once in turn; "
        f"first prompts of {workload.long_tokens} tokens (every third) and "
        f"{workload.short_tokens[0]} to {workload.short_tokens[1]}; then "
        f"{workload.question_tokens} tokens a turn; answers of {workload.answer_tokens}, greedy",
        "all together": f"{total} tokens, {size_text(_mib(total * per_token))} of KV",
        "engine's KV cache": f"{sizes.engine_tokens} tokens in blocks of {BLOCK_TOKENS}, "
        "prefix caching on",
        "host tiers": f"{size_text(sizes.host_bytes)}; above a disk "
        f"{size_text(sizes.small_host_bytes)}",
        "rounds": f"{outcome.rounds}, variants interleaved, every engine in a process of its own",
        "without any engine": _without_engine(outcome),
    }
    return "\n".join(f"- **{name}**: {text}" for name, text in facts.items() if text)


def _mib(n_bytes: int) -> int:
    return n_bytes >> 20 << 20


def _without_engine(outcome: Outcome) -> str:
    """What loading the history of a long conversation must take at least."""
    n_bytes = outcome.workload.long_tokens * SIZES[outcome.model].kv_bytes_per_token
    rates = (
        f"{name} {rate / 1e9:.2f} GB/s, so {n_bytes / rate * 1e3:.1f} ms"
        for name, rate in outcome.limits.items()
    )
    return f"{size_text(_mib(n_bytes))}, a long history: " + "; ".join(rates)


_HOW_TO_READ = f"""\
*ratio*: median TTFT over the median TTFT of `{BASELINE}` on the same turns; in brackets smallest
and largest of a single round. *paired*: median of the turns' own ratios, which does not mix long
prompts with short ones. *CPU*: the same of CPU time, all threads of the engine's process (a server
beside it is not in it). *reused*: median of the prompt tokens that the engine did not compute.
*settle*: median of what the engine went on working after an answer. Of variants that restart, only
the returning turns after the restart."""


def _ratio_table(outcome: Outcome, group: str) -> str:
    table = [
        ("variant", "n", "TTFT s", f"{BASELINE} s", "ratio", "paired", "CPU", "reused", "settle s")
    ]
    for one in outcome.compared(group):
        table.append(
            (
                one.variant,
                str(one.turns),
                f"{one.ttft_s:.3f}",
                f"{one.baseline_s:.3f}",
                _spread(one.ratio, one.by_round),
                _spread(one.paired, one.paired_by_round),
                f"{one.cpu_ratio:.3f}",
                f"{one.reused_tokens:.0f}",
                f"{one.settle_s:.3f}",
            )
        )
    return f"**{group[0].upper()}{group[1:]}**\n\n{markdown.table(table)}"


def _spread(value: float, by_round: Sequence[float]) -> str:
    low, high = min(by_round), max(by_round)
    return f"{value:.3f}" + (f" ({low:.3f} to {high:.3f})" if len(by_round) > 1 else " (one round)")


def _turn_table(outcome: Outcome, *, is_long: bool) -> str:
    numbers = range(1, outcome.workload.turns + 1)
    table = [("variant", "n a turn", *(f"turn {number}" for number in numbers))]
    for name in outcome.variants:
        found = by_turn(outcome.turns, name, is_long=is_long)
        if found:
            count = max(map(len, found.values()))
            cells = (f"{median(found[n]):.3f}" if n in found else "" for n in numbers)
            table.append((name, str(count), *cells))
    if len(table) == 1:
        return ""
    kind = f"at least {LONG_TOKENS:,} tokens" if is_long else "fewer"
    half = (outcome.workload.turns + 1) // 2
    return (
        f"Median seconds; conversations whose first prompt has {kind}. "
        f"`-disk` variants restart after turn {half}.\n\n{markdown.table(table)}"
    )


def _answers(outcome: Outcome) -> str:
    counts = differing_tokens(outcome.turns)
    lines = [f"- {name}: {other} of {count} tokens" for name, (other, count) in counts.items()]
    first = outcome.variants[0] if outcome.variants else BASELINE
    return f"Answer tokens that differ from those of `{first}`:\n\n" + "\n".join(lines)


def _counters(outcome: Outcome) -> str:
    lines = []
    for name, found in outcome.counters.items():
        if found:
            text = ", ".join(f"`{key}` {value:,.0f}" for key, value in sorted(found.items()))
            lines.append(f"- {name}: {text}")
    return "At the end of the last engine of each variant:\n\n" + "\n".join(lines) if lines else ""


def _configuration(outcome: Outcome) -> str:
    lines = [f"- `{name}`: {VARIANTS[name].what}" for name in outcome.variants]
    text = json.dumps(outcome.configuration, indent=1, sort_keys=True)
    return "\n".join(lines) + f"\n\n```json\n{text}\n```"


_LIMITS = """\
- One conversation at a time: TTFT without queueing, and nothing of throughput under load.
- A CPU: computing is slow here and a copy is a memcpy. On a GPU both are tens of times faster, each
  by a factor of its own: these ratios do not carry over.
- Random weights: the answers are noise, if the same noise. Conversations share nothing.
- The engine core is in the client's process: no hop between processes is in a TTFT.
- Peers run at the settings given here, the best of those tried: LMCache with chunks of 64 tokens
  (its default is 256), `lmcache_driven` copies through shared memory, O_DIRECT; vLLM's host tier
  with the CPU worker of `bench/engine_runs/cpu_tiering.py`, as its own refuses CPUs.
- Between the two engines of a variant that restarts, its files are synced and dropped from the page
  cache.
- ExampleConnector finds whole prompts only, so a conversation that has grown never hits."""


def _limits_of_this(outcome: Outcome) -> str:
    few = (
        "\n- Fewer than three rounds: what is in brackets is no spread."
        if outcome.rounds < 3
        else ""
    )
    return _LIMITS + few
