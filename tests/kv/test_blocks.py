"""The block pool under any order of acquire and release."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.errors import CapacityError
from perilune.kv.blocks import BlockPool, blocks_for


@given(st.integers(1, 20), st.lists(st.integers(0, 8), max_size=40), st.randoms(use_true_random=False))
def test_no_block_is_lost_or_owned_twice(size: int, counts: list[int], rng: object) -> None:
    pool = BlockPool(size)
    held: list[tuple[int, ...]] = []
    for count in counts:
        if held and rng.random() < 0.5:  # type: ignore[attr-defined]
            pool.release(held.pop(rng.randrange(len(held))))  # type: ignore[attr-defined]
        free = pool.num_free
        if count > free:
            with pytest.raises(CapacityError, match=f"{count} cache blocks are needed, {free} of"):
                pool.acquire(count)
            assert pool.num_free == free
        else:
            held.append(pool.acquire(count))
        owned = [block for blocks in held for block in blocks]
        assert len(set(owned)) == len(owned)
        assert 0 not in owned
        pool.check()
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == size - 1


def test_giving_back_a_free_block_is_refused() -> None:
    pool = BlockPool(4)
    with pytest.raises(KeyError):
        pool.release((1,))


def test_blocks_for_rounds_up() -> None:
    assert [blocks_for(n, 32) for n in (0, 1, 32, 33)] == [0, 1, 1, 2]
