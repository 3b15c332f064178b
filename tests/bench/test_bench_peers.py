"""`bench.peers` without any peer: what driver and worker say to each other, and a run of ours."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.peers import __main__ as command
from bench.peers import catalogue, client, cold, run
from bench.peers.catalogue import PEERS, Peer
from bench.peers.client import Client, WorkerError
from bench.peers.pages import LOOKUP_KEYS, Content, absent_key, buffer, digests, key, rows
from bench.peers.protocol import (
    CHORES,
    OPERATIONS,
    ProtocolError,
    Reply,
    Request,
    decode_reply,
    decode_request,
    encode,
)
from bench.peers.raw import Raw
from bench.peers.worker import Worker, serve

# -- protocol --------------------------------------------------------------------------------------


@pytest.mark.parametrize("do", OPERATIONS + CHORES)
def test_a_request_comes_through_as_it_was_sent(do: str) -> None:
    request = Request(do, {"number": 3})
    line = encode(request)
    assert line.count("\n") == 1 and line.endswith("\n")
    assert decode_request(line) == request


def test_a_reply_comes_through_as_it_was_sent() -> None:
    reply = Reply((0.5, 1.0), (0.25, 0.5), {"versions": {"a": "1"}}, None)
    assert decode_reply(encode(reply)) == reply
    assert decode_reply(encode(Reply(error="no\nluck"))).error == "no\nluck"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("warning: I print to stdout\n", "not JSON"),
        ("[1, 2]\n", "not an object"),
        ('{"do": "explode"}\n', "no such operation"),
        ('{"do": "put", "arguments": 3}\n', "no object"),
    ],
)
def test_a_line_that_is_no_request_is_refused(line: str, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode_request(line)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("", "not JSON"),
        ('{"seconds": ["soon"]}', "not a reply"),
        ('{"seconds": 3}', "not a reply"),
        ('{"secs": [1]}', "unknown field"),
    ],
)
def test_a_line_that_is_no_reply_is_refused(line: str, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode_reply(line)


# -- pages -----------------------------------------------------------------------------------------


def test_pages_are_others_in_every_round_and_the_same_for_every_peer() -> None:
    pages = [rows(buffer(64 << 10), 16 << 10) for _ in range(3)]
    first = Content(64 << 10).fill(pages[0], 1)
    again = Content(64 << 10).fill(pages[1], 1)
    other = Content(64 << 10).fill(pages[2], 2)
    assert first == again == digests(pages[0])
    assert not set(first) & set(other)
    assert all((a != b).mean() > 0.9 for a, b in zip(pages[0], pages[2], strict=True))


def test_keys_of_pages_and_of_none_differ() -> None:
    keys = [key(number, page) for number in range(3) for page in range(50)]
    keys += [absent_key(number, page) for number in range(3) for page in range(50)]
    assert len(set(keys)) == 300
    assert {len(one) for one in keys} == {32}


# -- worker ----------------------------------------------------------------------------------------


def opened(folder: Path, name: str = "raw") -> Worker:
    worker = Worker(name)
    where = {"page_bytes": 64 << 10, "pages": 16, "folder": str(folder)}
    assert worker.answer(Request("setup", where)).error is None
    assert worker.answer(Request("begin", {"number": 1})).error is None
    return worker


@pytest.mark.parametrize("name", catalogue.SMOKE)
def test_a_round_of_a_peer_brings_back_what_was_put(name: str, tmp_path: Path) -> None:
    worker = opened(tmp_path, name)
    operations = PEERS[name].adapter().operations
    assert set(operations) <= set(OPERATIONS)
    for number in (2, 3):
        assert worker.answer(Request("clear")).error is None
        assert worker.answer(Request("begin", {"number": number})).error is None
        for operation in OPERATIONS:
            if operation not in operations:
                continue
            if operation == "get_cold":
                assert worker.answer(Request("empty_host")).error is None
            reply = worker.answer(Request(operation))
            assert reply.error is None, f"{operation}: {reply.error}"
            assert reply.seconds and len(reply.seconds) == len(reply.cpu_seconds)
            if operation.startswith("get"):
                assert worker.answer(Request("verify")).facts == {"verified_pages": 16}
    worker.close()


def test_a_page_that_comes_back_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying(adapter: Raw) -> None:
        np.copyto(adapter._target, adapter._host)
        adapter._target[70_000] ^= 1

    monkeypatch.setattr(Raw, "get_host", lying)
    worker = opened(tmp_path)
    for operation in ("put", "get_host"):
        assert worker.answer(Request(operation)).error is None
    assert worker.answer(Request("verify")).error == ("RuntimeError: 1 of 16 pages came back wrong")
    worker.close()


def test_a_get_that_does_nothing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier get has left in the caller's memory would pass for what this one brings."""
    worker = opened(tmp_path)
    for operation in ("put", "get_host"):
        assert worker.answer(Request(operation)).error is None
    monkeypatch.setattr(Raw, "get_host", lambda _: None)
    assert worker.answer(Request("get_host")).error is None
    assert "16 of 16 pages came back wrong" in str(worker.answer(Request("verify")).error)
    worker.close()


