"""One exchange as operators see it: who, what, how long, how it ended. Never what was said.

The edge makes a record for each request and writes it to the log at the end; admission fills in tokens and times. For
requests that wanted the engine the same facts go to the usage log.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

import msgspec

RECORD: Final = "perilune.record"
"""Key of the scope under which a request's record is."""


@dataclass(slots=True)
class Record:
    """Facts of one exchange. Times are the event loop's; durations are seconds from ``started``.

    Attributes:
        wanted_engine: it asked for tokens; then it stands in the usage log, whatever became of it.
        finish: how each of its sequences ended in the engine.
        queued_s: until its first step. first_s: until its first token.
    """

    id: str
    method: str
    path: str
    started: float
    tenant: str = ""
    model: str = ""
    wanted_engine: bool = False
    status: int = 0
    error: str = ""
    client_gone: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: list[str] = field(default_factory=list)
    queued_s: float | None = None
    first_s: float | None = None

    def usage(self, now: float) -> UsageLine:
        """The record as a line of the usage log."""
        return UsageLine(
            time=time.time(),
            request_id=self.id,
            key=self.tenant,
            model=self.model,
            status=self.status,
            error=self.error,
            client_gone=self.client_gone,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            finish=list(self.finish),
            queued_s=_rounded(self.queued_s),
            first_token_s=_rounded(self.first_s),
            total_s=round(now - self.started, 6),
        )


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the usage log. ``time`` is that of the end, in seconds since 1970; ``key`` is a key's name.

    ``finish`` has a word per sequence: ``stop``, ``length``, ``abort``, ``error``. ``status`` 0: the client had gone
    before there was one.
    """

    time: float
    request_id: str
    key: str
    model: str
    status: int
    error: str
    client_gone: bool
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish: list[str]
    queued_s: float | None
    first_token_s: float | None
    total_s: float


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
