"""The scheduler alone, driven by any order of arrivals, aborts, results and steps in flight."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.checkpoint.tiny import write_tiny
from perilune.config import EngineConfig, SchedulingPolicy
from perilune.kv.blocks import blocks_for
from perilune.sched.scheduler import Scheduler
from perilune.sched.state import RequestState
from perilune.text.tokenizer import Tokenizer
from perilune.types import (
    LAST_SAMPLED,
    FinishReason,
    Request,
    RowPlan,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenOut,
)

END = 7
SIZE = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("scheduler")
    return Tokenizer.from_dir(path, write_tiny(path, None, "bf16", seed=0, tokenizer=None).vocab_size)


def add(scheduler: Scheduler, tokenizer: Tokenizer, request: Request) -> None:
    scheduler.add(RequestState(request, 0, scheduler.chain(request.cache_salt), tokenizer, (END,)))


class Cache:
    """A worker without a network: a cache that holds token ids, and a next token that depends on all of them.

    A read of a place that was never written, or written for another sequence, gives another continuation.
    """

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.blocks: dict[int, list[int]] = {}
        self.last: dict[int, int] = {}
        self.memory: dict[tuple[int, int], int] = {}

    def run(self, plan: StepPlan, rng: random.Random) -> StepResult:
        for slot in plan.closes:
            del self.slots[slot], self.blocks[slot]
        for opened in plan.opens:
            assert opened.slot not in self.slots
            self.slots[opened.slot], self.blocks[opened.slot] = opened.request_id, []
        for delta in plan.blocks:
            assert delta.first == len(self.blocks[delta.slot])
            self.blocks[delta.slot].extend(delta.blocks)
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        rows = [self._row(row, rng) for row in plan.rows]
        return StepResult(step=plan.step, rows=tuple(row for row in rows if row is not None))

    def _row(self, row: RowPlan, rng: random.Random) -> RowResult | None:
        blocks = self.blocks[row.slot]
        assert row.tokens
        for offset, token in enumerate(row.tokens):
            place, inside = divmod(row.start + offset, SIZE)
            self.memory[blocks[place], inside] = self.last.get(row.slot, 0) if token == LAST_SAMPLED else token
        if not row.sample:
            return None
        if rng.random() < 0.01:
            return RowResult(slot=row.slot, error="broken")
        length = row.start + len(row.tokens)
        context = [self.memory[blocks[p // SIZE], p % SIZE] for p in range(length)]
        self.last[row.slot] = successor(context)
        return RowResult(slot=row.slot, tokens=(self.last[row.slot],))


def successor(context: list[int]) -> int:
    return END if hash(tuple(context)) % 13 == 0 else 10 + hash(tuple(context)) % 50


def alone(request: Request) -> list[int]:
    """What the request gives when nothing else exists."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.sampling.max_tokens:
        tokens.append(successor(tokens))
        if tokens[-1] == END:
            tokens.pop()
            break
    return tokens[len(request.prompt) :]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=14
)


@given(
    seqs=st.integers(1, 5),
    budget=st.integers(1, 20),
    blocks=st.integers(12, 30),
    depth=st.integers(1, 3),
    policy=st.sampled_from(["fcfs", "priority", "fair"]),
    prefix_cache=st.booleans(),
    wishes=REQUESTS,
    rng=st.randoms(use_true_random=False),
)
def test_every_request_gives_what_it_gives_alone_and_everything_comes_back(
    tokenizer: Tokenizer,
    seqs: int,
    budget: int,
    blocks: int,
    depth: int,
    policy: SchedulingPolicy,
    prefix_cache: bool,
    wishes: list[tuple[int, int, int, int]],
    rng: random.Random,
) -> None:
    """Through preemption, prefix hits, chunks, aborts, errors and steps in flight (vllm#45357, #52360, #43569)."""
    config = EngineConfig(
        max_model_len=44,
        max_batched_tokens=budget,
        max_num_seqs=seqs,
        block_size=SIZE,
        policy=policy,
        prefix_cache=prefix_cache,
        depth=depth,
    )
    scheduler, cache = Scheduler(config, num_blocks=blocks), Cache()
    requests = [
        # Few different prompts, so that prefixes are shared.
        Request(
            id=str(i),
            prompt=(*(20 + (p * p) % 7 for p in range(length - 1)), kind),
            sampling=SamplingParams(max_tokens=limit),
            priority=kind,
            tenant=str(tenant),
            cache_salt=str(tenant % 2),
        )
        for i, (length, limit, kind, tenant) in enumerate(wishes)
    ]
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    ends: dict[str, list[FinishReason]] = {request.id: [] for request in requests}

    def note(out: TokenOut) -> None:
        assert not ends[out.request_id], "no news after the end"
        told[out.request_id] += out.tokens
        if out.finish is not None:
            ends[out.request_id].append(out.finish)

    waiting, results = deque(requests), deque[StepResult]()
    steps = 0
    while waiting or scheduler.num_running or scheduler.num_waiting or results:
        steps += 1
        assert steps < 20_000, "no progress"
        if waiting and rng.random() < 0.6:
            add(scheduler, tokenizer, waiting.popleft())
        if rng.random() < 0.05 and (ended := scheduler.abort(str(rng.randrange(len(requests))))) is not None:
            note(ended)
        if len(results) < depth and (plan := scheduler.plan()) is not None:
            assert plan.num_tokens <= budget
            results.append(cache.run(plan, rng))
        elif results:
            for out in scheduler.commit(results.popleft()):
                note(out)
        scheduler.check()
    for request in requests:
        assert len(ends[request.id]) == 1
        expected = alone(request)
        if ends[request.id][0] in (FinishReason.STOP, FinishReason.LENGTH):
            assert told[request.id] == expected
        else:
            assert told[request.id] == expected[: len(told[request.id])]
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - 1