def test_a_lookup_that_finds_too_little_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raw, "operations", ("lookup_present", "lookup_absent"))
    monkeypatch.setattr(Raw, "lookup", lambda _, keys: len(keys) // 2)
    worker = opened(tmp_path)
    error = worker.answer(Request("lookup_present")).error
    assert error is not None and f"of {LOOKUP_KEYS} keys, not {LOOKUP_KEYS}" in error
    assert "not 0" in str(worker.answer(Request("lookup_absent")).error)
    worker.close()


def test_what_a_worker_cannot_do_is_an_error_and_not_its_end(tmp_path: Path) -> None:
    asked = "".join([encode(Request("put")), "nonsense\n", encode(Request("lookup_present"))])
    replies = io.StringIO()
    serve(Worker("raw"), io.StringIO(asked), replies)
    first, second, third = (decode_reply(line) for line in replies.getvalue().splitlines())
    assert first.error == "RuntimeError: put before setup"
    assert second.error is not None and "not JSON" in second.error
    assert third.error == "RuntimeError: lookup_present before setup"
    worker = opened(tmp_path)
    assert (
        worker.answer(Request("lookup_present")).error == "RuntimeError: raw has no lookup_present"
    )
    worker.close()


# -- cold ------------------------------------------------------------------------------------------


def test_files_leave_the_page_cache_and_stay_on_disk(tmp_path: Path) -> None:
    if not cold.can_be_cold(tmp_path):
        pytest.skip("files stay in memory in the directory of the tests")
    (tmp_path / "deep").mkdir()
    path = tmp_path / "deep" / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "empty").touch()
    assert cold.cached_bytes(path) == 1 << 20
    cold.sync(tmp_path)
    assert cold.drop(tmp_path) == 0
    assert cold.cached_bytes(path) == 0
    assert path.read_bytes() == bytes(range(256)) * 4096
    assert cold.cached_bytes(path) == 1 << 20


