"""Configuration file < environment < command line, and what ``--show-config`` says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

from perilune.cli.main import app, run
from perilune.cli.options import ServeOptions
from perilune.cli.serve import SETTINGS
from perilune.cli.settings import NOT_SHOWN
from perilune.errors import UsageError

pytestmark = pytest.mark.usefixtures("logging_as_it_was")

FILE = """
port = 9000
max-num-seqs = 3
max_queue = 5
served-model-name = ["a", "b"]
prefix-cache = false
grace = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "perilune.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def parse() -> Callable[..., Mapping[str, Any]]:
    """What ``perilune serve`` with arguments would run with. Building its parser is most of what a run costs."""
    group: Any = get_command(app)
    verb = group.commands["serve"]

    def parse_line(*arguments: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = verb.make_context("serve", list(arguments), **SETTINGS).params
        return found

    return parse_line


Shown = Callable[..., dict[str, tuple[object, str]]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """What ``--show-config --json`` prints, with further variables."""

    def show(*arguments: str, **variables: str) -> dict[str, tuple[object, str]]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert run(["serve", "--show-config", "--json", *arguments]) == 0
        printed = json.loads(capsys.readouterr().out)
        return {name: (each["value"], each["origin"]) for name, each in printed.items()}

    return show


def test_the_later_one_wins_and_says_so(shown: Shown, config: Path, tiny_model: Path) -> None:
    variables = {"PERILUNE_PORT": "9001", "PERILUNE_GRACE": "2", "PERILUNE_RESTART": "true", "PERILUNE_MAX_QUEUE": ""}
    found = shown("--config", str(config), "--grace", "3", str(tiny_model), **variables)
    assert found["grace"] == (3.0, "command line")
    assert found["port"] == (9001, "environment PERILUNE_PORT")
    assert found["restart"] == (True, "environment PERILUNE_RESTART")
    assert found["max-num-seqs"] == (3, f"file {config}")
    assert found["served-model-name"] == (["a", "b"], f"file {config}")
    assert found["prefix-cache"] == (False, f"file {config}")
    assert found["max-queue"] == (5, f"file {config}"), "an empty variable is none; underscores are dashes"
    assert found["policy"] == ("fcfs", "default")
    assert found["model"] == (str(tiny_model), "command line")
    assert not {"config", "show-config", "as-json"} & found.keys()


def test_the_file_can_be_named_by_the_environment(shown: Shown, config: Path) -> None:
    assert shown(PERILUNE_CONFIG=str(config))["port"] == (9000, f"file {config}")


def test_kubernetes_names_a_service_s_address_like_our_port(shown: Shown) -> None:
    assert shown(PERILUNE_PORT="tcp://10.0.0.1:80")["port"] == (8000, "default")


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("prot = 1", "there is no option `prot`", "did you mean `port`?"),
        ("max-num-seq = 1", "there is no option `max-num-seq`", "did you mean `max-num-seqs`?"),
        ("show-config = true", "there is no option `show-config`", ""),
        ("port = 'x'", "`port`", ""),
        ("port = 70000", "`port`", ""),
        ("port = [1]", "`port` is a list, a whole number from 0 to 65535 is needed", ""),
        ("port = true", "`port` is true, a whole number", ""),
        ("port = 8000.0", "`port` is 8000.0, a whole number", ""),
        ("port = 0x" + "f" * 9000, "`port` is a number of 36000 bits, a whole number", ""),
        ("port = 1979-05-27", "`port` is a date, a whole number", ""),
        ("restart = 1", "`restart` is 1, true or false is needed", ""),
        ("grace = nan", "`grace` is nan, a number from 0 to 1000000000 is needed", ""),
        ("queue-timeout = 0", "`queue-timeout` is 0, a number from 0.001 to", ""),
        ("host = 5", "`host` is 5, a text is needed", ""),
        ('host = "a\\u0000b"', '`host` is "a\\u0000b", a text is needed', ""),
        ("usage-log = ''", '`usage-log` is "", a path is needed', ""),
        ("served-model-name = 'a'", '`served-model-name` is "a", a list of texts is needed', ""),
        ("served-model-name = ['a', 5]", "`served-model-name`[1] is 5, a text that is not empty is needed", ""),
        ("served-model-name = ['']", '`served-model-name`[0] is "", a text that is not empty', ""),
        ("policy = 'fare'", "`policy` is \"fare\", one of 'fcfs', 'priority', 'fair' is needed", ""),
        ("max-queue = 1\nmax_queue = 2", "`max_queue` stands twice", ""),
        ("max-queue = 1\nmax-queue = 2", "is not TOML (at end of document)", "a line looks like"),
        ("port = " + "[" * 9000, "is not TOML", ""),
        ("[serve]\nport = 1", "there is no option `serve`", ""),
        ("port = ", "is not TOML (at end of document)", ""),
        ("\nport 1", "is not TOML (at line 2, column 6)", ""),
    ],
)
def test_files_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str, hint: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert run(["serve", "--config", str(path)]) == 2
    err = capsys.readouterr().err.replace("\n", " ")
    assert f"`{path}`" in err
    assert told in err
    assert hint in err


