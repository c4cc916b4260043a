"""Where options come from: a configuration file, the environment, the command line; the later ones win.

The file is flat TOML with the options' long names as keys (``max-num-seqs = 32``). Each option can also be set by the
variable ``PERILUNE_`` and its name in capitals (``PERILUNE_MAX_NUM_SEQS``). Knows no option by name: it works on
whatever parameters the verb has. Keys of clients are not options: they never stand on a command line.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import typer

from perilune.errors import UsageError

ENV_PREFIX: Final = "PERILUNE"
NOT_SHOWN: Final = frozenset({"config", "show_config", "as_json", "help"})
"""What says where to look, rather than what holds."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One option, its value as plain data, and where that came from."""

    name: str
    value: Any
    origin: str


def use(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of ``--config``, before any other option is read: the file's values become the verb's defaults.

    Raises:
        UsageError: the file can't be read, or holds what is no option or no value of one.
    """
    # Kubernetes gives every pod such a variable for a service named perilune: it is an address, not a choice.
    if os.environ.get(f"{ENV_PREFIX}_PORT", "").startswith("tcp://"):
        del os.environ[f"{ENV_PREFIX}_PORT"]
    if path is not None:
        context.default_map = _read(context, path)
    return path


def settings(context: typer.Context) -> tuple[Setting, ...]:
    """Every option of an invocation, as it holds."""
    names = (option.name or "" for option in context.command.params)
    return tuple(
        Setting(_long_name(name), _plain(context.params[name]), _origin(context, name))
        for name in names
        if name not in NOT_SHOWN
    )


def show(context: typer.Context, *, as_json: bool) -> None:
    """Prints them."""
    found = settings(context)
    if as_json:
        print(json.dumps({each.name: {"value": each.value, "origin": each.origin} for each in found}, indent=2))
        return
    rows = [(each.name, "-" if each.value is None else json.dumps(each.value), each.origin) for each in found]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    for name, value, origin in rows:
        print(f"{name:{widths[0]}}  {value:{widths[1]}}  {origin}")


def _read(context: typer.Context, path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UsageError(f"configuration `{path}` cannot be read: {(error.strerror or '').lower()}") from None
    except ValueError as error:
        raise UsageError(f"configuration `{path}` is not TOML: {error}") from None
    options = {name: each for each in context.command.params if (name := each.name or "") not in NOT_SHOWN}
    return {name.replace("-", "_"): _checked(context, options, name, value, path) for name, value in table.items()}


def _checked(context: typer.Context, options: Mapping[str, Any], name: str, value: Any, path: Path) -> Any:
    """The value, if it is one that the option takes."""
    option = options.get(name.replace("-", "_"))
    if option is None:
        close = difflib.get_close_matches(name.replace("_", "-"), [_long_name(known) for known in options], 1)
        hint = f"did you mean `{close[0]}`?" if close else "perilune serve --help lists the options"
        raise UsageError(f"configuration `{path}`: there is no option `{name[:80]}`", hint=hint)
    several = option.multiple
    right_shape = isinstance(value, list) if several else isinstance(value, (str, int, float))
    if not right_shape:
        raise UsageError(
            f"configuration `{path}`: `{name}` is {value!r:.80}, {'a list' if several else 'one value'} is"
        )
    try:
        option.process_value(context, value)
    except Exception as error:
        told = getattr(error, "message", None)
        if told is None:
            raise
        raise UsageError(f"configuration `{path}`: `{name}`: {told.removeprefix('Value error, ')}") from None
    return value


def _origin(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    match "" if source is None else source.name:
        case "COMMANDLINE":
            return "command line"
        case "ENVIRONMENT":
            return f"environment {ENV_PREFIX}_{name.upper()}"
        case "DEFAULT_MAP":
            return f"file {context.params.get('config')}"
        case _:
            return "default"


def _long_name(name: str) -> str:
    return name.replace("_", "-")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
