"""Token-budget scheduling: there are no prefill and decode phases, only tokens still to be computed.

Every step hands out ``max_batched_tokens``: running requests first, in order of admission (or of priority), then
waiting ones. A prompt longer than what is left of the budget runs in chunks; a prompt whose beginning the prefix cache
holds starts behind it. So chunked prefill, prefix hits and decode are one rule.

Blocks are taken as a request grows. When none are free, the running request admitted last gives its own back and waits
at the head of the queue to be computed again; its published blocks stay in the prefix cache, so that usually little is.
A request is admitted only when its whole prompt fits beside a small reserve, which keeps preemption rare.

Several steps may be in flight: ``plan`` may run before the last plan's ``commit``. What is given back is fenced by the
last planned step, and a block is published only when the step that filled it has been committed. Torch-free: plans and
results are plain data, and the scheduler never sees a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from perilune.config import EngineConfig
from perilune.kv.blocks import BlockPool, blocks_for
from perilune.kv.prefix import BlockChain, root_hash
from perilune.sched.queue import WaitingQueue
from perilune.sched.state import RequestState
from perilune.types import (
    LAST_SAMPLED,
    BlockDelta,
    FinishReason,
    RowPlan,
    RowResult,
    SlotOpen,
    StepPlan,
    StepResult,
    TokenOut,
)


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Owner:
    """Whose row it is. ``preemptions`` tells whether the request still has the blocks that the row writes."""

    state: RequestState
    preemptions: int


@dataclass(slots=True)
class _Draft:
    """The plan that is being made."""

    budget: int
    rows: list[RowPlan] = field(default_factory=list)
    owners: list[_Owner] = field(default_factory=list)
    opens: list[SlotOpen] = field(default_factory=list)
    blocks: list[BlockDelta] = field(default_factory=list)


class Scheduler:
    """Decides what each step runs.

    Args:
        num_blocks: of the cache, block 0 included. The longest allowed request must fit.
        namespace: names what cached values depend on (``kv.prefix``).
    """

    def __init__(self, config: EngineConfig, num_blocks: int, namespace: str = "") -> None:
        self.config = config
        self.pool = BlockPool(num_blocks, config.block_size, record_events=config.record_events)
        self.queue = WaitingQueue(config.policy)
        self.stats = SchedulerStats()
        self._namespace = namespace
        self._reserve = int(config.watermark * num_blocks)
        self._running: list[RequestState] = []
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._closes: list[int] = []
        self._in_flight: deque[tuple[StepPlan, list[_Owner]]] = deque()
        self._step = 0
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def step(self) -> int:
        """The last planned step."""
        return self._step

    def chain(self, salt: str) -> BlockChain:
        """Names of the blocks of a new sequence."""
        return BlockChain(root_hash(self._namespace, salt), self.config.block_size)

    def add(self, state: RequestState) -> None:
        """Queues a request. The caller has checked that it fits into the context."""
        self._arrivals += 1
        state.arrival = self._arrivals
        self.queue.push(state, {running.request.tenant for running in self._running})

    def abort(self, request_id: str) -> TokenOut | None:
        """Ends a request wherever it stands; None if it is not here (any more)."""
        for state in (*self._running, *self.queue):
            if state.request.id == request_id:
                return self._end(state, FinishReason.ABORT)
        return None

    def end_all(self, reason: FinishReason, error: str) -> list[TokenOut]:
        """Ends every request."""
        return [self._end(state, reason, error) for state in (*self._running, *self.queue)]

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing can run now."""
        draft = _Draft(self.config.max_batched_tokens)
        preempted = self._plan_running(draft)
        if not preempted:
            self._plan_waiting(draft)
        if not draft.rows:
            return None
        closes, self._closes = tuple(self._closes), []
        self._step += 1
        plan = StepPlan(
            step=self._step,
            rows=tuple(draft.rows),
            opens=tuple(draft.opens),
            closes=closes,
            blocks=tuple(draft.blocks),
        )
        self._in_flight.append((plan, draft.owners))
        return plan

    def commit(self, result: StepResult) -> Iterator[TokenOut]:
        """Takes in what the oldest plan in flight produced; yields news of requests that have any."""
        plan, owners = self._in_flight.popleft()
        if plan.step != result.step:
            raise AssertionError(f"the result of step {plan.step} is due, not that of step {result.step}")
        self.pool.retire(plan.step)
        produced = {row.slot: row for row in result.rows}
        for row, owner in zip(plan.rows, owners, strict=True):
            if row.sample:
                owner.state.pending -= 1
            if owner.state.finish is None:
                yield from self._commit_row(row, owner, produced.get(row.slot))

    def check(self) -> None:
        """Raises AssertionError if a block is lost, or held by two that don't share it, or a slot is lost."""
        self.pool.check([state.blocks for state in self._running])
        if len(self._free_slots) + len(self._running) != self.config.max_num_seqs:
            raise AssertionError(f"{len(self._free_slots)} slots are free and {len(self._running)} requests run")

    def _plan_running(self, draft: _Draft) -> bool:
        """Rows of running requests. True if one had to give its blocks back."""
        preempted = False
        if self.config.policy == "priority":
            self._running.sort(key=lambda state: state.request.priority)
        for state in self._running.copy():
            count = min(state.num_known - state.planned, draft.budget)
            if count < 1 or state.slot < 0 or state.ends_with_pending:
                continue
            while not self._grow(state, state.planned + count, draft):
                victim = self._running[-1]
                self._preempt(victim)
                preempted = True
                if victim is state:
                    break
            if state.slot >= 0:
                self._add_row(state, count, draft)
        return preempted

    def _plan_waiting(self, draft: _Draft) -> None:
        """Admits requests while budget, slots and blocks last. The next one in line is never passed over."""
        while draft.budget > 0 and self._free_slots and (state := self.queue.peek()) is not None:
            if state.pending or not self._admit(state):
                return
            draft.opens.append(_slot_open(state))
            draft.blocks.append(BlockDelta(slot=state.slot, first=0, blocks=tuple(state.blocks)))
            count = min(state.num_known - state.planned, draft.budget)
            self._grow(state, state.planned + count, draft)
            self._add_row(state, count, draft)

    def _admit(self, state: RequestState) -> bool:
        """Gives a waiting request a slot and the blocks that the prefix cache has of it, if all of it would fit."""
        shared = self._cached_blocks(state)
        needed = blocks_for(len(state.tokens) + 1, self.config.block_size) - self.pool.num_held(shared)
        reserve = self._reserve if self._running else 0
        if needed + reserve > self.pool.num_free:
            return False
        self.pool.share(shared)
        self.queue.remove(state)
        self._running.append(state)
        state.slot = self._free_slots.pop()
        state.blocks = shared
        state.published = len(shared)
        state.planned = state.computed = len(shared) * self.config.block_size
        if state.cached_tokens < 0:
            state.cached_tokens = state.computed
            self.stats.prefix_queries += len(state.tokens)
            self.stats.prefix_hits += state.computed
        self.queue.charge(state.request.tenant, read=len(state.tokens) - state.computed)
        return True

    def _cached_blocks(self, state: RequestState) -> list[int]:
        """Cached blocks of the request's beginning; at least its last token is left to be computed."""
        if not self.config.prefix_cache or state.request.sampling.prompt_logprobs is not None:
            return []
        state.chain.extend(state.tokens)
        most = (len(state.tokens) - 1) // self.config.block_size
        return self.pool.lookup(state.chain.hashes[:most])

    def _grow(self, state: RequestState, length: int, draft: _Draft) -> bool:
        """Blocks for ``length`` tokens of a running request. False: there are not enough, none were taken."""
        missing = blocks_for(length, self.config.block_size) - len(state.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            taken = self.pool.acquire(missing)
            draft.blocks.append(BlockDelta(slot=state.slot, first=len(state.blocks), blocks=tuple(taken)))
            state.blocks.extend(taken)
        return True

    def _add_row(self, state: RequestState, count: int, draft: _Draft) -> None:
        known = state.tokens[state.planned : state.planned + count]
        tokens = (*known, *([LAST_SAMPLED] * (count - len(known))))
        complete = state.planned + count == state.num_known
        scored: tuple[int, ...] = ()
        if state.request.sampling.prompt_logprobs is not None:
            scored = state.request.prompt[state.planned + 1 : state.planned + count + 1]
        row = RowPlan(slot=state.slot, start=state.planned, tokens=tokens, sample=complete, scored=scored)
        draft.rows.append(row)
        draft.owners.append(_Owner(state, state.preemptions))
        draft.budget -= count
        state.planned += count
        state.pending += complete

    def _commit_row(self, row: RowPlan, owner: _Owner, produced: RowResult | None) -> Iterator[TokenOut]:
        state = owner.state
        if produced is not None and produced.error:
            yield self._end(state, FinishReason.ERROR, produced.error)
            return
        if owner.preemptions == state.preemptions:
            state.computed = row.start + len(row.tokens)
            self._publish(state)
        if produced is None:
            if not state.begun:
                yield state.begin()
            return
        state.begun = True
        if (scores := state.scores(row.start, produced.scores)) is not None:
            yield scores
        logprobs = produced.logprobs or (None,) * len(produced.tokens)
        for token, logprob in zip(produced.tokens, logprobs, strict=True):
            out = state.append(token, logprob)
            self.stats.generated_tokens += 1
            self.queue.charge(state.request.tenant, written=1)
            if state.finish is not None:
                self._leave(state)
            yield out
            if state.finish is not None:
                return

    def _publish(self, state: RequestState) -> None:
        """Lets others hit the blocks that are full now, for certain."""
        if not self.config.prefix_cache:
            return
        full = state.computed // self.config.block_size
        if full > state.published:
            state.chain.extend(state.tokens[: state.computed])
        for index in range(state.published, full):
            start = index * self.config.block_size
            parent = state.chain.hashes[index - 1] if index else None
            tokens = state.tokens[start : start + self.config.block_size]
            self.pool.publish(state.blocks[index], state.chain.hashes[index], parent, tokens)
        state.published = max(full, state.published)

    def _preempt(self, state: RequestState) -> None:
        """Back to the queue; the cache is computed again, from whatever of it is still there by then."""
        self._vacate(state)
        state.preemptions += 1
        self.stats.preemptions += 1
        state.planned = state.computed = state.published = 0
        self.queue.push(state, set())

    def _end(self, state: RequestState, reason: FinishReason, error: str = "") -> TokenOut:
        out = state.end(reason, error)
        self._leave(state)
        return out

    def _leave(self, state: RequestState) -> None:
        """Takes a finished request out."""
        if state.slot >= 0:
            self._vacate(state)
        else:
            self.queue.remove(state)

    def _vacate(self, state: RequestState) -> None:
        """Gives back what a running request holds; steps in flight may still use it."""
        self._running.remove(state)
        self._free_slots.append(state.slot)
        self._closes.append(state.slot)
        self.pool.release(state.blocks, fence=self._step)
        state.slot, state.blocks = -1, []


def _slot_open(state: RequestState) -> SlotOpen:
    """What the worker must know of a request that gets a slot, the first time or again."""
    sampling = msgspec.structs.replace(state.request.sampling, stop_token_ids=tuple(sorted(state.stop_ids)))
    prompt_len = len(state.request.prompt)
    penalised = sampling.penalised
    return SlotOpen(
        slot=state.slot,
        request_id=state.request.id,
        sampling=sampling,
        seed=state.seed,
        prompt_len=prompt_len,
        prompt=state.request.prompt if penalised else (),
        generated=tuple(state.tokens[prompt_len:]) if penalised else (),
    )
