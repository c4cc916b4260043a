"""What a cache tells routers: which blocks can be hit here. Plain data; how it travels is the publisher's business."""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """From now on a prompt that continues ``parent_block_hash`` with ``token_ids`` finds its latents here."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """The blocks have been overwritten."""

    block_hashes: list[bytes]


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Nothing is cached any more."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
