"""Names of cache blocks: chained hashes of the tokens they hold. Torch-free.

    root      = blake2b-256(namespace, salt), each with its length before it
    hash[i]   = blake2b-256(hash[i - 1] ‖ tokens of block i as int32 little-endian)

A hash names a block's content and everything before it, for one model and one tenant (the salt); it is the same in
every process and version, so that KV transfer and KV stores can be keyed by it. Only full blocks have one. Full
digests: a collision would show one tenant another's conversation.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Final

DIGEST_BYTES: Final = 32


def root_hash(namespace: str, salt: str) -> bytes:
    """Parent of a sequence's first block. ``namespace`` names what the cached values depend on: model and layout."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (namespace.encode(), salt.encode()):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block behind ``parent``."""
    return hashlib.blake2b(parent + struct.pack(f"<{len(tokens)}i", *tokens), digest_size=DIGEST_BYTES).digest()


class BlockChain:
    """Hashes of one growing sequence, each computed once.

    Attributes:
        hashes: of the full blocks so far.
    """

    def __init__(self, root: bytes, block_size: int) -> None:
        self.root = root
        self.block_size = block_size
        self.hashes: list[bytes] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Names every block that ``tokens``, the whole sequence so far, fills."""
        for index in range(len(self.hashes), len(tokens) // self.block_size):
            self.hashes.append(
                block_hash(self.parent(index), tokens[index * self.block_size : (index + 1) * self.block_size])
            )

    def parent(self, index: int) -> bytes:
        """Hash of the block before block ``index``."""
        return self.hashes[index - 1] if index else self.root