def step(scheduler: Scheduler, token: int = 9) -> list[tuple[int, int, int, bool]]:
    """Runs one step whose samples are all ``token``; the rows as (slot, start, count, sampled)."""
    plan = scheduler.plan()
    assert plan is not None
    rows = tuple(RowResult(slot=row.slot, tokens=(token,)) for row in plan.rows if row.sample)
    list(scheduler.commit(StepResult(step=plan.step, rows=rows)))
    return [(row.slot, row.start, len(row.tokens), row.sample) for row in plan.rows]


def request(name: str, length: int, limit: int = 3, **fields: object) -> Request:
    sampling = SamplingParams(max_tokens=limit)
    return Request(id=name, prompt=tuple(range(20, 20 + length)), sampling=sampling, **fields)  # type: ignore[arg-type]


def test_running_requests_come_before_waiting_ones_and_prompts_run_in_chunks(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_model_len=64, max_batched_tokens=8, max_num_seqs=2, block_size=SIZE, prefix_cache=False)
    scheduler = Scheduler(config, num_blocks=40)
    for name, length in (("a", 5), ("b", 12), ("c", 1)):
        add(scheduler, tokenizer, request(name, length))
    assert step(scheduler) == [(0, 0, 5, True), (1, 0, 3, False)]
    assert step(scheduler) == [(0, 5, 1, True), (1, 3, 7, False)]
    assert step(scheduler) == [(0, 6, 1, True), (1, 10, 2, True)]
    assert step(scheduler) == [(1, 12, 1, True), (0, 0, 1, True)], "a has ended, c takes its slot"


def test_a_prompt_that_is_wholly_cached_still_runs_its_last_token(tokenizer: Tokenizer) -> None:
    """neuralmagic/vllm#92: a full hit must not leave nothing to sample from."""
    config = EngineConfig(max_model_len=64, max_batched_tokens=32, max_num_seqs=1, block_size=SIZE)
    scheduler = Scheduler(config, num_blocks=40)
    add(scheduler, tokenizer, request("a", 8, limit=1))
    assert step(scheduler) == [(0, 0, 8, True)]
    add(scheduler, tokenizer, request("b", 8, limit=1))
    assert step(scheduler) == [(0, 4, 4, True)]
    add(scheduler, tokenizer, request("c", 8, limit=1, cache_salt="other tenant"))
    assert step(scheduler) == [(0, 0, 8, True)]
    assert (scheduler.stats.prefix_hits, scheduler.stats.prefix_queries) == (4, 24)


def test_a_block_is_published_only_when_its_step_is_committed(tokenizer: Tokenizer) -> None:
    """vllm#43569: a prompt aborted between plan and commit must not leave hits on blocks that nobody wrote."""
    config = EngineConfig(max_model_len=64, max_batched_tokens=32, max_num_seqs=2, block_size=SIZE, depth=2)
    scheduler = Scheduler(config, num_blocks=40)
    add(scheduler, tokenizer, request("a", 9))
    first = scheduler.plan()
    assert first is not None
    scheduler.abort("a")
    add(scheduler, tokenizer, request("b", 9))
    second = scheduler.plan()
    assert second is not None
    assert second.rows[0].start == 0
    named = {block for delta in first.blocks for block in delta.blocks}
    assert named.isdisjoint(block for delta in second.blocks for block in delta.blocks), "still being written"
    list(scheduler.commit(StepResult(step=first.step, rows=(RowResult(slot=first.rows[0].slot, tokens=(9,)),))))
    assert scheduler.pool.num_cached == 0