WRONG: tuple[tuple[type, str], ...] = (
    (bool, "true"),
    (int, "7"),
    (int, "-7"),
    (int, "1" * 40),
    (float, "0.5"),
    (float, "-0.5"),
    (float, "nan"),
    (float, "inf"),
    (float, "1e300"),
    (str, "'x'"),
    (str, "'7'"),
    (str, "'true'"),
    (list, "[]"),
    (list, "['a']"),
    (list, "[1]"),
    (list, "[true]"),
    (list, "[['a']]"),
    (dict, "{ a = 1 }"),
    (date, "1979-05-27"),
)
RIGHT: dict[str, set[type]] = {"bool": {bool}, "int": {int}, "float": {int, float}, "list": {list}}
"""TOML types that an option may have, by what its signature says; the rest are texts."""


def right_types(name: str) -> set[type]:
    annotation = str(get_type_hints(ServeOptions)[name.replace("-", "_")])
    return next((types for word, types in RIGHT.items() if word in annotation.split(".")[-1]), {str})


def test_every_option_refuses_every_wrong_type(tmp_path: Path, parse: Callable[..., Mapping[str, Any]]) -> None:
    names = [each.name.replace("_", "-") for each in fields(ServeOptions) if each.name not in NOT_SHOWN]
    path = tmp_path / "c.toml"
    refused = 0
    for name, (kind, value) in product(names, WRONG):
        path.write_text(f"{name} = {value}")
        try:
            parse("--config", str(path))
        except UsageError as error:
            told = error.message
        else:
            assert kind in right_types(name), (name, value)
            continue
        refused += 1
        assert told.startswith(f"configuration `{path}`: `{name}`")
        assert told.endswith(" is needed")
        assert told.isprintable()
    assert len(names) > 30
    assert refused > 12 * len(names)


TEXTS = ("x", "nan", "inf", "-inf", "-1", "1e300", "0x10", "1_0", "٣", "5.0", "True", "", "1" * 40, "a b", "\udcff")


def test_the_environment_is_held_to_the_same(
    monkeypatch: pytest.MonkeyPatch, parse: Callable[..., Mapping[str, Any]]
) -> None:
    """What is taken is a value of the option's type, and within its bounds; the rest is told by the variable's name."""
    defaults = parse()
    for name, text in product(defaults, TEXTS):
        if name in NOT_SHOWN | {"model"}:
            continue
        variable = f"PERILUNE_{name.upper()}"
        with monkeypatch.context() as patch:
            patch.setenv(variable, text)
            try:
                value = parse()[name]
            except UsageError as error:
                value = error
        if isinstance(value, UsageError):
            assert value.message.startswith(f"environment variable {variable} is ")
            assert value.message.endswith(" is needed")
            continue
        types = right_types(name)
        if not text:
            assert value == defaults[name]
        elif types == {int}:
            assert (type(value), str(value)) == (int, text)
        elif types == {int, float}:
            assert value == float(text)
            assert 0 <= value <= 1e9
        elif types == {bool}:
            assert (value, text) == (True, "True")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("serve --grace nan", '`--grace` is "nan", a number from 0 to'),
        ("serve --queue-timeout inf", "a number from 0.001 to"),
        (f"serve --max-num-seqs {'1' * 30}", "a whole number from 1 to"),
        ("serve --max-num-seqs 65537", "a whole number from 1 to 65536"),
        ("serve --max-batched-tokens 9999999", "a whole number from 1 to 1048576"),
        ("serve --threads 99999", "a whole number from 1 to 1024"),
        ("serve --port 5.0", '`--port` is "5.0", a whole number'),
        ("serve --served-model-name=", "a text that is not empty"),
        ("serve --usage-log=", '`--usage-log` is "", a path'),
        ("serve --model-len 1", "No such option: --model-len"),
        ("serve --prefix-cache=false", "does not take a value"),
        ("serve a b", "unexpected extra argument"),
        ("chat --temperature nan --url http://127.0.0.1:9", '`--temperature` is "nan", a number from 0 to 2 is'),
        ("chat --seed -1 --url http://127.0.0.1:9", "`--seed` is -1, a whole number from 0"),
        ("chat --tools rm", "one of 'calculator' is needed"),
        ("inspect --json", "Missing argument 'MODEL'"),
    ],
)
def test_the_command_line_too(capsys: pytest.CaptureFixture[str], arguments: str, told: str) -> None:
    assert run(arguments.split()) == 2
    error, *hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert told in error
    assert all(line.startswith("hint: ") for line in hint)
    assert len(hint) <= 1


