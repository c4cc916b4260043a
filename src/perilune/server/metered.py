"""The engine as one admitted exchange sees it: within its deadlines, its key's limits, and its share of the slots.

What costs no step is checked in ``begin``, for all sequences of the exchange before any of them starts: a request is
let in whole or not at all. Of one exchange at most ``max_num_seqs`` sequences are in the engine at once, and of all
exchanges of a key at most its ``concurrency``: the others are sent as places become free, so that a request of a
thousand prompts does not stand before everybody else's. Raises ``HttpError`` where a bound is passed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from perilune.config import EngineConfig, ModelSpec
from perilune.errors import PeriluneError, RequestError
from perilune.server.records import Record
from perilune.server.replies import HttpError
from perilune.server.tenants import Tenant
from perilune.text.tokenizer import Tokenizer
from perilune.types import Request, TokenOut

if TYPE_CHECKING:
    from perilune.engine.options import EngineStatus
    from perilune.server.admission import Admission
    from perilune.server.state import Engine


class MeteredEngine:
    """The engine, for one exchange.

    Args:
        deadline: of the whole exchange, on the event loop's clock.
    """

    def __init__(self, engine: Engine, admission: Admission, record: Record, tenant: Tenant, deadline: float) -> None:
        self._engine, self._admission = engine, admission
        self._record, self._tenant, self._deadline = record, tenant, deadline
        self._waiting: dict[int, int] = {}  # tokens of prompts that no step has touched, by identity of the prompt
        # Not more than the key may have: sequences of its other exchanges get their turn.
        most = min(engine.config.max_num_seqs, tenant.limits.concurrency or engine.config.max_num_seqs)
        self._places = asyncio.Semaphore(most)
        self._timer: asyncio.Timeout | None = None
        self._sent = False  # something of it has come past its key's concurrency

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

    @asynccontextmanager
    async def begin(self, requests: Sequence[Request]) -> AsyncIterator[list[Request]]:
        """Lets the sequences of an exchange in; yields them under its key's name, to be given to ``generate``.

        Bounds the time of the body: until a sequence has begun by the queue's deadline, from then on by the
        exchange's. One timer for all: one for each token would cost an eighth of it.

        Raises:
            HttpError: 429, 503, 408: see the module and ``admission``. RequestError: a longer answer than the key may
                ask for.
        """
        clock = asyncio.get_running_loop().time
        now = clock()
        admitted = [self._as_tenant(request) for request in requests]
        prompts = {id(request.prompt): len(request.prompt) for request in admitted}
        total = sum(prompts.values())
        self._tenant.check_tokens(total, now)
        self._admission.queue(total)
        paid = self._tenant.charge(total, now)
        self._waiting = prompts
        queue_deadline = now + self._admission.queue_timeout_s
        try:
            async with asyncio.timeout_at(min(self._deadline, queue_deadline)) as self._timer:
                yield admitted
        except TimeoutError:
            if self._timer is None or not self._timer.expired():
                raise
            raise self._late(clock()) from None
        finally:
            unread = sum(self._waiting.values())
            self._waiting = {}
            self._timer = None
            self._admission.unqueue(unread)
            if paid is not None:
                paid.take(-unread, clock())

    async def generate(self, request: Request) -> AsyncGenerator[TokenOut, None]:
        """The engine's news of one sequence that was let in, as soon as there is a place for it.

        Raises:
            RequestError, EngineError: the engine's own.
        """
        clock = asyncio.get_running_loop().time
        async with AsyncExitStack() as places:
            await places.enter_async_context(self._places)
            if self._tenant.places is not None:
                await places.enter_async_context(self._tenant.places)
            self._sent = True
            wait = self._admission.wait(clock())
            meter = _Meter(self._record, self._tenant)
            try:
                async with aclosing(self._engine.generate(request)) as news:
                    async for out in news:
                        now = clock()
                        if not wait.over:
                            wait.end(now, began=True)
                            self._begin_prompt(request, out)
                        if meter.add(out, now):
                            yield out
            except PeriluneError:
                meter.end("error")
                raise
            finally:
                wait.end(clock(), began=False)
                meter.end("abort")

    def _begin_prompt(self, request: Request, out: TokenOut) -> None:
        """The first step of a sequence: what it waited for is over, and the queue's deadline with it.

        A prompt is billed once, as its first sequence finds it in the cache.
        """
        if (tokens := self._waiting.pop(id(request.prompt), 0)) > 0:
            self._admission.unqueue(tokens)
            self._record.prompt_tokens += tokens
            self._record.cached_tokens += out.cached_tokens
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(self._deadline)

    def _late(self, now: float) -> HttpError:
        """What to say where the time was over."""
        if self._record.queued_s is None and now < self._deadline:
            return self._admission.late_in_queue() if self._sent else self._tenant.too_many("sequences", now)
        self._admission.stats.request_timeouts += 1
        seconds = self._deadline - self._record.started
        # OpenAI's SDKs heed it: coming back at once would only be late again.
        headers = {"x-should-retry": "false"}
        message = f"the answer was not complete within {seconds:g} s"
        error = HttpError(408, message, code="deadline_exceeded", headers=headers)
        error.type = "timeout_error"
        return error

    def _as_tenant(self, request: Request) -> Request:
        """The request under its key's name: its own prefix cache, its priorities, its longest answer.

        Raises:
            RequestError: a longer answer was asked for.
        """
        if not self._tenant.name:
            return request
        limits, sampling, priority = self._tenant.limits, request.sampling, request.priority
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
        salt = f"{len(self._tenant.name)}:{self._tenant.name}:{request.cache_salt}"
        return msgspec.structs.replace(
            request, tenant=self._tenant.name, priority=priority, sampling=sampling, cache_salt=salt
        )


class _Meter:
    """Counts one sequence into its exchange's record, and into its tenant's account."""

    def __init__(self, record: Record, tenant: Tenant) -> None:
        self._record, self._tenant = record, tenant
        self._told = 0
        self._ended = False

    def add(self, out: TokenOut, now: float) -> bool:
        """Takes one message; whether it says anything beyond that the sequence has begun to run."""
        record = self._record
        if record.queued_s is None:
            record.queued_s = now - record.started
        if (more := out.completion_tokens - self._told) > 0:
            if record.first_s is None:
                record.first_s = now - record.started
            self._told = out.completion_tokens
            record.completion_tokens += more
            self._tenant.charge(more, now)
        if out.finish is not None:
            self.end(out.finish.value)
        return bool(out.tokens or out.tail or out.finish or out.prompt_logprobs or out.completion_tokens)

    def end(self, how: str) -> None:
        """Notes the first end that is told."""
        if not self._ended:
            self._ended = True
            self._record.finish.append(how)
