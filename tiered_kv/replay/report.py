"""What a replay found, as one object: for the table, for `--json`, and for the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tiered_kv.replay.requests import TIERS, Outcome, Request

SCHEMA_VERSION = 1
LONG_REUSE_TOKENS = 2000
INDEX_BYTES_A_PAGE = 250


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One request and what became of it, in numbers."""

    position: int
    session: int | None
    turn: int | None
    arrival_s: float
    prompt_tokens: int
    reused_tokens: Mapping[str, int]
    ttft_store_s: float
    ttft_recompute_s: float
    outputs_equal: bool
    logit_difference: float | None = None

    @classmethod
    def of(cls, position: int, request: Request, outcome: Outcome) -> TurnRecord:
        """The record of a request served."""
        return cls(
            position=position,
            session=request.session,
            turn=request.turn,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            reused_tokens=dict(outcome.reused_tokens),
            ttft_store_s=outcome.ttft_store_s,
            ttft_recompute_s=outcome.ttft_recompute_s,
            outputs_equal=outcome.outputs_equal,
            logit_difference=outcome.logit_difference,
        )

    @property
    def reused(self) -> int:
        """Prompt tokens that came back from any tier."""
        return sum(self.reused_tokens.values())

    @property
    def is_returning(self) -> bool:
        """Whether its conversation was here before; where not known, whether it reused any."""
        return self.turn > 0 if self.turn is not None else self.reused > 0

    @property
    def ttft_ratio(self) -> float:
        """Time to first token with the store over that of recomputing."""
        return self.ttft_store_s / self.ttft_recompute_s

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return {
            "position": self.position,
            "session": self.session,
            "turn": self.turn,
            "arrival_s": round(self.arrival_s, 3),
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": {tier: self.reused_tokens.get(tier, 0) for tier in TIERS},
            "ttft_store_s": round(self.ttft_store_s, 6),
            "ttft_recompute_s": round(self.ttft_recompute_s, 6),
            "outputs_equal": self.outputs_equal,
            "logit_difference": self.logit_difference,
        }


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory at its highest against what was allowed.

    Attributes:
        peak_bytes: see `measure`; None where it could not be had.
        budget_bytes: hbm + host, 5 %, and 250 bytes for every page that a tier holds.
        measure: "process_rss": growth of this process's resident set since before the store was
            opened; "store": bytes the tiers in memory had in use plus 250 a page, where a model's
            own memory would drown the store's.
    """

    peak_bytes: int | None
    budget_bytes: int
    measure: str


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A whole replay; counters are the store's, from its opening on."""

    engine: str
    turns: Sequence[TurnRecord]
    bytes_read: Mapping[str, int]
    bytes_written: Mapping[str, int]
    checksums_verified: int
    checksums_failed: int
    why_miss: Mapping[str, int]
    memory: MemoryUse
    requests_planned: int
    wall_s: float
    interrupted: bool = False
    pages_compared: int = 0
    pages_wrong: int = 0
    failed_writes: int = 0
    decided_tokens: Mapping[str, int] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outputs_equal(self) -> bool:
        """Whether every answer was the one that recomputing gives."""
        return all(turn.outputs_equal for turn in self.turns)

    @property
    def hit_tokens(self) -> dict[str, int]:
        """Prompt tokens that came back, by tier."""
        return {tier: sum(turn.reused_tokens.get(tier, 0) for turn in self.turns) for tier in TIERS}

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def ttft_ratio_median(self) -> float | None:
        """Median ratio of times to first token over returning turns; None without any."""
        return _median(turn.ttft_ratio for turn in self.turns if turn.is_returning)

    @property
    def ttft_ratio_median_long(self) -> float | None:
        """The same over returning turns that reused at least 2,000 tokens."""
        return _median(
            turn.ttft_ratio
            for turn in self.turns
            if turn.is_returning and turn.reused >= LONG_REUSE_TOKENS
        )

    @property
    def is_as_decided(self) -> bool:
        """Whether the hits are those decided without bytes; true if not compared."""
        return self.decided_tokens is None or dict(self.decided_tokens) == self.hit_tokens

    @property
    def is_passed(self) -> bool:
        """Whether nothing was wrong: outputs equal, no checksum failed, decisions as predicted."""
        return (
            self.outputs_equal
            and not self.checksums_failed
            and not self.pages_wrong
            and self.is_as_decided
        )

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        differences = [t.logit_difference for t in self.turns if t.logit_difference is not None]
        return {
            "schema_version": SCHEMA_VERSION,
            "engine": self.engine,
            "settings": dict(self.settings),
            "interrupted": self.interrupted,
            "requests": {"planned": self.requests_planned, "done": len(self.turns)},
            "outputs_equal": self.outputs_equal,
            "logit_difference_max": max(differences) if differences else None,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_tokens_decided": None
            if self.decided_tokens is None
            else dict(self.decided_tokens),
            "ttft_ratio_median": self.ttft_ratio_median,
            "ttft_ratio_median_2000_tokens": self.ttft_ratio_median_long,
            "checksums": {"verified": self.checksums_verified, "failed": self.checksums_failed},
            "pages_compared": {"verified": self.pages_compared, "wrong": self.pages_wrong},
            "bytes_read": _by_tier(self.bytes_read),
            "bytes_written": _by_tier(self.bytes_written),
            "peak_bytes": self.memory.peak_bytes,
            "budget_bytes": self.memory.budget_bytes,
            "peak_measure": self.memory.measure,
            "failed_writes": self.failed_writes,
            "why_miss": dict(self.why_miss),
            "wall_s": round(self.wall_s, 3),
            "turns": [turn.as_json() for turn in self.turns],
        }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def _by_tier(counts: Mapping[str, int]) -> dict[str, int]:
    return {tier: counts.get(tier, 0) for tier in TIERS}


def budget_bytes(hbm_bytes: int, host_bytes: int, pages: int) -> int:
    """What a store of these sizes may take in memory while its tiers hold so many pages."""
    return int((hbm_bytes + host_bytes) * 1.05) + INDEX_BYTES_A_PAGE * pages
