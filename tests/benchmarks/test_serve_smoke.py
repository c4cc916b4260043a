"""The smoke benchmark: which problems a figure counts, what an answer on the wire is worth, and one real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.serve_smoke import (
    CALLS,
    FIGURES,
    LONG,
    WISH,
    Figure,
    Tally,
    exam_of,
    gsm8k_rows,
    main,
    number,
    problems,
    shares,
    spoken,
    table,
)
from training.judge import Spoken, Verdict
from training.measure import NANO, PICO, group

from perilune.types import FinishReason


def choice(content: str | None, finish: str, *calls: tuple[str, str]) -> dict[str, Any]:
    asked = [{"id": "x", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    message = {"role": "assistant", "content": content, "reasoning_content": "hm", "tool_calls": asked or None}
    return {"message": message, "finish_reason": finish}


def test_every_figure_has_its_problems() -> None:
    kinds = [kind for kind, _ in problems(NANO, FIGURES, 7, 0)]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "sum": 4, "difference": 4, "story2": 7, "call": 3, "parallel": 3, "row": 3,
        "call, answer": 3, "parallel, answer": 3, "row, answer": 3,
    }  # fmt: skip
    assert {kind for kind, _ in problems(NANO, LONG, 1, 0)} == {
        "sum, long",
        "story2, long",
        "call, long",
        "recall, long",
    }
    assert {kind for kind, _ in problems(PICO, FIGURES, 4, 0)} == {"sum", "difference", "call", "answer"}
    assert not list(problems(PICO, LONG, 4, 0))


def test_problems_are_equal_for_equal_seeds_and_sums_have_two_digits_or_three() -> None:
    first, again, other = (list(problems(NANO, FIGURES[:1], 60, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert {group(kind, chat)[-8:] for kind, chat in first} == {"2 digits", "3 digits"}


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (choice("5.", "stop"), Spoken("5.", (), FinishReason.STOP, "hm")),
        (choice(None, "tool_calls", ("f", "{}")), Spoken("", (("f", "{}"),), FinishReason.STOP, "hm")),
        (choice("5", "length"), Spoken("5", (), FinishReason.LENGTH, "hm")),
    ],
)
def test_answers_on_the_wire(said: dict[str, Any], read: Spoken) -> None:
    assert spoken(said) == read


def test_a_figure_sums_over_its_kinds() -> None:
    call, row = Tally(), Tally()
    for verdict in (Verdict(True, True), Verdict(True, False), Verdict(False, False)):
        call.add(verdict)
    row.add(Verdict(True, True))
    found = shares({"call": call, "row": row}, (Figure("valid", "valid", CALLS, 0.9), Figure("right", "right", CALLS)))
    assert (found["valid"]["right"], found["valid"]["count"], found["valid"]["share"]) == (3, 4, 0.75)
    assert (found["right"]["right"], found["right"]["low"], found["right"]["high"]) == (2, 0.15, 0.85)
    assert shares({}, FIGURES) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("It takes 2/2=<<2/2=1>>1 bolt.\n#### 3", 3),
        ("#### 70,000 and 5 more", 70000),
        ("#### -2.5", -2.5),
        ("First 12, then 1,004.", 1004),
        ("none", None),
    ],
)
def test_the_number_of_an_answer(text: str, value: float | None) -> None:
    assert number(text) == value


def test_gsm8k_has_a_number_in_every_row(shared: Path) -> None:
    rows = gsm8k_rows(shared / "data" / "gsm8k" / "test.jsonl", None)
    assert len(rows) == 1319
    assert all(wanted is not None and chat.messages[0]["content"].endswith(WISH) for chat, wanted in rows)
    assert rows[0][1] == 18


def test_models_go_by_their_names(tmp_path: Path) -> None:
    assert exam_of(str(tmp_path / "nano")) == (NANO, str(tmp_path / "nano"))
    exam, folder = exam_of("pico")
    assert exam == PICO
    assert (Path(folder) / "config.json").is_file()
    with pytest.raises(SystemExit, match="no exam for"):
        exam_of("mini")


def test_a_real_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "--model", "pico", "--count", "8", "--long"]) in (0, 1)
    out, err = capsys.readouterr()
    summary = json.loads(out)
    assert summary["failed"] == {}
    assert summary["ready_s"] > 0
    assert summary["ttft_ms"] > 0
    assert summary["tok_s"] > 0
    counts = {name: row["count"] for name, row in summary["accuracy"].items()}
    assert counts == {"sums": 8, "tool_valid": 8, "tool_right": 8, "after_result": 8}
    assert all(row["right"] >= 5 for row in summary["accuracy"].values())
    assert "long" not in summary, "pico has no long chats"
    assert "tok/s; sums" in err
    assert len(table(summary).splitlines()) == 5
