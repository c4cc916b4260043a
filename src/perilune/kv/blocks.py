"""The block pool: which cache blocks are free and which are owned. Torch-free; holds indices, never data.

Block 0 is never handed out: kernels may use it as a harmless target for padding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from perilune.errors import CapacityError


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


class BlockPool:
    """Hands out block indices 1 … ``num_blocks - 1``, first freed first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = deque(range(1, num_blocks))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, count: int) -> tuple[int, ...]:
        """Takes ``count`` blocks.

        Raises:
            CapacityError: fewer are free. Nothing is taken then.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} cache blocks are needed, {len(self._free)} of {self.num_blocks - 1} are free")
        taken = tuple(self._free.popleft() for _ in range(count))
        self._owned.update(taken)
        return taken

    def release(self, blocks: Iterable[int]) -> None:
        """Gives blocks back. Giving back what is not owned is a bug of the caller."""
        for block in blocks:
            self._owned.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Every block is free or owned, and only once."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._owned or len(free | self._owned) != self.num_blocks - 1:
            raise AssertionError(f"block pool is inconsistent: {len(self._free)} free, {len(self._owned)} owned")
