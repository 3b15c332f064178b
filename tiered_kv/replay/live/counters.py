"""An engine's own counters, in Prometheus' text format: what changed while a round ran."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Counters = dict[str, float]
"""Value by name and labels, such as ``vllm:prefix_cache_hits_total{source="disk"}``."""

_PREFIXES = ("vllm:", "sglang:", "tiered_kv")
_LABELS_LEFT_OUT = {"engine", "model_name", "engine_type", "tp_rank", "pp_rank", "dp_rank"}
_SAMPLE = re.compile(r"^(?P<name>[^\s{]+)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+\S+)?$")
_LABEL = re.compile(r'([^\s,={]+)="((?:[^"\\]|\\.)*)"')
_CACHED_BY_SOURCE = ("vllm:prompt_tokens_cached_by_source_total", "sglang:cached_tokens_total")
_PAIRS = {
    "prefix_cache": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "external_prefix_cache": (
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
    ),
}


def parse_counters(text: str) -> Counters:
    """The counters of vLLM, SGLang and tiered-kv in an exposition, summed over engines and ranks.

    Gauges and histograms are left out, and so is what is not a line of the format.
    """
    found: Counters = {}
    counters: set[str] = set()
    for line in text.splitlines():
        words = line.split()
        if len(words) == 4 and words[:2] == ["#", "TYPE"]:
            if words[3] == "counter":
                counters.add(words[2])
            continue
        for name, value in _sample(line, counters):
            found[name] = found.get(name, 0.0) + value
    return found


def _sample(line: str, counters: set[str]) -> Iterator[tuple[str, float]]:
    match = None if line.startswith("#") else _SAMPLE.match(line)
    if match is None or not match["name"].startswith(_PREFIXES):
        return
    name = match["name"]
    if name not in counters and name.removesuffix("_total") not in counters:
        return
    try:
        value = float(match["value"])
    except ValueError:
        return
    labels = sorted(
        f'{label}="{text}"'
        for label, text in _LABEL.findall(match["labels"] or "")
        if label not in _LABELS_LEFT_OUT
    )
    yield (f"{name}{{{','.join(labels)}}}" if labels else name), value


def _base(name: str) -> str:
    return name.split("{", 1)[0]


@dataclass(frozen=True, slots=True)
class CounterChange:
    """What an engine counted during a round, by everybody who used it.

    Attributes:
        changed: growth of every counter that grew.
        known: names of all counters there were at the end.
        was_reset: a counter fell: the engine was started anew meanwhile, and `changed` is empty.
    """

    changed: Mapping[str, float]
    known: frozenset[str]
    was_reset: bool = False

    @classmethod
    def between(cls, before: Counters | None, after: Counters | None) -> CounterChange | None:
        """The change from `before` to `after`; None if the engine shows no counters."""
        if before is None or after is None:
            return None
        known = frozenset(after)
        if any(after.get(name, 0.0) < value for name, value in before.items()):
            return cls({}, known, was_reset=True)
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        return cls({name: value for name, value in grown.items() if value}, known)

    def pair(self, name: str) -> tuple[int, int] | None:
        """(queries, hits) in tokens of "prefix_cache" or "external_prefix_cache", as vLLM counts.

        None where the engine has no such counters.
        """
        queries, hits = _PAIRS[name]
        if self.was_reset or not any(_base(known) == queries for known in self.known):
            return None
        return self._grown(queries), self._grown(hits)

    @property
    def cached_by_source(self) -> dict[str, int]:
        """Cached prompt tokens by where they were, in the engine's own words; empty if untold."""
        found: dict[str, int] = {}
        for name, value in self.changed.items():
            if _base(name) in _CACHED_BY_SOURCE:
                for label, source in _LABEL.findall(name):
                    if label in ("source", "cache_source"):
                        found[source] = found.get(source, 0) + int(value)
        return found

    def _grown(self, base: str) -> int:
        return int(sum(value for name, value in self.changed.items() if _base(name) == base))

    def as_json(self) -> dict[str, Any]:
        """The change as JSON values."""
        pairs = {name: self.pair(name) for name in _PAIRS}
        return {
            "was_reset": self.was_reset,
            **{
                name: None if pair is None else {"queries": pair[0], "hits": pair[1]}
                for name, pair in pairs.items()
            },
            "cached_by_source": self.cached_by_source,
            "counters": dict(sorted(self.changed.items())),
        }
