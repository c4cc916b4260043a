"""Where options come from: a configuration file, the environment, the command line; the later ones win.

The file is flat TOML with the options' long names as keys (``max-num-seqs = 32``). Each option can also be set by the
variable ``PERILUNE_`` and its name in capitals (``PERILUNE_MAX_NUM_SEQS``). Knows no option by name: it works on
whatever parameters the verb has; ``values`` tells what they take. Keys of clients are not options: they never stand on
a command line.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand

from perilune.cli.start import KEY_VARIABLE
from perilune.cli.values import SHOWN_CHARS, kinds
from perilune.config import toml_fault
from perilune.errors import UsageError

ENV_PREFIX: Final = "PERILUNE"
_MAX_FILE_BYTES: Final = 1 << 20
_NEAR: Final = 0.8
_NAME_CHARS: Final = 80
_KUBERNETES: Final = re.compile(rf"{ENV_PREFIX}_(PORT|SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_[0-9]+_[A-Z]+(_.*)?)")
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


def unknown_variables(context: typer.Context) -> Iterator[str]:
    """A warning for each variable that begins like ours and is none; shows no value.

    Kubernetes' own, for a service named perilune, go without one.
    """
    known = [
        KEY_VARIABLE,
        *(
            f"{ENV_PREFIX}_{(each.name or '').upper()}"
            for each in context.command.params
            if each.param_type_name == "option"
        ),
    ]
    for name in sorted(os.environ):
        if name.startswith(f"{ENV_PREFIX}_") and name not in known and not _KUBERNETES.fullmatch(name):
            close = difflib.get_close_matches(name, known, 1, _NEAR)
            hint = f"did you mean {close[0]}?" if close else "perilune serve --help lists the options"
            yield f"environment variable {name[:_NAME_CHARS]!a} is none of ours and changes nothing; {hint}"


class Verb(TyperCommand):
    """A verb that checks the texts of the command line and the environment by the same rules as a file's values."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """As typer does it, after the check.

        Raises:
            UsageError: a text is no value of its option.
        """
        # Kubernetes gives every pod such a variable for a service named perilune: it is an address, not a choice.
        if os.environ.get(f"{ENV_PREFIX}_PORT", "").startswith("tcp://"):
            del os.environ[f"{ENV_PREFIX}_PORT"]
        given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        if not given.get("help"):
            known = kinds(self.callback)
            for parameter in self.params:
                name = parameter.name or ""
                place, texts = _texts(ctx, parameter.opts[0], name, given)
                for text in texts if name in known else ():
                    known[name].check_text(text, place)
        return super().parse_args(ctx, args)


def _texts(context: typer.Context, option: str, name: str, given: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
    """Where one parameter's texts come from, and the texts; none where only a file or the default may say more."""
    if given.get(name) is not None:
        value = given[name]
        texts = value if isinstance(value, (list, tuple)) else [value]
        return f"`{option if option.startswith('-') else option.upper()}`", [
            each for each in texts if isinstance(each, str)
        ]
    variable = f"{context.auto_envvar_prefix}_{name.upper()}"
    value = os.environ.get(variable, "") if context.auto_envvar_prefix else ""
    return f"environment variable {variable}", [value] if value else []


def _read(context: typer.Context, path: Path) -> dict[str, Any]:
    where = f"configuration `{path}`"
    table = _parsed(path, where)
    known = {name: kind for name, kind in kinds(context.command.callback).items() if name not in NOT_SHOWN}
    found: dict[str, Any] = {}
    for written, value in table.items():
        name = written.replace("-", "_")
        if name not in known:
            raise _unknown(written, known, where)
        if name in found:
            raise UsageError(f"{where}: `{written}` stands twice, once with dashes and once with underscores")
        known[name].check(value, f"{where}: `{written}`")
        found[name] = value
    return found


def _parsed(path: Path, where: str) -> dict[str, Any]:
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{where} is no regular file")
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {(error.strerror or '').lower()}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{where} has more than {_MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} is not TOML{toml_fault(error)}", hint="a line looks like: max-num-seqs = 32"
        ) from None


def _unknown(name: str, known: Iterable[str], where: str) -> UsageError:
    """A name is shown if it is near that of an option, or too short for a key that somebody put there."""
    close = difflib.get_close_matches(name.replace("_", "-"), [_long_name(each) for each in known], 1)
    hint = f"did you mean `{close[0]}`?" if close else "perilune serve --help lists the options"
    shown_name = f" `{name}`" if name.isprintable() and (close or len(name) <= SHOWN_CHARS) else " of such a name"
    return UsageError(f"{where}: there is no option{shown_name}", hint=hint)


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
