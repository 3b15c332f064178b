"""`bench.engines` with real engines, at its smoke size: that they play, and play the same."""

from __future__ import annotations

import json
from pathlib import Path

from bench import engines


def test_long_histories_are_reused_after_a_restart_with_equal_answers(tmp_path: Path) -> None:
    arguments = ["--smoke", "--dir", str(tmp_path), "--models", str(tmp_path / "models")]
    arguments += ["--rows", str(tmp_path / "r.jsonl"), "--variants"]
    assert engines.main([*arguments, "none", "tiered-kv-disk"]) == 0
    reused = {}
    for line in (tmp_path / "r.jsonl").read_text().splitlines():
        params = json.loads(line)["params"]
        if params.get("conversations") == "long":
            reused[params["variant"], params["turn"]] = params["reused_tokens"]
    assert reused["none", 1] == reused["tiered-kv-disk", 1] == 0
    assert reused["none", 2] < 500
    assert reused["tiered-kv-disk", 2] > 2000
