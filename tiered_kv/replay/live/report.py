"""What a live replay found, as one object: for the tables, for `--json`, and for the exit code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiered_kv.replay.live.counters import CounterChange
from tiered_kv.replay.live.record import LiveRecord
from tiered_kv.replay.live.statistics import Distribution

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of some requests that were answered.

    Attributes:
        prompt: of their prompts.
        cached: of these, not computed by the engine; None where it does not say.
        repeated: of these, said before in the round; None for prompts in text.
        completion: of their answers.
    """

    prompt: int
    cached: int | None
    repeated: int | None
    completion: int

    @classmethod
    def of(cls, records: Iterable[LiveRecord]) -> Tokens:
        """Their sums."""
        done = [record for record in records if record.is_done]
        return cls(
            prompt=sum(record.prompt_tokens or 0 for record in done),
            cached=_sum_or_none(record.cached_tokens for record in done),
            repeated=_sum_or_none(record.repeated_tokens for record in done),
            completion=sum(record.completion_tokens for record in done),
        )

    @property
    def cached_share(self) -> float | None:
        """Cached over prompt tokens; None where the engine does not say."""
        return None if self.cached is None or not self.prompt else self.cached / self.prompt

    def as_json(self) -> dict[str, Any]:
        """The sums as JSON values."""
        share = self.cached_share
        return {
            "prompt_tokens": self.prompt,
            "cached_tokens": self.cached,
            "repeated_tokens": self.repeated,
            "completion_tokens": self.completion,
            "cached_share": None if share is None else round(share, 4),
        }


def _sum_or_none(values: Iterable[int | None]) -> int | None:
    found = [value for value in values if value is not None]
    return sum(found) if found else None


@dataclass(frozen=True, slots=True)
class Times:
    """How long some requests took; only those answered in full count."""

    ttft_s: Distribution
    tpot_s: Distribution
    latency_s: Distribution

    @classmethod
    def of(cls, records: Iterable[LiveRecord]) -> Times:
        """Their distributions."""
        done = [record for record in records if record.is_done]
        return cls(
            ttft_s=Distribution.of(record.ttft_s for record in done),
            tpot_s=Distribution.of(record.tpot_s for record in done),
            latency_s=Distribution.of(record.latency_s for record in done),
        )

    def as_json(self) -> dict[str, Any]:
        """The distributions as JSON values."""
        return {
            "ttft_s": self.ttft_s.as_json(),
            "tpot_s": self.tpot_s.as_json(),
            "latency_s": self.latency_s.as_json(),
        }


@dataclass(frozen=True, slots=True)
class Round:
    """One pass over all conversations.

    Attributes:
        records: every request that was sent and ended, in order of its end.
        planned: how many there were to send.
        wall_s: from the first to the last.
        in_flight_max: most requests in flight at once.
        counted: what the engine counted meanwhile; None where it shows no counters.
        interrupted: it was ended by Ctrl-C.
        is_gone: it was ended because the engine could no longer be reached.
    """

    records: Sequence[LiveRecord]
    planned: int
    wall_s: float
    in_flight_max: int = 0
    counted: CounterChange | None = None
    interrupted: bool = False
    is_gone: bool = False

    @property
    def done(self) -> list[LiveRecord]:
        """The requests that were answered in full."""
        return [record for record in self.records if record.is_done]

    @property
    def failures(self) -> Counter[str]:
        """How many failed, by reason."""
        return Counter(record.failure for record in self.records if record.failure is not None)

    @property
    def returning(self) -> list[LiveRecord]:
        """Answered requests of conversations that had been here before; empty if not known."""
        return [record for record in self.done if record.turn]

    @property
    def by_turn(self) -> dict[int, list[LiveRecord]]:
        """Requests by turn, from 0; empty for a trace that does not say turns."""
        turns: dict[int, list[LiveRecord]] = {}
        for record in self.records:
            if record.turn is not None:
                turns.setdefault(record.turn, []).append(record)
        return dict(sorted(turns.items()))

    @property
    def halves(self) -> tuple[Tokens, Tokens]:
        """Tokens of the half that was sent first and of the rest: a cold start is in the first."""
        ordered = sorted(self.done, key=lambda record: record.position)
        middle = (len(ordered) + 1) // 2
        return Tokens.of(ordered[:middle]), Tokens.of(ordered[middle:])

    def as_json(self) -> dict[str, Any]:
        """The round as JSON values."""
        tokens, wall_s = Tokens.of(self.records), max(self.wall_s, 1e-9)
        first, second = self.halves
        failed = len(self.records) - len(self.done)
        return {
            "interrupted": self.interrupted,
            "engine_gone": self.is_gone,
            "wall_s": round(self.wall_s, 3),
            "requests": {
                "planned": self.planned,
                "done": len(self.done),
                "failed": failed,
                "unfinished": self.planned - len(self.records),
            },
            "failures": dict(self.failures),
            **tokens.as_json(),
            "cached_share_halves": [
                first.as_json()["cached_share"],
                second.as_json()["cached_share"],
            ],
            "throughput": {
                "requests_per_s": round(len(self.done) / wall_s, 3),
                "prompt_tokens_per_s": round(tokens.prompt / wall_s, 1),
                "completion_tokens_per_s": round(tokens.completion / wall_s, 1),
            },
            "in_flight_max": self.in_flight_max,
            "waited_s": Distribution.of(record.waited_s for record in self.records).as_json(),
            **Times.of(self.records).as_json(),
            "returning": Times.of(self.returning).as_json(),
            "by_turn": [_turn_json(turn, found) for turn, found in self.by_turn.items()],
            "engine_counters": None if self.counted is None else self.counted.as_json(),
        }


