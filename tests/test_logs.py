"""Log lines: whatever stands in them, one event is one line, and it reads back as the fields that it was made of."""

from __future__ import annotations

import io
import json
import logging
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from perilune import logs

NAMES = ("path", "status", "error", "key")
HEAD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ [\w.]+: ")


pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def written(form: logs.LogFormat, message: str, **values: object) -> str:
    """What the program's log has after one event."""
    stream = io.StringIO()
    logs.configure(form, "info", stream)
    logging.getLogger("perilune.test").warning("%s", message, extra=logs.fields(**values))
    return stream.getvalue()


def read(line: str) -> tuple[str, dict[str, str]]:
    """Message and fields of a line of text: words, of which those in quotes are JSON strings."""
    rest = HEAD.sub("", line, count=1)
    assert rest != line
    if rest.startswith('"'):
        message, end = json.JSONDecoder().raw_decode(rest)
    else:
        found = re.search(r" \w+=", rest)
        end = len(rest) if found is None else found.start()
        message = rest[:end]
    fields: dict[str, str] = {}
    while end < len(rest):
        assert rest[end] == " "
        name, _, rest = rest[end + 1 :].partition("=")
        if rest.startswith('"'):
            value, end = json.JSONDecoder().raw_decode(rest)
        else:
            end = rest.find(" ") if " " in rest else len(rest)
            value = rest[:end]
            assert not set(value) & {"=", '"'}
        assert name not in fields
        fields[name] = value
    return message, fields


anything = st.text(st.characters(codec=None), max_size=30) | st.sampled_from(
    [
        "/x status=200",
        "a\nb",
        '"',
        "\\",
        '\\" status=200',
        "\x7f",
        "\x85",
        "\u2028",
        "\ud800",
        "\U000e0001",
        "",
        " ",
        "=",
    ]
)


@given(anything, st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, anything)))
@example("request", {"path": "/v1/x\n2026-01-01T00:00:00.000Z INFO perilune.access: request status=200"})
@example("request", {"path": "/x status=200 key=alice", "status": "404"})
@example("lost: x status=200", {"status": "1"})
def test_a_line_reads_back_as_it_was_meant(message: str, values: dict[str, str]) -> None:
    line = written("text", message, **values)
    assert line.endswith("\n")
    assert line[:-1].isprintable(), "nothing ends the line or moves a cursor"
    assert read(line[:-1]) == (message, values)


@given(anything, anything)
def test_json_lines(message: str, path: str) -> None:
    line = written("json", message, path=path)
    assert line.endswith("\n")
    assert line[:-1].isprintable()
    entry = json.loads(line)
    assert (entry["message"], entry["path"]) == (message, path)


def test_what_is_plain_stays_plain() -> None:
    line = written("text", "request it's (5 %)", path="/v1/x?a\\b,é", status=200, seconds=0.25, gone=True, key=None)
    assert HEAD.sub("", line) == "request it's (5 %) path=/v1/x?a\\b,é status=200 seconds=0.25 gone=True\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks_stay_in_their_event(form: logs.LogFormat) -> None:
    stream = io.StringIO()
    logs.configure(form, "info", stream)
    try:
        raise ValueError("x\n2026-01-01T00:00:00.000Z INFO perilune.access: request\r\x1b[2J")
    except ValueError:
        logging.getLogger("perilune.test").exception("failed")
    first, *rest = stream.getvalue().splitlines()
    assert all(line.startswith("    | ") and line.isprintable() for line in rest)
    assert bool(rest) == (form == "text")
    assert first.isprintable()


def test_numbers_that_json_has_none_for() -> None:
    def refuse(constant: str) -> Any:
        pytest.fail(f"{constant} is not JSON")

    entry = json.loads(written("json", "m", a=float("nan"), b=float("inf"), c=0.5), parse_constant=refuse)
    assert (entry["a"], entry["b"], entry["c"]) == ("nan", "inf", 0.5)
