"""Cards say what was measured; a run can be looked at while it goes on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training.configs import NANO, RECIPES, Recipe
from training.evaluate import wilson
from training.judge import Spoken, Verdict
from training.measure import EXAMS, Answered
from training.plot import curve
from training.samples import Call, Reply, Sample, Wish
from training.train import train

from perilune.errors import UsageError
from perilune.types import FinishReason
from training import cards, report

LOG = [{"step": 8000, "tokens": 49_000_000, "loss": 0.1, "cpu_s": 5.0, "wall_s": 6.0}]


def tallies(right: int) -> dict[str, dict[str, int]]:
    names = ["sum, 1 digits", "sum, 2 digits", "sum, 3 digits", "difference, 2 digits", "difference, 3 digits"]
    names += [kind for kind in EXAMS["nano"].wishes if kind not in ("sum", "difference")]
    return {name: {"count": 100, "valid": 99, "right": right} for name in names}


def test_nanos_card_names_every_kind_once_with_counts_and_aims() -> None:
    text = report.card(NANO, LOG, {"0": tallies(96), "1": tallies(90)}, 6_500_000)
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ") and " of 1" in line]
    names = cards.NAMES["nano"]
    for group in tallies(0):
        assert rows.count(names.get(group, group)) == 1, group
    low, high = wilson(384, 400)
    assert f"| 95% | 384 of 400: 96.0% ({low:.1%} to {high:.1%}) | 360 of 400: 90.0%" in text
    assert "| tool calls, valid | 98% | 297 of 300: 99.0%" in text
    assert "6,500,000 bytes" in text
    assert "fails more often than not" not in text


def test_nanos_card_says_where_it_fails() -> None:
    found = tallies(96) | {"story3": {"count": 100, "valid": 100, "right": 49}}
    assert "**Where it fails more often than not**, greedily: word problems, three steps." in report.card(
        NANO, LOG, {"0": found}, 1
    )


def test_what_was_not_measured_is_said() -> None:
    found = {"0": {"talk": {"count": 4, "valid": 4, "right": 4}}}
    assert "| tool calls, right | 95% | not measured |" in report.card(NANO, LOG, found, 1)


def test_wrong_answers_are_shown_in_full() -> None:
    reply = Reply("price of tea @find", "", (Call("find", 0, '{"of":"tea"}'),))
    chat = Sample("call", ({"role": "user", "content": "x" * 4000},), (), reply)
    said = Spoken("no idea", (("lose", "{}"),), FinishReason.LENGTH, "price of\ntea")
    wrong = Answered("call", chat, said, Verdict(False, False))
    right = replace(wrong, verdict=Verdict(True, True))
    text = "\n".join(report.wrong([right, *[wrong] * 9], shown=2))
    assert text.count("## call, wrong") == 2
    assert '<think>price of tea @find</think> find({"of":"tea"})' in text
    assert "SAID (length): <think>price of\n      tea</think> no idea lose({})" in text
    assert len(text) < 2 * 2000


def test_a_run_is_measured_as_it_stands(
    small: Recipe, vocabulary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(vocabulary, tmp_path / "run"))
    state = train(small, run, tmp_path, stop=2)
    params, progress = report.average_of(run / "state.safetensors", small)
    assert progress["step"] == 2
    assert all(torch.equal(params[name], param) for name, param in state.average.items())
    with pytest.raises(UsageError, match="holds another model than nano"):
        report.average_of(run / "state.safetensors", RECIPES["nano"])
    with pytest.raises(UsageError, match="no saved state"):
        report.average_of(run / "none", small)
    exam = replace(EXAMS["pico"], wishes={"sum": Wish(kind="sum", held_out=True)}, max_tokens=8)
    monkeypatch.setitem(EXAMS, "pico", exam)
    before = (run / "state.safetensors").read_bytes()
    text = report.report_state(small, run / "state.safetensors", tmp_path / "out", 3)
    assert text.startswith("step 2, ")
    assert (tmp_path / "out" / "pico" / "config.json").is_file()
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert sum(tally["count"] for tally in figures["figures"]["0"].values()) == 3
    assert "wrong 1" in (tmp_path / "out" / "wrong.md").read_text()
    assert (run / "state.safetensors").read_bytes() == before


def test_a_key_may_be_long_and_a_kind_may_come_late() -> None:
    log: list[dict[str, Any]] = [
        {"step": 20, "tokens": 1000, "loss": 2.0, "held_out": {"sum": (0.25, 0.1)}},
        {"step": 40, "tokens": 2000, "loss": 0.5, "held_out": {"sum": (0.5, 0.1), "story2, new frames": (1.0, 0.1)}},
    ]
    assert 'viewBox="0 0 816 380"' in curve(log, "title")
    assert 'viewBox="0 0 760 380"' in curve(log[:1], "title")
