"""`bench.foreground` at smoke size: that it runs, keeps what it moves, and says every case."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from bench import foreground


def test_every_foreground_is_measured_beside_everything(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert foreground.main(["--smoke", "--rows", str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {(row["metric"], row["params"]["foreground"], row["params"]["beside"]) for row in rows}
    for name in ("matmul", "tanh"):
        assert ("iterations_per_s", name, "alone") in found
        for size in foreground.PAGE_BYTES:
            for beside in (f"offload-{size}", f"memcpy-{size}"):
                assert ("iterations_per_s", name, beside) in found
                assert ("ratio_to_alone", name, beside) in found
            assert ("ratio_to_memcpy", name, f"offload-{size}") in found
    assert len(rows) == len(found) == 22
    moved = [row for row in rows if row["metric"] == "iterations_per_s"]
    assert all(
        (row["params"]["bytes_per_s"] > 0) == (row["params"]["beside"] != "alone") for row in moved
    )
    assert not [one for one in threading.enumerate() if one.name == "bench-background"]


def test_what_the_background_thread_raises_ends_the_measurement() -> None:
    class Broken:
        step_bytes = 1

        def step(self) -> None:
            raise RuntimeError("no such page")

        def check(self) -> None: ...

        def close(self) -> None: ...

    paced = foreground.Paced(Broken(), 1e9)
    with pytest.raises(RuntimeError, match="no such page"), paced.running():
        pass


def test_offload_compares_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a store that brings pages into other slots than asked for, the check fails."""
    work = foreground.Offload(1 << 18, 64 << 10)
    try:
        work.step()
        work.check()
        get = work._store.get
        monkeypatch.setattr(
            work._store, "get", lambda keys, into: get(keys, into=[into[-1], *into[:-1]])
        )
        with pytest.raises(AssertionError, match="pages came back wrong"):
            work.check()
    finally:
        work.close()
