"""The block pool: who owns which cache block, what free blocks still hold. Torch-free; holds indices, never data.

A block is *owned* (by one or more sequences), *fenced* (given back, but a step in flight may still write it), or
*free*. Free blocks keep their content and their name (``kv.prefix``) until they are handed out again, least recently
used first: that is the prefix cache. Block 0 is never handed out: kernels may use it as a target for padding.

Fences: a caller gives blocks back together with the last step that names them; they become free when that step has
retired, never before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from perilune.errors import CapacityError
from perilune.kv.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


class BlockPool:
    """Blocks 1 … ``num_blocks - 1``.

    Args:
        record_events: keep what routers must learn, for ``take_events``.
    """

    def __init__(self, num_blocks: int, block_size: int, *, record_events: bool = False) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._events: list[CacheEvent] | None = [] if record_events else None
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # least recently used first
        self._owners = [0] * num_blocks
        self._fenced: deque[tuple[int, int]] = deque()  # (step, block), steps never decrease
        self._fences = [0] * num_blocks  # the last step that each block waits for
        self._retired = 0
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prompt can hit."""
        return len(self._named)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix of ``hashes``. Takes nothing: see ``share``."""
        blocks = []
        for name in hashes:
            block = self._named.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` are not free, so that sharing them takes nothing from the free ones."""
        return sum(block not in self._free for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Makes the caller one more owner of cached blocks."""
        for block in blocks:
            self._owners[block] += 1
            self._free.pop(block, None)

    def acquire(self, count: int) -> list[int]:
        """Takes ``count`` free blocks; what they cached is forgotten.

        Raises:
            CapacityError: fewer are free. Nothing is taken then.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} cache blocks are needed, {len(self._free)} of {self.num_blocks - 1} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        forgotten = [name for block in taken if (name := self._forget(block)) is not None]
        if forgotten:
            self._record(BlockRemoved(block_hashes=forgotten))
        for block in taken:
            self._owners[block] = 1
        return taken

    def publish(self, block: int, name: bytes, parent: bytes | None, tokens: Sequence[int]) -> None:
        """Lets prompts hit an owned, fully written block. A second block of the same content stays nameless."""
        if name in self._named or block in self._names:
            return
        self._names[block], self._named[name] = name, block
        self._record(
            BlockStored(
                block_hashes=[name], parent_block_hash=parent, token_ids=list(tokens), block_size=self.block_size
            )
        )

    def release(self, blocks: Sequence[int], fence: int) -> None:
        """Ends the caller's ownership; what nobody owns is free once step ``fence`` has retired.

        Later blocks of a sequence are reused first: they are worth nothing without the earlier ones.
        """
        for block in reversed(blocks):
            if self._owners[block] < 1:
                raise AssertionError(f"block {block} is given back by somebody who does not own it")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._fences[block] = fence
                self._fenced.append((fence, block))
        self._lift_fences()

    def retire(self, step: int) -> None:
        """No step up to ``step`` will touch the cache any more."""
        self._retired = step
        self._lift_fences()

    def clear(self) -> None:
        """Forgets every cached prefix; owned blocks stay with their owners, nameless."""
        self._names.clear()
        self._named.clear()
        self._record(AllBlocksCleared())

    def take_events(self) -> list[CacheEvent]:
        """What was stored and removed since the last call; nothing where events are not recorded."""
        events = self._events or []
        if events:
            self._events = []
        return events

    def check(self, owners: Iterable[Sequence[int]] = ()) -> None:
        """Raises AssertionError unless every block is owned, fenced or free, and only that.

        Args:
            owners: the blocks of every sequence, where the caller knows them all.
        """
        fenced = {block for _, block in self._fenced if not self._owners[block]} - set(self._free)
        owned = {block for block in range(1, self.num_blocks) if self._owners[block] > 0}
        free = set(self._free)
        if owned & free or owned & fenced or len(owned | free | fenced) != self.num_blocks - 1:
            raise AssertionError(f"{len(owned)} owned, {len(fenced)} fenced, {len(free)} free of {self.num_blocks - 1}")
        if self._owners[0] or any(self._named[name] != block for block, name in self._names.items()):
            raise AssertionError("block 0 is owned, or two blocks have one name")
        counted = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                counted[block] += 1
        if any(counted) and counted != self._owners:
            raise AssertionError("sequences hold other blocks than the pool believes")

    def _record(self, event: CacheEvent) -> None:
        if self._events is not None:
            self._events.append(event)

    def _forget(self, block: int) -> bytes | None:
        name = self._names.pop(block, None)
        if name is not None:
            del self._named[name]
        return name

    def _lift_fences(self) -> None:
        while self._fenced and self._fenced[0][0] <= self._retired:
            fence, block = self._fenced.popleft()
            if self._owners[block] or self._fences[block] != fence or block in self._free:
                continue  # shared since, and perhaps given back behind a later fence
            self._free[block] = None
            if block not in self._names:
                self._free.move_to_end(block, last=False)
