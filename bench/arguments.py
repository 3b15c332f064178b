"""Types of arguments that several scripts take."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from tiered_kv.config import Size


def positive(text: str) -> int:
    """A whole number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def new_file(text: str) -> Path:
    """A file that can be written, so that no long run ends in vain."""
    path = Path(text)
    is_fit = os.access(path, os.W_OK) if path.exists() else os.access(path.parent, os.W_OK)
    if path.is_dir() or not is_fit:
        raise argparse.ArgumentTypeError(
            f"{text} cannot be written: give a file in a folder of yours"
        )
    return path


def n_bytes(text: str) -> int:
    """Bytes, as the store's own settings take them: 4096, 256KiB, 2MiB."""
    try:
        return int(TypeAdapter(Size).validate_python(text))
    except ValidationError as error:
        what = f"{text} is no size: give bytes, or such as 256KiB, 2MiB"
        raise argparse.ArgumentTypeError(what) from error