def test_the_latest_gives_way_and_resumes_from_what_is_still_cached(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_model_len=24, max_batched_tokens=32, max_num_seqs=2, block_size=SIZE, watermark=0.0)
    scheduler = Scheduler(config, num_blocks=8)
    add(scheduler, tokenizer, request("a", 11, limit=12))
    add(scheduler, tokenizer, request("b", 3, limit=12, cache_salt="x"))
    assert step(scheduler) == [(0, 0, 11, True), (1, 0, 3, True)]
    while scheduler.num_running == 2:
        step(scheduler)
    assert scheduler.stats.preemptions == 1
    while scheduler.num_waiting:
        rows = step(scheduler)
    assert rows[-1][1] in (4, 8), "b starts behind its first published block"
    while scheduler.num_running:
        step(scheduler)
    assert scheduler.pool.num_free == 7


def test_priority_decides_who_is_admitted_and_who_gives_way(tokenizer: Tokenizer) -> None:
    config = EngineConfig(
        max_model_len=24, max_batched_tokens=32, max_num_seqs=2, block_size=SIZE, policy="priority", watermark=0.0
    )
    scheduler = Scheduler(config, num_blocks=8)
    for name, priority in (("low", 5), ("mid", 3), ("high", 0)):
        add(scheduler, tokenizer, request(name, 7, limit=12, priority=priority, cache_salt=name))
    step(scheduler)
    assert [state.request.id for state in scheduler.queue] == ["low"]
    while scheduler.num_running == 2:
        step(scheduler)
    assert [state.request.id for state in scheduler.queue] == ["low", "mid"]


@given(heavy=st.integers(10, 40), limit=st.integers(1, 10), seqs=st.integers(1, 3))
def test_a_light_tenant_does_not_wait_for_a_greedy_one(tokenizer: Tokenizer, heavy: int, limit: int, seqs: int) -> None:
    """The virtual token counter's bound: while both wait, service differs by at most 2 · max(w·input, w·running)."""
    config = EngineConfig(
        max_model_len=64, max_batched_tokens=16, max_num_seqs=seqs, block_size=SIZE, policy="fair", prefix_cache=False
    )
    scheduler = Scheduler(config, num_blocks=200)
    for i in range(heavy):
        add(scheduler, tokenizer, request(f"h{i}", 20, limit=10, tenant="greedy"))
    for _ in range(5):
        step(scheduler)
    for i in range(4):
        add(scheduler, tokenizer, request(f"l{i}", 5, limit=limit, tenant="light"))
    bound = 2 * max(20, 2 * seqs * (20 + 10))
    while any(state.request.tenant == "light" for state in scheduler.queue) and any(
        state.request.tenant == "greedy" for state in scheduler.queue
    ):
        served = scheduler.queue.served
        assert served["greedy"] - served["light"] <= bound
        step(scheduler)
    greedy_waiting = sum(state.request.tenant == "greedy" for state in scheduler.queue)
    assert greedy_waiting > 0, "the light tenant was through before the greedy one"


def test_idling_saves_no_service_up(tokenizer: Tokenizer) -> None:
    config = EngineConfig(max_model_len=64, max_batched_tokens=64, max_num_seqs=1, block_size=SIZE, policy="fair")
    scheduler = Scheduler(config, num_blocks=200)
    for i in range(6):
        add(scheduler, tokenizer, request(f"a{i}", 10, limit=5, tenant="a", cache_salt=str(i)))
    for _ in range(15):
        step(scheduler)
    add(scheduler, tokenizer, request("b0", 10, limit=5, tenant="b"))
    assert scheduler.queue.served["b"] == scheduler.queue.served["a"]


@pytest.mark.parametrize("length", [1, 4, 5])
def test_blocks_are_taken_as_a_request_grows(tokenizer: Tokenizer, length: int) -> None:
    config = EngineConfig(max_model_len=64, max_batched_tokens=64, max_num_seqs=1, block_size=SIZE)
    scheduler = Scheduler(config, num_blocks=30)
    add(scheduler, tokenizer, request("a", length, limit=20))
    for done in range(10):
        step(scheduler)
        assert scheduler.pool.num_free == 29 - blocks_for(length + done, SIZE)
