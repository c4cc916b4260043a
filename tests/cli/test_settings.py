"""Configuration file < environment < command line, and what ``--show-config`` says of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perilune.cli.main import run

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


def test_the_later_one_wins_and_says_so(shown: Shown, config: Path) -> None:
    variables = {"PERILUNE_PORT": "9001", "PERILUNE_GRACE": "2", "PERILUNE_RESTART": "true", "PERILUNE_MAX_QUEUE": ""}
    found = shown("--config", str(config), "--grace", "3", "/some/model", **variables)
    assert found["grace"] == (3.0, "command line")
    assert found["port"] == (9001, "environment PERILUNE_PORT")
    assert found["restart"] == (True, "environment PERILUNE_RESTART")
    assert found["max-num-seqs"] == (3, f"file {config}")
    assert found["served-model-name"] == (["a", "b"], f"file {config}")
    assert found["prefix-cache"] == (False, f"file {config}")
    assert found["max-queue"] == (5, f"file {config}"), "an empty variable is none; underscores are dashes"
    assert found["policy"] == ("fcfs", "default")
    assert found["model"] == ("/some/model", "command line")
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
        ("port = [1]", "`port` is [1], one value is", ""),
        ("served-model-name = 'a'", "`served-model-name` is 'a', a list is", ""),
        ("policy = 'fare'", "'fare' is not one of 'fcfs', 'priority', 'fair'", ""),
        ("[serve]\nport = 1", "there is no option `serve`", ""),
        ("port = ", "is not TOML", ""),
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


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--config", "/no/such/file"]) == 2
    assert "cannot be read: no such file" in capsys.readouterr().err


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
