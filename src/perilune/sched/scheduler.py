"""Token-budget scheduling: there are no prefill and decode phases, only tokens still to be computed.

Every step hands out ``max_batched_tokens``: running requests first, then waiting ones in order of arrival. A prompt
longer than what is left of the budget runs in chunks. A request gets the blocks for its longest possible length when
it is admitted, so a running request never waits for memory. Torch-free: ``plan`` and ``commit`` exchange plain data
with the worker, and the scheduler never sees a tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from perilune.config import EngineConfig
from perilune.kv.blocks import BlockPool, blocks_for
from perilune.sched.state import RequestState
from perilune.types import BlockDelta, FinishReason, RowPlan, SlotOpen, StepPlan, StepResult, TokenOut


class Scheduler:
    """Decides what each step runs. One plan is in flight at a time: ``plan`` → worker → ``commit``."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.config = config
        self.pool = BlockPool(num_blocks)
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        self._free_slots = list(range(config.max_num_seqs))[::-1]
        self._closes: list[int] = []
        self._step = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, state: RequestState) -> None:
        """Queues a request. The caller has checked that it fits into the context."""
        self._waiting.append(state)

    def abort(self, request_id: str) -> TokenOut | None:
        """Ends a request wherever it stands; None if it is not here (any more)."""
        for state in (*self._running, *self._waiting):
            if state.request.id == request_id:
                return self._retire(state, state.end(FinishReason.ABORT))
        return None

    def end_all(self, reason: FinishReason, error: str) -> list[TokenOut]:
        """Ends every request."""
        states = (*self._running, *self._waiting)
        return [self._retire(state, state.end(reason, error)) for state in states]

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing is to do."""
        budget = self.config.max_batched_tokens
        opens, blocks, rows = [], [], []
        for state in self._running:
            if budget > 0:
                rows.append(self._row(state, budget))
                budget -= len(rows[-1].tokens)
        while budget > 0 and (new := self._admit()) is not None:
            request = new.request
            opens.append(SlotOpen(slot=new.slot, request_id=request.id, sampling=request.sampling, seed=new.seed))
            blocks.append(BlockDelta(slot=new.slot, first=0, blocks=new.blocks))
            rows.append(self._row(new, budget))
            budget -= len(rows[-1].tokens)
        if not rows:
            return None
        closes, self._closes = tuple(self._closes), []
        self._step += 1
        return StepPlan(step=self._step, rows=tuple(rows), opens=tuple(opens), closes=closes, blocks=tuple(blocks))

    def commit(self, plan: StepPlan, result: StepResult) -> Iterator[TokenOut]:
        """Takes in what the plan produced; yields news of requests that have any."""
        by_slot = {state.slot: state for state in self._running}
        for row in plan.rows:
            if (state := by_slot.get(row.slot)) is not None:
                state.computed = row.start + len(row.tokens)
        for produced in result.rows:
            state = by_slot.get(produced.slot)
            if state is None:
                continue
            if produced.error:
                yield self._retire(state, state.end(FinishReason.ERROR, produced.error))
                continue
            for token in produced.tokens:
                out = state.append(token)
                if state.finish is not None:
                    self._retire(state, out)
                yield out
                if state.finish is not None:
                    break

    def _row(self, state: RequestState, budget: int) -> RowPlan:
        tokens = tuple(state.tokens[state.computed : state.computed + budget])
        complete = state.computed + len(tokens) == len(state.tokens)
        return RowPlan(slot=state.slot, start=state.computed, tokens=tokens, sample=complete)

    def _admit(self) -> RequestState | None:
        """Moves the first waiting request to the running ones, if a slot and its blocks are free."""
        if not self._waiting or not self._free_slots:
            return None
        needed = blocks_for(self._waiting[0].max_tokens, self.config.block_size)
        if needed > self.pool.num_free:
            return None
        state = self._waiting.popleft()
        state.slot = self._free_slots.pop()
        state.blocks = self.pool.acquire(needed)
        self._running.append(state)
        return state

    def _retire(self, state: RequestState, last: TokenOut) -> TokenOut:
        """Takes a finished request out and gives back what it held."""
        if state.slot >= 0:
            self._running.remove(state)
            self._free_slots.append(state.slot)
            self._closes.append(state.slot)
            self.pool.release(state.blocks)
        else:
            self._waiting.remove(state)
        return last
