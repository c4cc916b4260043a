"""The judge of load tests: a good history passes, and each kind of fault is seen where it belongs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.load.history import Answer, Attempt, Fault, Quiet, Run, violations

RIGHT = Answer("5", "2+3", "stop", 6)
REST = Quiet(running=0, waiting=0, descriptors=20, children=1, blocks=0)


def attempt(**changes: Any) -> Attempt:
    fields: dict[str, Any] = {"status": 200, "end": "complete", "answer": RIGHT, "finishes": 1, "dones": 1}
    return Attempt("2+3", True, 0.0, **{"ended": 1.0, "response_id": "a", **fields, **changes})


def run(*attempts: Attempt, **changes: Any) -> Run:
    fields: dict[str, Any] = {"before": REST, "after": REST, "faults": [], "unready": 0, "counted": None, **changes}
    return Run({"2+3": RIGHT}, list(attempts), **fields)


def broken(judged: Run) -> dict[str, int]:
    return {name: count for name, count in violations(judged).items() if count}


def test_a_good_run_breaks_nothing() -> None:
    refused = attempt(status=503, end="error", answer=None, retry_after=1.0, response_id="", finishes=0, dones=0)
    left = attempt(end="cancelled", answer=None, response_id="b", finishes=0, dones=0)
    fault = Fault("stopped", 2.9, 0.1, 5.0, 5.0)
    assert broken(run(attempt(), refused, left, faults=[fault], counted=2)) == {}
    assert refused.rejected
    assert not refused.server_fault


@pytest.mark.parametrize(
    ("invariant", "judged"),
    [
        ("I1", lambda: run(attempt(end="cut", answer=None))),
        ("I1", lambda: run(attempt(end="timeout", answer=None))),
        ("I2", lambda: run(attempt(answer=Answer("55", "2+3", "stop", 7)))),
        ("I3", lambda: run(attempt(finishes=2))),
        ("I3", lambda: run(attempt(dones=2))),
        ("I3", lambda: run(attempt(surplus=1))),
        ("I3", lambda: run(attempt(), attempt())),
        ("I4", lambda: run(after=Quiet(1, 0, 20, 1, 0))),
        ("I4", lambda: run(after=Quiet(0, 1, 20, 1, 0))),
        ("I4", lambda: run(after=Quiet(0, 0, 21, 1, 0))),
        ("I4", lambda: run(after=Quiet(0, 0, 20, 2, 0))),
        ("I4", lambda: run(after=Quiet(0, 0, 20, 1, 3))),
        ("I5", lambda: run(attempt(), counted=0)),
        ("I5", lambda: run(attempt(), counted=2)),
        ("I5", lambda: run(attempt(end="vanished", answer=None))),
        ("I6", lambda: run(unready=1)),
        ("I6", lambda: run(faults=[Fault("stopped", None, 0.1, 5.0, 5.0)])),
        ("I6", lambda: run(faults=[Fault("stopped", 6.0, 0.1, 5.0, 5.0)])),
        ("I6", lambda: run(faults=[Fault("stopped", 1.0, None, 5.0, 5.0)])),
        ("I7", lambda: run(attempt(status=500, end="error", answer=None))),
    ],
)
def test_each_fault_breaks_its_invariant(invariant: str, judged: Callable[[], Run]) -> None:
    assert broken(judged()) == {invariant: 1}


def test_a_503_without_a_time_to_come_back_is_a_fault() -> None:
    assert attempt(status=503, end="error", answer=None).server_fault
