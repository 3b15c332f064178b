"""How fast are keys made, what memory does a page's index entry take, what does evicting cost?

    python -m bench.keys                appends its rows to results/keys.jsonl
    python -m bench.keys --smoke        small sizes, no rows

Asked for: 10 M tokens/s at 64-token pages on one core, 250 bytes a page and an eviction with a p99
under 100 us at a million pages. The index is measured in processes of its own, filled with
conversations of 16 pages, 64 of which share their first two, in three tiers.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import rows
from tiered_kv.index import Index, TierIndex
from tiered_kv.keys import Namespace, PageKey, as_token_array, page_keys

PAGE_TOKENS = 64
_CHAIN = 16  # pages of a conversation
_SHARED = 2  # of them, pages it has in common with 63 others
_FANOUT = 64
_RESIDENCE = {  # one page in how many is in each tier
    "disk": {"hbm": 100, "host": 10, "disk": 1},
    "host_and_disk": {"hbm": 100, "host": 1, "disk": 1},
}
_BATCHES = (1, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, append."""
    options = _parser().parse_args(arguments)
    if options.child:
        print(json.dumps(measure_index(*json.loads(options.child))))
        return 0
    log = rows.Log()
    tokens_per_s(log, 1 << 14 if options.smoke else 1 << 20, 3 if options.smoke else 15)
    for pages in (2_000,) if options.smoke else (100_000, 1_000_000):
        index(log, pages, in_process=options.smoke, repeats=1 if options.smoke else 3)
    for made in log.measured:
        case = " ".join(f"{key}={value}" for key, value in made.params.items())
        spread = f"p20 {made.quantile(0.2):,.5g}, p80 {made.quantile(0.8):,.5g}"
        print(f"{made.metric:18} {made.p50:14,.5g} {made.unit:8} {case} ({spread})")
    path = options.rows or (None if options.smoke else rows.RESULTS / "keys.jsonl")
    if path:
        rows.append(path, log.measured, rows.origin())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.keys", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="small sizes")
    parser.add_argument("--rows", type=Path, help="append rows to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


# -- keys ----------------------------------------------------------------------------------------


def tokens_per_s(log: rows.Log, tokens: int, repeats: int) -> None:
    """Whole calls of `page_keys`, and of the conversion in it, for every kind of token ids."""
    import torch  # here, so that the processes that measure the index do not hold it

    ids = np.random.default_rng(0).integers(0, 150_000, tokens)
    kinds: dict[str, Any] = {
        "list": ids.tolist(),
        "numpy_int64": ids,
        "numpy_int32": ids.astype(np.int32),
        "torch_int64": torch.from_numpy(ids.copy()),
        "torch_int32": torch.from_numpy(ids.astype(np.int32)),
    }
    namespace = Namespace("model", "layout")
    whole: dict[str, list[float]] = {kind: [] for kind in kinds}
    converting: dict[str, list[float]] = {kind: [] for kind in kinds}
    hashing: list[float] = []
    raw = ids.astype("<u4").tobytes()
    for _ in range(repeats):
        for kind, given in kinds.items():
            whole[kind].append(_seconds(partial(page_keys, given, PAGE_TOKENS, namespace)))
            converting[kind].append(_seconds(partial(as_token_array, given)))
        hashing.append(_seconds(partial(_hash_chain, raw)))
    params = {"page_tokens": PAGE_TOKENS, "tokens": tokens, "load_average": rows.load_average()}
    for kind in kinds:
        rates = [tokens / seconds for seconds in whole[kind]]
        log.add("keys", "tokens_per_s", "tokens/s", rates, ids=kind, **params)
        log.add("keys", "conversion_s", "s", converting[kind], ids=kind, **params)
    rates = [tokens / seconds for seconds in hashing]
    log.add("keys", "sha256_tokens_per_s", "tokens/s", rates, ids="bytes", **params)


def _hash_chain(data: bytes) -> None:
    """The baseline: the hashes alone, kept nowhere."""
    parent, width, sha256 = bytes(32), PAGE_TOKENS * 4, hashlib.sha256
    for offset in range(0, len(data), width):
        parent = sha256(parent + data[offset : offset + width]).digest()


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# -- index ---------------------------------------------------------------------------------------


def index(log: rows.Log, pages: int, *, in_process: bool, repeats: int) -> None:
    """Memory a page and time an eviction, for each way of spreading pages over tiers."""
    for spread in _RESIDENCE:
        answers = [_ask(pages, spread, in_process) for _ in range(repeats)]
        params = {"pages": pages, "in_tiers": spread, "load_average": rows.load_average()}
        for metric in ("bytes_per_page", "key_bytes_per_page"):
            log.add("index", metric, "B", [answer[metric] for answer in answers], **params)
        for batch in _BATCHES:
            for percent in (50, 99):
                taken = [answer[f"evict_{batch}_p{percent}_s"] for answer in answers]
                metric = f"evict_p{percent}_s_per_page"
                log.add("index", metric, "s", taken, batch=batch, **params)


def _ask(pages: int, spread: str, in_process: bool) -> dict[str, float]:
    if in_process:
        return measure_index(pages, spread)
    command = [sys.executable, "-m", "bench.keys", "--child", json.dumps([pages, spread])]
    root = rows.RESULTS.parent.parent
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root)
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def measure_index(pages: int, spread: str) -> dict[str, float]:
    """Fill an index and empty it by one for one; RSS before and after, and the time of evictions.

    The keys, 65 bytes each and held nowhere else, are counted in the first and told in the second.
    """
    gc.collect()
    before = _rss_bytes()
    filled = Index(("hbm", "host", "disk"))
    leaves = fill(filled, pages, _RESIDENCE[spread])
    gc.collect()
    total = _rss_bytes() - before
    answer = {"bytes_per_page": total / pages, "key_bytes_per_page": _key_bytes(filled)}
    for batch in _BATCHES:
        taken = sorted(evictions(filled, leaves, min(pages // 4, 20_000) // batch, batch))
        for percent in (50, 99):
            at = min(len(taken) - 1, len(taken) * percent // 100)
            answer[f"evict_{batch}_p{percent}_s"] = taken[at] / batch
    return answer


def fill(filled: Index, pages: int, spread: dict[str, int]) -> list[int]:
    """Conversations until the index has this many pages; the last page of each."""
    leaves: list[int] = []
    shared: list[int] = []
    while len(filled) < pages:
        if len(leaves) % _FANOUT == 0:
            shared = _grow(filled, -1, _SHARED, spread)
        leaves.append(_grow(filled, shared[-1], _CHAIN - _SHARED, spread)[-1])
    return leaves


def _grow(filled: Index, parent: int, count: int, spread: dict[str, int]) -> list[int]:
    added = filled.add([PageKey(os.urandom(32)) for _ in range(count)], parent)
    filled.touch(added)
    for tier in filled.tiers:
        here = [page for page in added if page // _CHAIN % spread[tier.name] == 0]
        for page in here:  # all are on their way before the first arrives, as in a store
            filled.begin(tier, page, page)
        for page in here:
            filled.finish(tier, page)
    return added


def evictions(filled: Index, leaves: list[int], rounds: int, batch: int) -> Iterator[float]:
    """Use a random conversation, then time one eviction from host, refilled out of the clock."""
    source, host = random.Random(0), filled.by_name["host"]
    for _ in range(rounds):
        filled.touch(_path(filled, source.choice(leaves)))
        started = time.perf_counter()
        victims = filled.victims(host, batch)
        slots = [filled.evict(host, page) for page in victims]
        yield time.perf_counter() - started
        _put_back(filled, host, victims, slots)


def _path(filled: Index, page: int) -> list[int]:
    path = []
    while page >= 0:
        path.append(page)
        page = filled.parent_of[page]
    return path[::-1]


def _put_back(filled: Index, tier: TierIndex, pages: list[int], slots: list[int]) -> None:
    """The same pages come again, as the most recently used: parents were evicted last."""
    for page, slot in zip(reversed(pages), reversed(slots), strict=True):
        filled.begin(tier, page, slot)
        filled.finish(tier, page)
    filled.touch(pages[::-1])


def _key_bytes(filled: Index) -> float:
    return sys.getsizeof(filled.key(0))


def _rss_bytes() -> int:
    resident = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(resident) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
