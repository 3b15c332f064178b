"""Flags from pydantic models: argument, then `TIERED_KV_*` variable, then TOML file, default."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from tiered_kv.errors import ConfigError

ENV_PREFIX = "TIERED_KV_"

# Every setting of every command: a variable or a line of the TOML file may be meant for another.
_ALL_OPTIONS: set[str] = set()


class Options(BaseSettings):
    """Base of every command's options."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        cli_kebab_case="all",
        cli_implicit_flags="toggle",
        cli_exit_on_error=False,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_enforce_required=False,
        cli_shortcuts={"print-json": "json"},
    )
    toml_file: ClassVar[Path | None] = None

    config: Path | None = Field(None, description="TOML file with any of these settings")
    print_json: bool = Field(False, description="print one JSON object on stdout")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Environment before TOML file; init_settings carries the file (see `parse`)."""
        return env_settings, init_settings


AnyOptions = TypeVar("AnyOptions", bound=Options)


def parse(options: type[AnyOptions], arguments: Sequence[str], command: str) -> AnyOptions:
    """Options of a command from its arguments, the environment and the file that `--config` names.

    Raises:
        ConfigError: an unknown or impossible setting, in one line.
        SystemExit: `--help` was asked for, and printed.
    """
    flags = _flags(options)
    _refuse_unknown_flags(arguments, flags)
    _refuse_unknown_variables(options)
    settings = _read_toml(_config_path(arguments), options)
    settings |= {"_cli_parse_args": list(arguments), "_cli_prog_name": f"tiered-kv {command}"}
    try:
        return options(**settings)
    except SettingsError as error:
        text = str(error).removeprefix("error parsing CLI: ")
        raise ConfigError(text.removeprefix("argument ")) from error
    except ValidationError as error:
        raise ConfigError(_one_line(error, options)) from error


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean X?` for the most similar known name, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else ""


def flag(name: str, options: type[Options] = Options) -> str:
    """The command-line form of a setting's name."""
    short = options.model_config.get("cli_shortcuts") or {}
    long = name.replace("_", "-")
    return f"--{short.get(long, long)}"


def _flags(options: type[Options]) -> set[str]:
    long = {f"--{name.replace('_', '-')}" for name in options.model_fields}
    return long | {flag(name, options) for name in options.model_fields} | {"--help", "-h"}


def _refuse_unknown_flags(arguments: Sequence[str], known: set[str]) -> None:
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name.startswith("--") and name not in known:
            hint = nearest(name, known) or "--help lists them"
            raise ConfigError(f"{name}: no such option; {hint}")


def _refuse_unknown_variables(options: type[Options]) -> None:
    known = {ENV_PREFIX + name.upper() for name in {*_known_names(), *options.model_fields}}
    for name in os.environ:
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            hint = nearest(name.upper(), known) or "`tiered-kv replay --help` lists the settings"
            raise ConfigError(f"environment variable {name}: no such setting; {hint}")


def _known_names() -> set[str]:
    if not _ALL_OPTIONS:
        from tiered_kv.cli.bench import BreakEvenOptions, IndexOptions, TiersOptions
        from tiered_kv.config import StoreConfig
        from tiered_kv.replay.settings import ReplaySettings

        _ALL_OPTIONS.update(StoreConfig.model_fields, ReplaySettings.model_fields)
        _ALL_OPTIONS.update(TiersOptions.model_fields, IndexOptions.model_fields)
        _ALL_OPTIONS.update(BreakEvenOptions.model_fields)
    return _ALL_OPTIONS


def _config_path(arguments: Sequence[str]) -> Path | None:
    """The TOML file: needed before the other options can be parsed."""
    for position, argument in enumerate(arguments):
        if argument.startswith("--config="):
            return Path(argument.split("=", 1)[1])
        if argument == "--config" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
    named = os.environ.get(ENV_PREFIX + "CONFIG")
    return Path(named) if named else None


def _read_toml(path: Path | None, options: type[Options]) -> dict[str, Any]:
    if path is None:
        return {}
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"--config {path}: not TOML: {error}") from error
    known = {*_known_names(), *options.model_fields}
    for name in settings:
        if name not in known:
            hint = nearest(name, known) or "`tiered-kv replay --help` lists the settings"
            raise ConfigError(f"--config {path}: {name}: no such setting; {hint}")
    return {name: value for name, value in settings.items() if name in options.model_fields}


def _one_line(error: ValidationError, options: type[Options]) -> str:
    """The first fault as one line: flag, value, what would be right."""
    fault = error.errors(include_url=False)[0]
    message = fault["msg"].removeprefix("Value error, ")
    for name in sorted(options.model_fields, key=len, reverse=True):
        message = re.sub(rf"\b{name}=", f"{flag(name, options)} ", message)
        if "_" in name:
            message = re.sub(rf"(?<![-\w]){name}\b", flag(name, options), message)
        elif message.startswith(f"{name} needs"):
            message = f"--{message}"
    if fault["type"].startswith("byte_size"):
        message += '; give bytes, or a number with a unit such as "64KiB" or "8GiB"'
    if not fault["loc"]:
        return message
    name = str(fault["loc"][0])
    if fault["type"] == "missing":
        return f"{flag(name, options)}: is required"
    return f"{flag(name, options)} {fault['input']}: {message}"
