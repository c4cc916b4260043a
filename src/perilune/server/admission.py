"""Who may use the engine, and how long: bounds of the queue, limits of keys, deadlines.

What costs nothing to know is checked before a request's body is read (requests at once, the key's limits); what takes
rendering (prompt tokens) is checked where a rendered request reaches the engine. Endpoints see none of this: the engine
they are given keeps the bounds of the exchange it was given for, and raises ``HttpError`` where they are passed.

429 is for a key's own limits, 503 for a server that is full; both say when to come back. A request that no step has
touched by its queue deadline leaves with 503; one that is past its own deadline leaves with 408, or as an error event
where its answer has begun. Either way the engine forgets it within a step.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Collection, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from perilune.config import EngineConfig, ModelSpec
from perilune.errors import PeriluneError, RequestError
from perilune.server.limits import Limits
from perilune.server.records import RECORD, Record
from perilune.server.replies import HttpError
from perilune.server.tenants import Tenant, retry_after
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, TokenOut

if TYPE_CHECKING:
    from perilune.engine.options import EngineStatus
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
                    yield MeteredEngine(engine, self, _Exchange(record, tenant, record.started + allowed_s))
                finally:
                    self.in_flight -= 1
                    if self.in_flight == 0:
                        self.idle.set()
            finally:
                tenant.leave(loop.time() - record.started)

    def queue(self, tokens: int) -> None:
        """Prompt tokens begin to wait.

        Raises:
            HttpError: 503, too many wait already. A prompt that nothing stands before may be of any length.
        """
        if self.waiting_tokens and self.waiting_tokens + tokens > self._limits.max_queue_tokens:
            raise self._full(f"{self.waiting_tokens} prompt tokens are waiting, {tokens} more are not taken")
        self.waiting_tokens += tokens
        self._waiting += 1

    def leave_queue(self, tokens: int, since: float, *, began: bool) -> None:
        """They have begun to run, or will never."""
        self.waiting_tokens -= tokens
        self._waiting -= 1
        if began:
            now = asyncio.get_running_loop().time()
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


@dataclass(slots=True)
class _Exchange:
    """An admitted exchange. ``deadline``: on the event loop's clock."""

    record: Record
    tenant: Tenant
    deadline: float

    def late(self) -> HttpError:
        seconds = self.deadline - self.record.started
        # OpenAI's SDKs heed it: coming back at once would only be late again.
        headers = {"x-should-retry": "false"}
        error = HttpError(
            408, f"the answer was not complete within {seconds:g} s", code="deadline_exceeded", headers=headers
        )
        error.type = "timeout_error"
        return error


class MeteredEngine:
    """The engine, for one exchange."""

    def __init__(self, engine: Engine, admission: Admission, exchange: _Exchange) -> None:
        self._engine, self._admission, self._exchange = engine, admission, exchange
        self._prompts: dict[int, tuple[int, ...]] = {}  # those that are paid for, by identity

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def spec(self) -> ModelSpec:
        return self._engine.spec

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def status(self) -> EngineStatus:
        return self._engine.status()

    async def close(self) -> None:
        """The engine belongs to the server."""

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        """The engine's news of one sequence.

        Raises:
            HttpError: 429, 503, 408: see the module. RequestError, EngineError: the engine's own.
        """
        clock = asyncio.get_running_loop().time
        since = clock()
        request = self._as_tenant(request)
        tokens = self._pay_prompt(request.prompt, since)
        queue_deadline = since + self._admission.queue_timeout_s
        limit, waits = min(self._exchange.deadline, queue_deadline), True
        meter = _Meter(self._exchange, counts_cached=tokens > 0)
        try:
            async with aclosing(self._engine.generate(request)) as news:
                while True:
                    async with asyncio.timeout_at(limit):
                        out = await anext(news, None)
                    if out is None:
                        return
                    if waits:
                        waits, limit = False, self._exchange.deadline
                        self._admission.leave_queue(tokens, since, began=True)
                    if meter.add(out, clock()):
                        yield out
        except TimeoutError:
            meter.end("abort")
            if clock() < self._exchange.deadline:
                raise self._admission.late_in_queue() from None
            self._admission.stats.request_timeouts += 1
            raise self._exchange.late() from None
        except PeriluneError:
            meter.end("error")
            raise
        finally:
            if waits:
                self._admission.leave_queue(tokens, since, began=False)
            meter.end("abort")

    def _pay_prompt(self, prompt: tuple[int, ...], now: float) -> int:
        """Charges a prompt once, however many answers are made of it; the tokens it adds to the queue."""
        known = id(prompt) in self._prompts
        tokens = 0 if known else len(prompt)
        if not known:
            self._exchange.tenant.check_tokens(tokens, now)
        self._admission.queue(tokens)
        if not known:
            self._prompts[id(prompt)] = prompt
            self._exchange.tenant.charge(tokens, now)
            self._exchange.record.prompt_tokens += tokens
        return tokens

    def _as_tenant(self, request: Request) -> Request:
        """The request under its key's name: its own prefix cache, its priorities, its longest answer.

        Raises:
            RequestError: a longer answer was asked for.
        """
        tenant = self._exchange.tenant
        if not tenant.name:
            return request
        limits, sampling, priority = tenant.limits, request.sampling, request.priority
        if limits.priority is not None:
            priority = min(max(priority, limits.priority[0]), limits.priority[1])
        if limits.max_tokens is not None and sampling.max_tokens > limits.max_tokens:
            # Whoever named no limit is given all of the context: that is no wish for so many tokens.
            if sampling.max_tokens < self.max_model_len - len(request.prompt):
                raise RequestError(
                    f"max_tokens is {sampling.max_tokens}, this key may ask for {limits.max_tokens}",
                    param="max_tokens",
                )
            sampling = msgspec.structs.replace(sampling, max_tokens=limits.max_tokens)
        # The length comes first, so that no tenant can write another one's salt.
        salt = f"{len(tenant.name)}:{tenant.name}:{request.cache_salt}"
        return msgspec.structs.replace(
            request, tenant=tenant.name, priority=priority, sampling=sampling, cache_salt=salt
        )


class _Meter:
    """Counts one sequence into its exchange's record, and into its tenant's account."""

    def __init__(self, exchange: _Exchange, *, counts_cached: bool) -> None:
        self._exchange = exchange
        self._counts_cached = counts_cached
        self._told = 0
        self._ended = False

    def add(self, out: TokenOut, now: float) -> bool:
        """Takes one message; whether it says anything beyond that the sequence has begun to run."""
        record = self._exchange.record
        if record.queued_s is None:
            record.queued_s = now - record.started
        if self._counts_cached:
            self._counts_cached = False
            record.cached_tokens += out.cached_tokens
        if (more := out.completion_tokens - self._told) > 0:
            if record.first_s is None:
                record.first_s = now - record.started
            self._told = out.completion_tokens
            record.completion_tokens += more
            self._exchange.tenant.charge(more, now)
        if out.finish is not None:
            self.end(out.finish.value)
        return bool(out.tokens or out.tail or out.finish or out.prompt_logprobs or out.completion_tokens)

    def end(self, how: str) -> None:
        """Notes the first end that is told."""
        if not self._ended:
            self._ended = True
            self._exchange.record.finish.append(how)
