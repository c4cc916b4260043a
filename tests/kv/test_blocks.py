"""The block pool under any order of calls: nothing lost, nothing owned twice, nothing reused before its fence."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from perilune.errors import CapacityError
from perilune.kv.blocks import BlockPool, blocks_for
from perilune.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from perilune.kv.prefix import BlockChain, root_hash

SIZE = 2


class Pool(RuleBasedStateMachine):
    """Sequences that grow, share, publish and leave, beside a model of what must hold."""

    @initialize(blocks=st.integers(2, 12))
    def start(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, SIZE)
        self.step = 0
        self.held: list[tuple[list[int], BlockChain]] = []
        self.content: dict[int, bytes] = {}
        self.fences: dict[int, int] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=5 * SIZE))
    def admit(self, tokens: list[int]) -> None:
        chain = BlockChain(root_hash("", ""), SIZE)
        chain.extend(tokens)
        shared = self.pool.lookup(chain.hashes)
        for block, name in zip(shared, chain.hashes, strict=False):
            assert self.content[block] == name, "a hit is what was written under that name"
        missing = len(chain.hashes) - len(shared)
        self.pool.share(shared)
        free = self.pool.num_free
        if missing > free:
            with pytest.raises(CapacityError, match=f"{missing} cache blocks are needed, {free} of"):
                self.pool.acquire(missing)
            self.pool.release(shared, self.step)
            return
        taken = self.pool.acquire(missing)
        for block in taken:
            assert self.fences.get(block, 0) <= self.retired, "a step in flight still writes it"
            assert all(block not in blocks for blocks, _ in self.held)
        for block, name in zip(taken, chain.hashes[len(shared) :], strict=True):
            self.content[block] = name
        self.held.append((shared + taken, chain))

    @property
    def retired(self) -> int:
        return getattr(self, "done", 0)

    @rule(index=st.integers(0, 100))
    def publish(self, index: int) -> None:
        if self.held:
            blocks, chain = self.held[index % len(self.held)]
            for place, block in enumerate(blocks):
                self.pool.publish(block, chain.hashes[place], chain.parent(place), ())

    @rule(index=st.integers(0, 100))
    def leave(self, index: int) -> None:
        if self.held:
            blocks, _ = self.held.pop(index % len(self.held))
            for block in blocks:
                self.fences[block] = self.step
            self.pool.release(blocks, self.step)

    @rule()
    def plan(self) -> None:
        self.step += 1

    @rule()
    def retire(self) -> None:
        self.done = min(self.retired + 1, self.step)
        self.pool.retire(self.done)

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check([blocks for blocks, _ in self.held])

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for blocks, _ in self.held:
                self.pool.release(blocks, self.step)
            self.pool.retire(self.step)
            assert self.pool.num_free == self.pool.num_blocks - 1


TestPool = Pool.TestCase


def chain(tokens: list[int]) -> BlockChain:
    made = BlockChain(root_hash("", ""), SIZE)
    made.extend(tokens)
    return made


def test_the_least_recently_used_prefix_is_forgotten_first_and_from_its_end() -> None:
    pool = BlockPool(6, SIZE)
    old, new = chain([1, 1, 2, 2]), chain([3, 3])
    for names in (old, new):
        blocks = pool.acquire(len(names.hashes))
        for place, block in enumerate(blocks):
            pool.publish(block, names.hashes[place], names.parent(place), ())
        pool.release(blocks, 0)
    pool.acquire(2)  # the two that never held anything
    pool.acquire(1)
    assert len(pool.lookup(old.hashes)) == 1
    assert len(pool.lookup(new.hashes)) == 1


def test_events_tell_what_can_be_hit() -> None:
    pool = BlockPool(3, SIZE, record_events=True)
    names = chain([1, 2, 3, 4])
    blocks = pool.acquire(2)
    for place, block in enumerate(blocks):
        pool.publish(block, names.hashes[place], names.hashes[place - 1] if place else None, [7, 8])
    pool.publish(blocks[0], names.hashes[0], None, [7, 8])
    pool.release(blocks, 0)
    pool.acquire(2)
    pool.clear()
    first, second, removed, cleared = pool.take_events()
    assert pool.take_events() == []
    assert first == BlockStored(
        block_hashes=[names.hashes[0]], parent_block_hash=None, token_ids=[7, 8], block_size=SIZE
    )
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == names.hashes[0]
    assert removed == BlockRemoved(block_hashes=[names.hashes[1], names.hashes[0]])
    assert cleared == AllBlocksCleared()


def test_giving_back_a_free_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="does not own it"):
        BlockPool(4, SIZE).release([1], 0)


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n, 32) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]


def test_a_block_that_was_shared_behind_its_fence_waits_for_the_later_one() -> None:
    pool = BlockPool(2, SIZE)
    names = chain([1, 2])
    blocks = pool.acquire(1)
    pool.publish(blocks[0], names.hashes[0], None, ())
    pool.release(blocks, fence=5)
    pool.share(pool.lookup(names.hashes))
    pool.release(blocks, fence=7)
    for step, free in ((4, 0), (5, 0), (6, 0), (7, 1)):
        pool.retire(step)
        assert pool.num_free == free
        pool.check([])
