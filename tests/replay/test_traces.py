"""Reading Mooncake-schema traces, and refusing those that would give wrong numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered_kv.errors import ConfigError
from tiered_kv.replay.traces import BlockWorkload, SpelledWorkload, TraceRequest, read_trace

MOONCAKE = Path(__file__).parents[2].parent / "shared/traces/mooncake_conversation_trace.jsonl"


def line(input_length: int = 1000, blocks: int = 2, **more: Any) -> dict[str, Any]:
    """One well-formed line, with what a test wants different."""
    return {
        "timestamp": 0,
        "input_length": input_length,
        "output_length": 7,
        "hash_ids": list(range(blocks)),
        **more,
    }


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    """A trace file of these lines."""
    texts = [text if isinstance(text, str) else json.dumps(text) for text in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_a_trace_is_read_in_file_order_with_its_optional_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line(timestamp=1500), "", line(session=3, turn=1))
    first, second = read_trace(path)
    assert (first.timestamp_ms, first.input_tokens, first.output_tokens) == (1500, 1000, 7)
    assert first.block_ids.tolist() == [0, 1]
    assert (first.session, first.turn) == (None, None)
    assert (second.session, second.turn) == (3, 1)


def test_limit_leaves_later_lines_unread(tmp_path: Path) -> None:
    path = write(tmp_path / "t", line(), line(), '{"timestamp": 0, "inp')
    assert len(read_trace(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param('{"timestamp": 0, "input_le', ["line 2", "complete JSON"], id="cut-short"),
        pytest.param("[1, 2]", ["line 2", "JSON object"], id="not-an-object"),
        pytest.param(line(blocks=3), ["line 2", "2 blocks of 512", "3"], id="too-many-blocks"),
        pytest.param(line(1025, 2), ["line 2", "3 blocks", "--trace-block-tokens"], id="too-few"),
        pytest.param(line(input_length=0), ["line 2", "input_length"], id="empty-prompt"),
        pytest.param(line(input_length=True), ["line 2", "input_length"], id="bool"),
        pytest.param(line(output_length="7"), ["line 2", "output_length"], id="text-for-number"),
        pytest.param(line(hash_ids=[1, -1]), ["line 2", "hash_ids"], id="negative-id"),
        pytest.param(line(hash_ids=[1, 2**32]), ["line 2", "hash_ids"], id="id-too-large"),
        pytest.param(line(hash_ids=None), ["line 2", "hash_ids"], id="no-ids"),
        pytest.param(line(timestamp=-1), ["line 2", "timestamp"], id="negative-time"),
        pytest.param(line(session="a"), ["line 2", "session"], id="session-not-a-number"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(
    tmp_path: Path, bad: dict[str, Any] | str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_trace(write(tmp_path / "t", line(), bad))
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    broken = line()
    del broken["output_length"]
    with pytest.raises(ConfigError, match="line 1: output_length is missing"):
        read_trace(write(tmp_path / "t", broken))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "t").write_text(content)
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(tmp_path / "t")


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "absent")
    (tmp_path / "t").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "t")


@settings(deadline=None)  # each example writes a file
@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.integers(0, 500), st.integers(0, 2**32 - 5000)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 600),
)
def test_any_consistent_trace_comes_back_as_written(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[tuple[int, int, int]],
    block_tokens: int,
) -> None:
    lines = [
        line(tokens, hash_ids=[first + i for i in range(-(-tokens // block_tokens))])
        | {"output_length": output}
        for tokens, output, first in requests
    ]
    path = write(tmp_path_factory.mktemp("trace") / "t", *lines)
    found = read_trace(path, block_tokens=block_tokens)
    assert [
        (request.input_tokens, request.output_tokens, int(request.block_ids[0]))
        for request in found
    ] == requests


def test_a_block_workload_hands_out_blocks_as_pages(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t", line(timestamp=2500)))
    workload = BlockWorkload(trace)
    (request,) = workload
    assert (workload.ids_a_page, workload.page_tokens, len(workload)) == (1, 512, 1)
    assert (request.arrival_s, request.prompt_tokens, request.ids.tolist()) == (2.5, 1000, [0, 1])


def test_spelled_blocks_share_tokens_exactly_where_ids_are_shared() -> None:
    ids = [np.array([1, 2], np.uint32), np.array([1, 3], np.uint32)]
    trace = [TraceRequest(0, 1000, 99, blocks) for blocks in ids]
    workload = SpelledWorkload(
        trace, block_tokens=512, page_tokens=64, vocabulary=100, reply_tokens=8
    )
    one, two = workload
    assert len(one.ids) == len(two.ids) == 1000
    assert np.array_equal(one.ids[:512], two.ids[:512])
    assert not np.array_equal(one.ids[512:], two.ids[512:])
    assert int(one.ids.max()) < 100
    assert one.reply_tokens == 8


def test_the_public_mooncake_trace_agrees_with_its_block_size() -> None:
    if not MOONCAKE.exists():
        pytest.skip(f"{MOONCAKE.name} is not beside the project")
    trace = read_trace(MOONCAKE, limit=500)
    assert len(trace) == 500
    with pytest.raises(ConfigError, match=r"line 1.*256"):
        read_trace(MOONCAKE, block_tokens=256)
