"""Types of arguments that several scripts take."""

from __future__ import annotations

import argparse

from pydantic import TypeAdapter, ValidationError

from tiered_kv.config import Size


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def n_bytes(text: str) -> int:
    """Bytes, as the store's own settings take them: 4096, 256KiB, 2MiB."""
    try:
        return int(TypeAdapter(Size).validate_python(text))
    except ValidationError as error:
        what = f"{text} is no size: give bytes, or such as 256KiB, 2MiB"
        raise argparse.ArgumentTypeError(what) from error
