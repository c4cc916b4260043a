"""Who may use the engine, and how long: bounds of the queue, limits of keys, deadlines.

What costs nothing to know is checked before a request's body is read (requests at once, the key's limits); what takes
rendering (prompt tokens, sequences) is checked by the engine that an admitted exchange is given (``metered``).

429 is for a key's own limits, 503 for a server that is full; both say when to come back. A request that no step has
touched by its queue deadline leaves with 503; one that is past its own deadline leaves with 408, or as an error event
where its answer has begun. Either way the engine forgets it within a step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers
from starlette.types import Scope

from perilune.errors import RequestError
from perilune.server.limits import Limits
from perilune.server.metered import MeteredEngine
from perilune.server.records import RECORD, Record
from perilune.server.replies import HttpError
from perilune.server.tenants import Tenant, retry_after

if TYPE_CHECKING:
    from perilune.server.state import Engine

TENANT: Final = "perilune.tenant"
"""Key of the scope under which the name of a request's key is; empty without keys."""
TIMEOUT_HEADER: Final = "x-request-timeout-s"

_SMOOTHING: Final = 0.2
_MAX_RETRY_S: Final = 60.0


@dataclass(slots=True)
class AdmissionStats:
    """Counted since the start.

    Attributes:
        admitted: requests that passed the first check.
        rate_limited: 429s. overloaded: 503s of a full queue. queue_timeouts, request_timeouts: deadlines that passed.
    """

    admitted: int = 0
    rate_limited: int = 0
    overloaded: int = 0
    queue_timeouts: int = 0
    request_timeouts: int = 0


class Admission:
    """What all exchanges share.

    Attributes:
        in_flight: requests that were admitted and have not ended.
        waiting_tokens: prompt tokens that no step has touched yet.
    """

    def __init__(self, limits: Limits) -> None:
        self.stats = AdmissionStats()
        self.in_flight = 0
        self.waiting_tokens = 0
        self.idle = asyncio.Event()
        """Set while nothing is in flight."""
        self.idle.set()
        self._limits = limits
        self._tenants: dict[str, Tenant] = {}
        self._waiting = 0
        self._last_start = 0.0
        self._pace_s = 0.0
        self._next_place = 0.0

    def tenant(self, name: str) -> Tenant:
        """The account of a key."""
        return self._tenants.setdefault(name, Tenant(name))

    def keep_tenants(self, names: Collection[str]) -> None:
        """Forgets accounts that are not in use and have no key any more."""
        for name in [name for name, tenant in self._tenants.items() if not tenant.in_flight and name not in names]:
            del self._tenants[name]

    @contextmanager
    def enter(self, scope: Scope, engine: Engine) -> Iterator[MeteredEngine]:
        """One request in flight, seen from its head alone.

        Raises:
            HttpError: 429, the key has no more; 503, the server is full; 400, an impossible deadline.
        """
        loop = asyncio.get_running_loop()
        record: Record = scope.get(RECORD) or Record("", scope["method"], scope["path"], loop.time())
        record.wanted_engine = True
        allowed_s = _allowed_s(Headers(scope=scope), self._limits)
        tenant = self.tenant(record.tenant)
        room = engine.config.max_num_seqs + self._limits.max_queue
        with self._counted():
            tenant.enter(loop.time())
            try:
                if self.in_flight >= room:
                    raise self._full(f"{self.in_flight} requests are in flight, no more are taken")
                self.stats.admitted += 1
                self.in_flight += 1
                self.idle.clear()
                try:
                    yield MeteredEngine(engine, self, record, tenant, record.started + allowed_s)
                finally:
                    self.in_flight -= 1
                    if self.in_flight == 0:
                        self.idle.set()
            finally:
                tenant.leave(loop.time() - record.started)

    def queue(self, tokens: int) -> None:
        """Prompt tokens of an exchange begin to wait.

        Raises:
            HttpError: 503, too many wait already. A prompt that nothing stands before may be of any length.
        """
        if self.waiting_tokens and self.waiting_tokens + tokens > self._limits.max_queue_tokens:
            raise self._full(f"{self.waiting_tokens} prompt tokens are waiting, {tokens} more are not taken")
        self.waiting_tokens += tokens

    def unqueue(self, tokens: int) -> None:
        """They have begun to run, or will never."""
        self.waiting_tokens -= tokens

    def wait(self, now: float) -> Wait:
        """A sequence has been given to the engine: the time until its first step tells the queue's pace."""
        self._waiting += 1
        return Wait(self, now)

    def end_wait(self, since: float, now: float, *, began: bool) -> None:
        """It has begun, or will never."""
        self._waiting -= 1
        if began:
            self._pace_s += _SMOOTHING * (now - max(self._last_start, since) - self._pace_s)
            self._last_start = now

    @property
    def queue_timeout_s(self) -> float:
        return self._limits.queue_timeout_s

    def late_in_queue(self) -> HttpError:
        """The queue's deadline has passed."""
        self.stats.queue_timeouts += 1
        return self._busy(f"the request was not begun within {self._limits.queue_timeout_s:g} s", "queue_timeout")

    def _full(self, message: str) -> HttpError:
        self.stats.overloaded += 1
        return self._busy(message, "overloaded")

    def _busy(self, message: str, code: str) -> HttpError:
        """A 503; its time to come back is that in which half of the queue will have begun, at the pace of late.

        Each refusal gets a place behind the one before: clients that all came back at once would take the machine
        from those that run.
        """
        now = time.monotonic()
        soonest = now + (self._waiting / 2) * self._pace_s
        self._next_place = min(max(self._next_place + self._pace_s / 2, soonest), now + _MAX_RETRY_S)
        wait_s = self._next_place - now
        return HttpError(503, message, code=code, headers={"retry-after": str(retry_after(wait_s))})

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except HttpError as error:
            self.stats.rate_limited += error.status == 429
            raise


@dataclass(slots=True)
class Wait:
    """One sequence's time between the engine's door and its first step. Ends once."""

    _admission: Admission
    _since: float
    over: bool = False

    def end(self, now: float, *, began: bool) -> None:
        """Further ends change nothing."""
        if not self.over:
            self.over = True
            self._admission.end_wait(self._since, now, began=began)


def _allowed_s(headers: Headers, limits: Limits) -> float:
    """The time a request may take: the server's bound, or less where its header says so."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return limits.request_timeout_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:  # NaN is not
        raise RequestError(f"{TIMEOUT_HEADER} is {given[:40]!r}, a number of seconds above 0 is needed")
    return min(seconds, limits.request_timeout_s)
