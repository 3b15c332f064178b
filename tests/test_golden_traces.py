"""Golden numbers: what leaf-first LRU and FIFO hit on two published traces, to the last page.

One tier, page prefix hits of all page references; three independent programs agree on these
integers. The order within a request is part of them: its own resident pages are marked first, the
deepest as oldest, and only then are the others inserted. A replay that evicts before it marks gives
other numbers.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from tiered_kv.keys import KeyChain, PageKey
from tiered_kv.planner import Planner
from tiered_kv.slots import SlotPool

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
CLAUDE_CODE = "claude_code_28sessions_c8_blk512.jsonl"
MOONCAKE = "mooncake_conversation_trace.jsonl"


@cache
def requests(name: str) -> list[list[int]]:
    path = TRACES / name
    if not path.is_file():
        pytest.skip(f"the trace {path} is not here")
    with path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def replay(trace: list[list[int]], capacity_pages: int, policy: str) -> tuple[int, int]:
    """(pages that hit, pages asked for) over a trace, host alone."""
    slots = SlotPool(capacity_pages)
    planner = Planner({"host": slots}, {"host": capacity_pages}, policy=policy)
    hits = asked = 0
    for ids in trace:
        keys = KeyChain([PageKey(block.to_bytes(32, "little")) for block in ids])
        found = len(planner.carry_out(planner.plan_prefetch(keys)).pages)
        hits += found
        asked += len(ids)
        if found < len(ids):
            rest = keys[found:]
            planner.carry_out(planner.plan_put(rest, range(len(rest))))
    assert planner.index.check(lambda: True) == []
    assert planner.index.by_name["host"].resident == slots.used <= capacity_pages
    return hits, asked


@pytest.mark.parametrize(
    ("trace", "capacity_pages", "policy", "hits", "asked"),
    [
        (CLAUDE_CODE, 276, "lru", 144_826, 308_192),  # 46.99 %
        (CLAUDE_CODE, 276, "fifo", 144_826, 308_192),
        (CLAUDE_CODE, 1_382, "lru", 284_036, 308_192),  # 92.16 %
        (CLAUDE_CODE, 1_382, "fifo", 284_036, 308_192),
        (MOONCAKE, 9_140, "lru", 56_483, 288_500),  # 19.58 %
        (MOONCAKE, 9_140, "fifo", 56_471, 288_500),
        (MOONCAKE, 36_558, "lru", 99_632, 288_500),  # 34.53 %
        (MOONCAKE, 36_558, "fifo", 99_652, 288_500),
    ],
)
def test_a_trace_hits_exactly_the_golden_number_of_pages(
    trace: str, capacity_pages: int, policy: str, hits: int, asked: int
) -> None:
    assert replay(requests(trace), capacity_pages, policy) == (hits, asked)


def test_a_tier_that_holds_everything_hits_every_page_but_its_first_use() -> None:
    trace = requests(CLAUDE_CODE)[:300]
    unique = len({block for ids in trace for block in ids})
    asked = sum(len(ids) for ids in trace)
    assert replay(trace, unique, "lru") == (asked - unique, asked)
