"""The command line: `tiered-kv COMMAND ...`.

Exit codes: 0 done, 1 failed check, 2 bad input, 130 interrupted. What people read goes to stderr;
stdout carries what was asked for with `--json` (one object), `--help` or `--version`. Bad input is
one line that names the flag, the value and what would be right.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence

_COMMANDS = {
    "replay": "run multi-turn conversations or a recorded trace through a store, with real bytes",
    "bench": "measure this machine's tiers, the cost of deciding, and when a load pays",
    "check": "verify every page of a store on disk",
    "stats": "say what a store on disk holds",
}

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for what a user can cause.

    Args:
        argv: the arguments after the program's name; None takes this process's.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_usage())
        return EXIT_DONE if arguments else EXIT_BAD_INPUT
    if command == "--version":
        print(f"tiered-kv {_version()}")
        return EXIT_DONE
    if command not in _COMMANDS:
        from tiered_kv.cli.options import nearest

        hint = nearest(command, _COMMANDS) or f"expected one of {', '.join(_COMMANDS)}"
        return fail(f"{command}: no such command; {hint}")
    return _run(command, arguments[1:])


def _run(command: str, arguments: list[str]) -> int:
    from tiered_kv.errors import TieredKVError

    try:
        run = importlib.import_module(f"tiered_kv.cli.{command}").run
        code: int = run(arguments)
        return code
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else EXIT_DONE
    except TieredKVError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("tiered-kv: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return EXIT_INTERRUPTED


def fail(message: str) -> int:
    """Print bad input's one line; returns its exit code."""
    line = re.sub(r"^([a-z_]+)=", _as_flag, " ".join(message.split()))
    print(f"tiered-kv: error: {line}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _as_flag(setting: re.Match[str]) -> str:
    """The library says `hbm=5`, a user of the command line wrote `--hbm 5`."""
    return f"--{setting[1].replace('_', '-')} "


def _usage() -> str:
    lines = ["usage: tiered-kv COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<8} {text}" for name, text in _COMMANDS.items()]
    lines += ["", "`tiered-kv COMMAND --help` lists a command's options; `tiered-kv --version`."]
    return "\n".join(lines)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tiered-kv")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
