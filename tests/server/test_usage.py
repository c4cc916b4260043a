"""The usage log: a line is JSON on a line of its own, and what can't be written costs that line only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perilune.server.records import Record
from perilune.server.usage import UsageLog


def record(model: str, error: str = "") -> Record:
    return Record("id", "POST", "/v1/completions", 0.0, model=model, error=error, wanted_engine=True)


@pytest.mark.parametrize("text", ["a\nb", 'a","status":200,"x":"', "\x85\u2028\x00\x7f", "a status=200", "\U000e0001"])
def test_no_text_makes_a_line_or_a_field(tmp_path: Path, text: str) -> None:
    log = UsageLog(tmp_path / "usage")
    log.write(record(text, text).usage(1.0))
    log.close()
    data = (tmp_path / "usage").read_bytes()
    assert data.count(b"\n") == 1
    entry = json.loads(data)
    assert (entry["model"], entry["error"], entry["status"]) == (text, text, 0)


def test_a_name_in_no_encoding_costs_its_lines_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = UsageLog(tmp_path / "usage")
    for model in ("first", "\udcff", "\udcff", "last"):
        log.write(record(model).usage(1.0))
    log.close()
    lines = (tmp_path / "usage").read_text().splitlines()
    assert [json.loads(line)["model"] for line in lines] == ["first", "last"]
    assert log.lost == 2
    assert caplog.text.count("loses lines: a name in it is not Unicode") == 1
