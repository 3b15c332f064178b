"""The report of `bench.peers`, in Markdown: machine, commands, tables, configuration, limits."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Sequence

from bench import markdown
from bench.peers.catalogue import PEERS, RAW
from bench.peers.pages import DISK_SETS, LOOKUP_KEYS, WARM_UP_ROUNDS
from bench.peers.results import SYNCED, Outcome, peers_ahead, verdicts
from bench.rows import Measurement, Origin, size_text

_TITLES = {
    "put": "Put: accepted by the memory tier",
    "get_host": "Host get: from the memory tier to the caller",
    SYNCED: "Durable put: from host memory to disk, synced",
    "put_durable": "Put to disk by a peer's own account, synced or not",
    "get_cold": "Cold get: from disk to the caller",
    "lookup_present": "Lookup of keys that are there",
    "lookup_absent": "Lookup of keys that are not",
}
_LIMITS = {
    "put": "one-thread memcpy",
    "get_host": "one-thread memcpy",
    SYNCED: "O_DIRECT writes and fdatasync",
    "put_durable": "O_DIRECT writes and fdatasync",
    "get_cold": "O_DIRECT reads",
}


def render(outcome: Outcome, where: Origin, command: Sequence[str]) -> str:
    """The whole report."""
    parts = [
        "# tiered-kv beside its peers",
        f"Written by `python -m bench.peers`. {where.timestamp}, commit {where.commit}.",
        _headline(outcome),
        "## Where and how",
        _facts(outcome, where, command),
        "## Who is compared",
        _peers(outcome),
        "## What did not run",
        _failures(outcome),
        "## Rates",
        _HOW_TO_READ,
        *_tables(outcome),
        "## Configuration",
        _configuration(outcome),
        "## What this does not show",
        _NOT_SHOWN,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(outcome: Outcome) -> str:
    goals = [f"- {verdict}" for verdict in verdicts(outcome)]
    ahead = [f"- {line}" for line in peers_ahead(outcome)] or ["- nowhere in this run"]
    return "\n".join(
        ["Goals:", "", *goals, "", "Where a peer is ahead of both our faces:", "", *ahead]
    )


def _facts(outcome: Outcome, where: Origin, command: Sequence[str]) -> str:
    sizes = ", ".join(size_text(size) for size in outcome.page_bytes)
    cached = max(outcome.cached_bytes.values(), default=0)
    facts = {
        "machine": f"{where.host}; {platform.release()}; gpu: none is used",
        "load average": "{:.2f} before, {:.2f} after".format(*outcome.load_average),
        "took": f"{outcome.wall_s / 60:.1f} min",
        "command": f"`{shlex.join(command)}`, environments by `make bench-peers`",
        "pages": f"random bytes, {size_text(outcome.set_bytes)} a round in pages of {sizes}, other "
        "bytes in every round",
        "rounds": f"{outcome.rounds}, and {WARM_UP_ROUNDS} before them to warm up; within a round "
        "one operation of one peer after the other, in an order that shifts from round to round",
        "verified": f"{outcome.verified_pages:,} pages read back, each compared by xxh3-128 "
        "outside the timed part, none wrong",
        "cold": _cold(outcome, cached),
    }
    return "\n".join(f"- **{name}**: {text}" for name, text in facts.items())


def _cold(outcome: Outcome, cached: int) -> str:
    if not outcome.is_cold:
        return "not proven: files stay in memory in the directory of this run"
    return (
        "before each cold get the memory tier is emptied, the files are synced and dropped from "
        f"the page cache (`posix_fadvise`), and `mincore` counts what is left: {size_text(cached)} "
        "of a peer's files at most (a catalog that is mapped)"
    )


def _peers(outcome: Outcome) -> str:
    table = [("name", "what", "version", "before it says stored", "does not do", "its lookup")]
    for name in outcome.peers:
        peer = PEERS[name]
        found = outcome.facts.get(name, {}).get("versions", {})
        versions = ", ".join(f"{package} {version}" for package, version in found.items())
        cells = (peer.what, versions or "-", peer.durable, peer.lacks, peer.lookup or "-")
        table.append((f"`{name}`", *cells))
    return markdown.table(table)


def _failures(outcome: Outcome) -> str:
    return "\n".join(f"- `{name}`: {why}" for name, why in outcome.failed.items()) or "All ran."


_HOW_TO_READ = f"""\
Median of the rounds, and 20th to 80th percentile. *of the limit*: ratio of medians to the machine
alone (`{RAW}`). *of the best peer*: ratio of medians to the fastest that is not ours. *CPU s/GB*:
of the process that was asked, all its threads. A dash: it has no such operation, or none that runs
on a CPU. Lookups are of {LOOKUP_KEYS:,} keys, in one call where there is a call for many; one
that answers for a prefix ends at the first key that is not there, so absent keys cost it a call
each, and no goal is judged by that."""


def _tables(outcome: Outcome) -> list[str]:
    made = []
    for page_bytes in outcome.page_bytes:
        for operation, title in _TITLES.items():
            table = _table(outcome, page_bytes, operation)
            if table:
                made.append(f"### {title}, {size_text(page_bytes)} pages\n\n{table}")
    return made


def _table(outcome: Outcome, page_bytes: int, operation: str) -> str:
    is_lookup = operation.startswith("lookup")
    limit, best = outcome.device(page_bytes, operation), outcome.best_peer(page_bytes, operation)
    scale, unit = (1e6, "M keys/s") if is_lookup else (1e9, "GB/s")
    limited = "" if is_lookup else f"of the limit ({_LIMITS[operation]})"
    head = ("store", unit, "p20 to p80", limited, "of the best peer", "CPU s/GB", "durable", "n")
    lines = []
    for name in outcome.peers:
        rates = outcome.rates(name, page_bytes, operation)
        if not rates:
            continue
        one = Measurement(name, operation, unit, {}, tuple(rates))
        cells = (
            f"`{name}`",
            f"{one.p50 / scale:.2f}",
            f"{one.quantile(0.2) / scale:.2f} to {one.quantile(0.8) / scale:.2f}",
            f"{one.p50 / limit:.2f}" if limit else "-",
            f"{one.p50 / best[1]:.2f}" if best else "-",
            f"{outcome.cpu_s_per_gb(name, page_bytes, operation):.2f}",
            _durable(name, operation),
            str(len(rates)),
        )
        lines.append((one.p50, cells))
    if not lines:
        return ""
    lines.sort(key=lambda line: -line[0])
    kept = [at for at, title in enumerate(head) if _is_shown(title, operation)]
    table = [head, *(cells for _, cells in lines)]
    return markdown.table([[line[at] for at in kept] for line in table])


def _is_shown(title: str, operation: str) -> bool:
    if title == "durable":
        return operation in (SYNCED, "put_durable")
    if title == "CPU s/GB":
        return not operation.startswith("lookup")
    return bool(title)


def _durable(name: str, operation: str) -> str:
    peer = PEERS[name]
    if operation == SYNCED and not peer.is_durable:
        return "one syncfs after it"
    return peer.durable


def _configuration(outcome: Outcome) -> str:
    found = {
        name: facts.get("configuration", {})
        for name, facts in outcome.facts.items()
        if name in outcome.peers
    }
    text = json.dumps(found, indent=1, sort_keys=True)
    return f"At the last page size:\n\n```json\n{text}\n```"


_NOT_SHOWN = f"""\
- No engine, no GPU: what a connector, a scheduler or a copy engine adds is not here.
- One caller, whole sets, an otherwise idle store: nothing of mixed loads, of eviction under
  pressure (the others hold one round and are emptied after it; ours take the room of older rounds
  by policy), or of many clients.
- Peers are called where their engines call them, by their own Python classes. Where a peer leaves
  the copy to or from the caller to a GPU kernel, one thread's memcpy does it here (LMCache), or
  there is none to do, as it moves straight between disk and the caller (fs_native, raw_block,
  HiCacheFile, vLLM's fs tier).
- A peer that does not sync is given one syncfs for all its files, the cheapest there is; doing it
  file by file, as safety would ask of it, costs more. Its checksums and recovery are not added.
- `raw` copies a set in one piece. From about 24 MiB on glibc's memcpy bypasses the caches and is
  nearly twice as fast: copies page by page cannot reach it.
- Ours, `raw` and raw_block have room for {DISK_SETS} rounds and write where they have written
  before, in turn; the peers that make a file a page write new space in every round, as they do in
  use. A disk that is told of deleted space takes half as long again for that.
- Mooncake's master and its threads are other processes: their CPU time is not in the table."""