def test_asking_whether_files_can_be_cold_leaves_none(tmp_path: Path) -> None:
    cold.can_be_cold(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- client ----------------------------------------------------------------------------------------


def stub(folder: Path, script: str) -> Peer:
    """A peer whose interpreter is a script of ours, and its environment under a folder."""
    python = folder / ".venv-stub" / "bin" / "python"
    python.parent.mkdir(parents=True)
    source = folder / "stub.py"
    source.write_text(script)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {source}\n")
    python.chmod(0o755)
    return replace(PEERS["raw"], name="stub", venv=".venv-stub")


def started(folder: Path, script: str) -> Client:
    return Client(stub(folder, script), folder, folder, folder / "log")


def test_a_worker_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    script = "import sys\nsys.stdin.readline()\nsys.exit('libfast.so: cannot open')"
    one = started(tmp_path, script)
    with pytest.raises(WorkerError, match=r"put: ended with exit code 1: libfast.so: cannot open"):
        one.ask(Request("put"), 60.0)
    one.stop()


def test_a_worker_that_prints_what_is_no_reply_is_named(tmp_path: Path) -> None:
    one = started(tmp_path, "input()\nprint('hello')\ninput()")
    with pytest.raises(WorkerError, match="put: not JSON: hello"):
        one.ask(Request("put"), 60.0)
    one.kill()


def test_what_a_worker_says_failed_is_raised(tmp_path: Path) -> None:
    one = started(tmp_path, f"input()\nprint({encode(Reply(error='disk full'))!r})\ninput()")
    with pytest.raises(WorkerError, match="put: disk full"):
        one.ask(Request("put"), 60.0)
    one.kill()


def test_a_worker_that_hangs_is_ended_with_all_it_has_started(tmp_path: Path) -> None:
    child_path = tmp_path / "child"
    script = (
        "import subprocess, pathlib\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(child_path)!r}).write_text(str(child.pid))\n"
        "child.wait()"
    )
    one = started(tmp_path, script)
    deadline = time.monotonic() + 60
    while not (child_path.exists() and child_path.read_text()):
        assert time.monotonic() < deadline
    with pytest.raises(WorkerError, match="put: no answer in time"):
        one.ask(Request("put"), 0.1)
    one.kill()
    while is_running(int(child_path.read_text())):
        assert time.monotonic() < deadline, "it was left behind"


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# -- command line ----------------------------------------------------------------------------------


def errors_of(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--page-bytes", "3KiB"], "--page-bytes 3072: give a multiple of 4096"),
        (["--page-bytes", "2MiB", "--set-bytes", "3MiB"], "that divides --set-bytes 3145728"),
        (["--page-bytes", "much"], "much is no size"),
        (["--set-bytes", "0"], "0 is no size"),
        (["--rounds", "0"], "0 is not 1 or more"),
        (["--peers", "redis"], "invalid choice: 'redis'"),
        (["--dir", "/no/such/place"], "--dir /no/such/place: no such directory"),
        (["--rows", "/no/such/place/r.jsonl"], "--rows: /no/such/place/r.jsonl cannot be written"),
        (["--report", "/"], "--report: / cannot be written: give a file in a folder of yours"),
    ],
)
def test_a_wrong_argument_is_one_clear_line(
    arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what in errors_of(arguments, capsys)


def test_a_peer_that_is_asked_for_and_has_no_environment_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = errors_of(["--peers", "raw", "vllm-fs", "--venv", str(tmp_path)], capsys)
    assert said.endswith("--peers vllm-fs: .venv-engines is not there: run `make bench-peers`, "
                         "which makes it")  # fmt: skip


def test_a_dry_run_says_what_would_run_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--dry-run", "--venv", str(tmp_path), "--dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "128 MiB a round in pages of 256 KiB, 2 MiB; 9 rounds and 4 to warm up" in said
    assert "  tiered-kv-disk: DiskStore" in said
    assert "  mooncake: LEFT OUT: .venv-peer-mooncake is not there: run `make bench-peers`" in said
    assert list(tmp_path.iterdir()) == []


def test_the_command_in_the_report_has_no_path_of_this_machine() -> None:
    words = ["--dir", "/data/disk", "--rounds", "2", "--rows=/home/me/r.jsonl", "--smoke"]
    made = command._without_paths(words)
    assert made == ["--dir", "DIR", "--rounds", "2", "--rows=ROWS", "--smoke"]


# -- runs ------------------------------------------------------------------------------------------


def test_a_run_of_ours_brings_rows_and_a_report_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = ["--smoke", "--rounds", "2", "--page-bytes", "256KiB", "--dir", str(scratch)]
    arguments += ["--rows", str(tmp_path / "r.jsonl"), "--report", str(tmp_path / "r.md")]
    assert command.main(arguments) == 0, capsys.readouterr().err
    assert list(scratch.iterdir()) == []
    kept = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    found = {(row["params"]["peer"], row["params"]["page_bytes"], row["metric"]) for row in kept}
    for metric in ("put_synced_rate", "get_cold_rate", "lookup_present_rate"):
        assert ("tiered-kv-disk", 256 << 10, metric) in found
        assert ("tiered-kv", 256 << 10, metric) in found
    assert {row["params"]["repeats"] for row in kept} == {2}
    text = (tmp_path / "r.md").read_text()
    assert str(tmp_path) not in text and str(client.ROOT) not in text
    assert "### Cold get: from disk to the caller, 256 KiB pages" in text
    assert "All ran." in text


def test_a_peer_that_fails_is_left_out_and_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"import sys\nsys.stdin.readline()\nsys.exit('no {tmp_path}/.venv-stub/lib')"
    peer = stub(tmp_path, script)
    monkeypatch.setitem(catalogue.PEERS, "stub", peer)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    arguments = [
        "--smoke",
        "--peers",
        "raw",
        "stub",
        "--page-bytes",
        "64KiB",
        "--venv",
        str(tmp_path),
    ]
    arguments += ["--dir", str(scratch), "--report", str(tmp_path / "r.md")]
    assert command.main(arguments) == 0
    assert capsys.readouterr().err.count("stub: FAILED: setup: ended with exit code 1") == 1
    text = (tmp_path / "r.md").read_text()
    assert "- `stub`: setup: ended with exit code 1: no REPOSITORY/.venv-stub/lib" in text
    assert "| `raw` | " in text
    assert list(scratch.iterdir()) == []


def test_a_run_fails_where_one_of_ours_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = stub(tmp_path, "raise SystemExit('broken')")
    monkeypatch.setitem(catalogue.PEERS, "tiered-kv-disk", replace(broken, name="tiered-kv-disk"))
    arguments = [
        "--smoke",
        "--page-bytes",
        "64KiB",
        "--venv",
        str(tmp_path),
        "--dir",
        str(tmp_path),
    ]
    assert command.main([*arguments, "--peers", "raw", "tiered-kv-disk"]) == 1
    assert "tiered-kv-disk: FAILED" in capsys.readouterr().err


def test_an_interrupt_ends_the_workers_and_removes_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began: list[int] = []
    round_of = run.Driver._round

    def interrupted(driver: run.Driver, page_bytes: int, number: int) -> None:
        round_of(driver, page_bytes, number)
        began.extend(one._process.pid for one in driver._clients.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(run.Driver, "_round", interrupted)
    arguments = ["--smoke", "--peers", "raw", "tiered-kv-disk", "--dir", str(tmp_path)]
    assert command.main([*arguments, "--rows", str(tmp_path / "r.jsonl")]) == 130
    assert "workers ended, files removed" in capsys.readouterr().err
    assert len(began) == 2 and not any(is_running(process) for process in began)
    assert list(tmp_path.iterdir()) == []


def test_a_cold_get_that_is_not_cold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cold, "can_be_cold", lambda _: True)
    monkeypatch.setattr(cold, "drop", lambda _: 5 << 20)
    assert command.main(["--smoke", "--peers", "raw", "--dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "raw: FAILED: get_cold: 5,242,880 bytes of its files stayed in the page cache" in said


def test_the_order_of_the_peers_shifts_from_round_to_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []
    one_of = run.Driver._one

    def noted(driver: run.Driver, one: Client, size: int, operation: str, number: int) -> None:
        if operation == "put_durable":
            asked.append((number, one.peer.name))
        one_of(driver, one, size, operation, number)

    monkeypatch.setattr(run.Driver, "_one", noted)
    arguments = ["--smoke", "--peers", "raw", "tiered-kv-disk", "--page-bytes", "64KiB"]
    assert command.main([*arguments, "--rounds", "2", "--dir", str(tmp_path)]) == 0
    raw, ours = "raw", "tiered-kv-disk"
    assert asked[-6:] == [(0, raw), (0, ours), (1, ours), (1, raw), (2, raw), (2, ours)]


# -- catalogue -------------------------------------------------------------------------------------


def test_every_peer_says_what_it_is_and_has_an_adapter() -> None:
    folder = Path(catalogue.__file__).parent
    for peer in PEERS.values():
        module, _, name = peer.where.partition(":")
        assert f"class {name}(" in (folder / f"{module}.py").read_text(), peer.name
        assert peer.what and peer.durable and peer.lacks
    assert [name for name, peer in PEERS.items() if peer.is_durable] == [
        "raw",
        "tiered-kv",
        "tiered-kv-disk",
    ]


def test_every_environment_of_a_peer_is_made_by_the_makefile() -> None:
    makefile = (client.ROOT / "Makefile").read_text()
    for venv in {peer.venv for peer in PEERS.values()} - {None}:
        assert f":= {venv}\n" in makefile


def test_variables_of_a_peer_name_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = replace(
        stub(tmp_path, "import os\ninput()\nopen('seen', 'w').write(os.environ['LIBRARIES'])"),
        environment={"LIBRARIES": "{venv}/system"},
    )
    monkeypatch.setattr(client, "ROOT", tmp_path)
    one = Client(peer, tmp_path, tmp_path, tmp_path / "log")
    with pytest.raises(WorkerError):
        one.ask(Request("put"), 60.0)
    one.stop()
    assert (tmp_path / "seen").read_text() == str(tmp_path / ".venv-stub" / "system")
    assert os.environ.get("LIBRARIES") is None
