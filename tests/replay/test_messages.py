"""Reading ShareGPT and OpenAI-messages files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.errors import ConfigError
from tiered_kv.replay.messages import Message, is_dialogue_file, read_dialogues
from tiered_kv.replay.tokenizer import ByteTokenizer, spell_message

SHAREGPT = {
    "id": "x",
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
}
OPENAI = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "hello"},
    ]
}


def as_jsonl(*entries: Any) -> str:
    """One entry a line."""
    return "\n".join(json.dumps(entry) for entry in entries)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(as_jsonl(SHAREGPT, OPENAI), id="jsonl"),
        pytest.param(json.dumps([SHAREGPT, OPENAI], indent=1), id="json-array"),
    ],
)
def test_both_schemas_are_read_from_both_forms(tmp_path: Path, text: str) -> None:
    (tmp_path / "d").write_text(text)
    assert is_dialogue_file(tmp_path / "d")
    share, openai = read_dialogues(tmp_path / "d")
    assert share == (Message("user", "hi"), Message("assistant", "hello"))
    roles = [message.role for message in openai]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert openai[1].text == "hi"
    assert openai[2].text == ""


def test_a_trace_of_blocks_is_not_taken_for_dialogues(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"timestamp": 0, "input_length": 3, "hash_ids": [0]}\n')
    assert not is_dialogue_file(tmp_path / "t")
    (tmp_path / "t").write_text("")
    assert not is_dialogue_file(tmp_path / "t")


def test_dialogues_without_a_user_are_skipped_and_limit_counts_the_others(tmp_path: Path) -> None:
    silent = {"messages": [{"role": "system", "content": "x"}]}
    (tmp_path / "d").write_text(as_jsonl(silent, SHAREGPT, OPENAI))
    assert len(read_dialogues(tmp_path / "d")) == 2
    assert len(read_dialogues(tmp_path / "d", limit=1)) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(as_jsonl(SHAREGPT) + '\n{"messages": [{"role"', "line 2", id="cut-line"),
        pytest.param("[\n" + json.dumps(SHAREGPT) + ",\n", "complete JSON array", id="cut-array"),
        pytest.param("[\n" * 100_000, "nested too deeply", id="deep-array"),
        pytest.param("[1]", "entry 0", id="not-an-object"),
        pytest.param(as_jsonl({"messages": 3}), "expected a list", id="no-list"),
        pytest.param(as_jsonl({"messages": [3]}), "JSON object", id="message-not-an-object"),
        pytest.param(
            as_jsonl({"messages": [{"role": "boss", "content": "x"}]}), "'boss'", id="role"
        ),
        pytest.param(
            as_jsonl({"messages": [{"role": "user", "content": 3}]}), "must be text", id="content"
        ),
        pytest.param(as_jsonl({"messages": []}), "no dialogue", id="nothing-said"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "d").write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_dialogues(tmp_path / "d")
    assert "\n" not in str(caught.value)


@given(st.text())
def test_bytes_are_a_tokenizer_that_loses_nothing(text: str) -> None:
    ids = ByteTokenizer().encode(text)
    assert ids.dtype == np.uint32
    assert bytes(ids.astype(np.uint8)).decode() == text


def test_a_spelled_message_says_who_speaks() -> None:
    ids = spell_message(Message("user", "hi"), ByteTokenizer())
    assert bytes(ids.astype(np.uint8)) == b"<|user|>\nhi\n"


def test_bytes_need_a_vocabulary_that_holds_them() -> None:
    with pytest.raises(ValueError, match="256"):
        ByteTokenizer(100)
