"""Our settings in a mapping that an engine hands through, beside the engine's own keys."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tiered_kv.config import one_line
from tiered_kv.errors import ConfigError

Settings = TypeVar("Settings", bound=BaseModel)


def settings_in(
    given: Mapping[str, Any],
    kind: type[Settings],
    place: str,
    *,
    engine: str = "",
    engine_keys: Sequence[str] = (),
) -> Settings:
    """The settings of ours in `given`.

    Args:
        place: what a user calls the mapping; a message begins with it.
        engine: whose `engine_keys` are: keys that are passed over.

    Raises:
        ConfigError: an unknown or missing key, a value out of range, or two that do not go
            together; one line that names it and says what would be right.
    """
    own = {key: value for key, value in given.items() if key not in engine_keys}
    for key in own:
        if key not in kind.model_fields:
            near = difflib.get_close_matches(str(key), kind.model_fields, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            others = f", and {engine}'s own {', '.join(engine_keys)}" if engine_keys else ""
            raise ConfigError(
                f"{place} has no key {key!r}{hint}; its keys are "
                f"{', '.join(kind.model_fields)}{others}"
            )
    for key, field in kind.model_fields.items():
        if field.is_required() and key not in own:
            raise ConfigError(f"{place} needs {key!r}: {field.description}")
    try:
        return kind(**own)
    except ValidationError as error:
        raise ConfigError(f"{place}: {one_line(error)}") from error
