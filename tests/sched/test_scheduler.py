"""The scheduler alone, driven by any order of arrivals, aborts and results."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.config import EngineConfig
from perilune.kv.blocks import blocks_for
from perilune.sched.scheduler import Scheduler
from perilune.sched.state import RequestState
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason, Request, RowResult, SamplingParams, StepPlan, StepResult, TokenOut

END = 7


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from perilune.checkpoint.tiny import write_tiny

    path = tmp_path_factory.mktemp("scheduler")
    return Tokenizer.from_dir(path, write_tiny(path, None, "bf16", seed=0, tokenizer=None).vocab_size)


class Replica:
    """What a worker would know after each plan: whose slot is whose, which blocks, how far each sequence is written."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.slots: dict[int, str] = {}
        self.blocks: dict[int, list[int]] = {}
        self.written: dict[int, int] = {}

    def apply(self, plan: StepPlan) -> None:
        for slot in plan.closes:
            for table in (self.slots, self.blocks, self.written):
                table.pop(slot)
        for opened in plan.opens:
            assert opened.slot not in self.slots
            self.slots[opened.slot], self.blocks[opened.slot], self.written[opened.slot] = opened.request_id, [], 0
        for delta in plan.blocks:
            assert delta.first == len(self.blocks[delta.slot])
            self.blocks[delta.slot].extend(delta.blocks)
        owned = [block for blocks in self.blocks.values() for block in blocks]
        assert len(set(owned)) == len(owned)
        assert 0 not in owned
        for row in plan.rows:
            assert row.start == self.written[row.slot], "no token is skipped or run twice"
            assert row.tokens
            self.written[row.slot] += len(row.tokens)
            assert blocks_for(self.written[row.slot], self.block_size) <= len(self.blocks[row.slot])


@given(
    seqs=st.integers(1, 4),
    budget=st.integers(1, 20),
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12),
    rng=st.randoms(use_true_random=False),
)
def test_every_request_ends_once_and_everything_comes_back(
    tokenizer: Tokenizer, seqs: int, budget: int, sizes: list[tuple[int, int]], rng: random.Random
) -> None:
    config = EngineConfig(max_model_len=64, max_batched_tokens=budget, max_num_seqs=seqs, block_size=4)
    scheduler, replica = Scheduler(config, num_blocks=1 + 11 * 2), Replica(4)
    waiting = [
        Request(id=str(i), prompt=(9,) * prompt, sampling=SamplingParams(max_tokens=limit))
        for i, (prompt, limit) in enumerate(sizes)
    ]
    ends: dict[str, list[FinishReason]] = {request.id: [] for request in waiting}
    counts: dict[str, int] = dict.fromkeys(ends, 0)

    def note(out: TokenOut) -> None:
        assert not ends[out.request_id], "no news after the end"
        counts[out.request_id] += len(out.tokens)
        if out.finish is not None:
            ends[out.request_id].append(out.finish)

    while waiting or scheduler.num_running or scheduler.num_waiting:
        if waiting and rng.random() < 0.6:
            scheduler.add(RequestState(waiting.pop(0), 0, tokenizer, (END,)))
        if rng.random() < 0.1 and (out := scheduler.abort(str(rng.randrange(len(sizes))))) is not None:
            note(out)
        plan = scheduler.plan()
        if plan is None:
            continue
        assert plan.num_tokens <= budget
        assert len(plan.rows) <= seqs
        replica.apply(plan)
        rows = tuple(
            RowResult(slot=row.slot, error="broken")
            if rng.random() < 0.03
            else RowResult(slot=row.slot, tokens=(END if rng.random() < 0.1 else 9,))
            for row in plan.rows
            if row.sample
        )
        for out in scheduler.commit(plan, StepResult(step=plan.step, rows=rows)):
            note(out)
        scheduler.pool.check()
    assert all(len(reasons) == 1 for reasons in ends.values())
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1
    for i, (_, limit) in enumerate(sizes):
        assert counts[str(i)] <= limit
        if ends[str(i)] == [FinishReason.LENGTH]:
            assert counts[str(i)] == limit


def test_running_requests_come_before_waiting_ones_and_prompts_run_in_chunks(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_model_len=64, max_batched_tokens=8, max_num_seqs=2, block_size=4)
    scheduler = Scheduler(config, num_blocks=40)

    def step(token: int = 9) -> list[tuple[int, int, int, bool]]:
        plan = scheduler.plan()
        assert plan is not None
        rows = tuple(RowResult(slot=row.slot, tokens=(token,)) for row in plan.rows if row.sample)
        list(scheduler.commit(plan, StepResult(step=plan.step, rows=rows)))
        return [(row.slot, row.start, len(row.tokens), row.sample) for row in plan.rows]

    for name, length in (("a", 5), ("b", 12), ("c", 1)):
        request = Request(id=name, prompt=(9,) * length, sampling=SamplingParams(max_tokens=3))
        scheduler.add(RequestState(request, 0, tokenizer, ()))
    assert step() == [(0, 0, 5, True), (1, 0, 3, False)]
    assert step() == [(0, 5, 1, True), (1, 3, 7, False)]
    assert step() == [(0, 6, 1, True), (1, 10, 2, True)]
    assert step() == [(1, 12, 1, True), (0, 0, 1, True)], "a has ended, c takes its slot"