def _turn_json(turn: int, records: Sequence[LiveRecord]) -> dict[str, Any]:
    return {
        "turn": turn,
        "done": sum(record.is_done for record in records),
        "failed": sum(not record.is_done for record in records),
        **Tokens.of(records).as_json(),
        **Times.of(records).as_json(),
    }


@dataclass(frozen=True, slots=True)
class LiveReport:
    """A whole live replay.

    Attributes:
        engine: as in `--engine`.
        rounds: at least one.
        facts: what is known of the engine.
        source: what was replayed.
        settings: as they were told.
        host: the machine this ran on.
        run_id: starts the ids of all requests.
        is_stopped: Ctrl-C ended it between two rounds.
    """

    engine: str
    rounds: Sequence[Round]
    facts: Mapping[str, Any]
    source: Mapping[str, Any]
    settings: Mapping[str, Any]
    run_id: str
    host: Mapping[str, Any] = field(default_factory=dict)
    is_stopped: bool = False

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it."""
        return self.is_stopped or any(one.interrupted for one in self.rounds)

    @property
    def is_passed(self) -> bool:
        """Whether every request that was sent was answered in full, and the engine stayed."""
        return not any(one.failures or one.is_gone for one in self.rounds)

    @property
    def says_cached_tokens(self) -> bool:
        """Whether the engine said of any request how much of its prompt it had cached."""
        return any(record.cached_tokens is not None for one in self.rounds for record in one.done)

    @property
    def answers(self) -> tuple[int, int] | None:
        """(compared, differing): answers of later rounds against the first; None with one round.

        A conversation is compared up to its first difference or failure, because the prompts
        behind it differ too.
        """
        if len(self.rounds) < 2:
            return None
        compared = differing = 0
        first = _digests(self.rounds[0])
        for later in self.rounds[1:]:
            for talk, digests in _digests(later).items():
                for index, digest in digests.items():
                    if index not in first.get(talk, {}):
                        break
                    compared += 1
                    if digest != first[talk][index]:
                        differing += 1
                        break
        return compared, differing

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        answers = self.answers
        return {
            "schema_version": SCHEMA_VERSION,
            "engine": self.engine,
            "run": self.run_id,
            "settings": dict(self.settings),
            "host": dict(self.host),
            "server": {**self.facts, "says_cached_tokens": self.says_cached_tokens},
            "input": dict(self.source),
            "interrupted": self.interrupted,
            "answers_compared": None if answers is None else answers[0],
            "answers_differing": None if answers is None else answers[1],
            "rounds": [one.as_json() for one in self.rounds],
            "turns": [record.as_json() for one in self.rounds for record in one.records],
        }


def _digests(one: Round) -> dict[tuple[int | None, int], dict[int, str | None]]:
    """Answers by conversation and place in the input, in order; up to the first that failed."""
    found: dict[tuple[int | None, int], dict[int, str | None]] = {}
    failed: set[int | None] = set()
    for record in sorted(one.records, key=lambda record: record.index):
        talk = (record.session, record.index if record.session is None else 0)
        if not record.is_done:
            failed.add(record.session)
        elif record.session is None or record.session not in failed:
            found.setdefault(talk, {})[record.index] = record.reply_digest
    return found