def test_help_wins_over_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "x", "--help"]) == 0
    assert "Usage: perilune serve" in capsys.readouterr().out


SECRET = "sk-0123456789abcdefghij"  # noqa: S105 - a key that opens nothing


@pytest.mark.parametrize(
    "text",
    [
        f"'{SECRET}' = 'alice'",
        f"{SECRET} = 1\n{SECRET} = 2",
        f"port = '{SECRET}'",
        f"port = {SECRET}",
        f"policy = '{SECRET}'",
        f"served-model-name = '{SECRET}'",
        f"served-model-name = [['{SECRET}']]",
        f"[{SECRET}]\nkey = 1",
        f"port.{SECRET} = 1",
    ],
)
def test_a_key_in_the_wrong_file_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert run(["--debug", "serve", "--config", str(path)]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--api-key={}",), ("--port", "{}"), ("--policy={}",), ("--api-key-file", "{}")])
def test_a_key_on_the_command_line_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["--debug", "serve", *(each.format(SECRET) for each in arguments)]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["API_KEY_FILE", "PORT", "POLICY", "RESTART"])
def test_a_key_in_the_wrong_variable_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(f"PERILUNE_{name}", SECRET)
    assert run(["--debug", "serve", "--port", "0"] if name != "PORT" else ["--debug", "serve"]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda path: None, "cannot be read: no such file"),
        (lambda path: path.mkdir(), "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (os.mkfifo, "is no regular file"),
        (lambda path: path.symlink_to(path), "cannot be read: too many levels"),
        (lambda path: path.write_bytes(b"#" * (1 << 21)), "has more than 1048576 bytes"),
        (lambda path: path.write_bytes(b"\xff"), "is not TOML"),
    ],
    ids=["absent", "folder", "endless", "pipe", "loop", "large", "no text"],
)
def test_a_file_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], told: str
) -> None:
    make(tmp_path / "c.toml")
    assert run(["serve", "--config", str(tmp_path / "c.toml")]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("PERILUNE_API_KEYS", "did you mean PERILUNE_API_KEY?"),
        ("PERILUNE_MAX_NUM_SEQ", "did you mean PERILUNE_MAX_NUM_SEQS?"),
        ("PERILUNE_MODEL", "none of ours and changes nothing"),
        ("PERILUNE_X\x1b", "'PERILUNE_X\\x1b'"),
        ("PERILUNE_SERVICE_PORT_HTTP", ""),
        ("PERILUNE_PORT_8000_TCP_ADDR", ""),
        ("PERILUNE_MAX_QUEUE", ""),
    ],
)
def test_variables_that_are_none_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, told: str
) -> None:
    monkeypatch.setenv(name, "16")
    assert run(["serve", "--show-config"]) == 0
    warned = capsys.readouterr().err
    assert told in warned
    assert bool(warned) == bool(told)


@pytest.mark.parametrize(
    ("arguments", "variables", "told"),
    [
        (("--usage-log", "/"), {}, "usage log `/` cannot be written: is a directory"),
        (("--usage-log", "/nowhere/log"), {}, "usage log `/nowhere/log` cannot be written: no such file"),
        ((), {"PERILUNE_API_KEY": "short"}, "PERILUNE_API_KEY: the key is not usable"),
        (("--max-bodies-mib", "1"), {}, "--max-bodies-mib is 1"),
        (("--host", "0.0.0.0"), {}, "0.0.0.0 can be reached from other machines"),  # noqa: S104 - refused
        (("--kv-events", "tcp://*:5557"), {}, "tcp://*:5557 can be reached"),
        (("--api-key-file", "/nowhere.toml"), {}, "key file `/nowhere.toml` cannot be read"),
        (("/nowhere",), {}, "/nowhere/config.json"),
    ],
)
def test_what_a_start_would_refuse_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    variables: Mapping[str, str],
    told: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run(["serve", "--show-config", *arguments]) in (2, 3)
    out, err = capsys.readouterr()
    assert told in err
    assert not out


def test_showing_makes_no_file(tmp_path: Path) -> None:
    assert run(["serve", "--show-config", "--usage-log", str(tmp_path / "log")]) == 0
    assert not list(tmp_path.iterdir())


def test_a_table_for_people(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--config", str(config), "--show-config"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert any(row.split() == ["port", "9000", "file", str(config)] for row in rows)
    assert any(row.split() == ["kv-tokens", "-", "default"] for row in rows)


def test_keys_can_not_stand_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--api-key", "sk-0123456789abcdef"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_every_option_is_documented(shown: Shown) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md").read_text()
    assert not [name for name in shown() if name != "model" and f"`--{name}`" not in text]
