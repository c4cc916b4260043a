"""What happened to each request that a load generator sent, and the invariants that a good run keeps.

An ``Attempt`` is one request as its client saw it: sent, status, bytes, how it ended. ``violations`` judges a whole run
by I1–I7 (docs/performance.md states them). Pure: knows neither sockets nor processes, so the judge itself is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

End = Literal["complete", "error", "cut", "timeout", "cancelled", "unreachable"]
"""``complete``: the whole answer. ``error``: a refusal by status, or an error event in a stream. ``cut``: the
connection ended in between and nobody said why. ``timeout``: the client gave up waiting. ``cancelled``: the client
meant to leave. ``unreachable``: no connection, so nothing was asked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client reads of a completion, streamed or not."""

    content: str
    reasoning: str
    finish: str
    completion_tokens: int


@dataclass(slots=True)
class Attempt:
    """One request. Times are of the monotonic clock, in seconds.

    Attributes:
        surplus: bytes that came after the response had ended.
        finishes, dones: chunks with a ``finish_reason``, and ``[DONE]`` marks; a whole stream has one of each.
    """

    question: str
    streamed: bool
    sent: float
    ended: float = 0.0
    status: int = 0
    retry_after: float | None = None
    end: End = "cut"
    answer: Answer | None = None
    response_id: str = ""
    events: int = 0
    finishes: int = 0
    dones: int = 0
    surplus: int = 0
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.ended - self.sent

    @property
    def rejected(self) -> bool:
        """Refused because the server is full, with a time to come back: not a failure."""
        return self.status in (429, 503) and self.retry_after is not None and self.end == "error"

    @property
    def server_fault(self) -> bool:
        """Any 5xx but a rejection."""
        return self.status >= 500 and not self.rejected

    @property
    def lost(self) -> bool:
        """Sent, and neither an answer nor an explicit error came back."""
        return self.end in ("cut", "timeout")

    @property
    def duplicated(self) -> bool:
        """Something of the answer came twice on its own connection."""
        return self.finishes > 1 or self.dones > 1 or self.surplus > 0


@dataclass(frozen=True, slots=True)
class Quiet:
    """A server at rest. ``blocks`` are those that requests own; None where the server does not tell."""

    running: int
    waiting: int
    descriptors: int
    children: int
    blocks: int | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault and when ``/ready`` told of it and of its end; None: never."""

    name: str
    detected_s: float | None
    recovered_s: float | None
    detect_within_s: float
    recover_within_s: float

    @property
    def kept(self) -> bool:
        """Whether both came in time."""
        detected = self.detected_s is not None and self.detected_s <= self.detect_within_s
        return detected and self.recovered_s is not None and self.recovered_s <= self.recover_within_s


@dataclass(slots=True)
class Run:
    """All that is judged together.

    Attributes:
        golden: the right answer of each question, taken from an idle server.
        unready: times that ``/ready`` was not 200 although nothing was wrong.
        counted: requests that the server's own metrics call complete; None where it has none.
    """

    golden: Mapping[str, Answer]
    attempts: list[Attempt] = field(default_factory=list)
    before: Quiet | None = None
    after: Quiet | None = None
    faults: list[Fault] = field(default_factory=list)
    unready: int = 0
    counted: int | None = None


def violations(run: Run) -> dict[str, int]:
    """How often each invariant was broken, by its name."""
    attempts = run.attempts
    complete = [attempt for attempt in attempts if attempt.end == "complete"]
    return {
        "I1": sum(attempt.lost for attempt in attempts),
        "I2": sum(attempt.answer != run.golden[attempt.question] for attempt in complete),
        "I3": sum(attempt.duplicated for attempt in attempts) + _repeats(a.response_id for a in attempts),
        "I4": _not_quiet(run.before, run.after),
        "I5": _unaccounted(attempts, run.counted),
        "I6": run.unready + sum(not fault.kept for fault in run.faults),
        "I7": sum(attempt.status == 500 for attempt in attempts),
    }


def _repeats(ids: Iterable[str]) -> int:
    """How often an id was given to more than one answer."""
    return sum(count - 1 for name, count in Counter(ids).items() if name)


def _not_quiet(before: Quiet | None, after: Quiet | None) -> int:
    """What a server kept of a run that is over: requests, blocks, descriptors, processes."""
    if before is None or after is None:
        return 0
    left = [after.running > 0, after.waiting > 0, (after.blocks or 0) > 0]
    return sum([*left, after.descriptors > before.descriptors, after.children != before.children])


def _unaccounted(attempts: Sequence[Attempt], counted: int | None) -> int:
    """Requests that ended in no known way, and by how much server and clients differ on what was completed."""
    odd = sum(attempt.end not in get_args(End) for attempt in attempts)
    if counted is None:
        return odd
    seen = sum(attempt.end == "complete" for attempt in attempts)
    # Who left, or was cut off, may have been answered by then.
    unsure = sum(attempt.end in ("cancelled", "cut", "timeout") for attempt in attempts)
    return odd + max(0, seen - counted) + max(0, counted - seen - unsure)
