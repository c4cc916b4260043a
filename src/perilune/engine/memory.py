"""How much memory there is, and how much a model and its cache need. Refuses early what would not fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from perilune.config import ModelSpec
from perilune.errors import CapacityError
from perilune.kv.blocks import blocks_for

CACHE_SHARE: Final = {"cpu": 0.25, "cuda": 0.9}
"""Share of the free memory that the cache takes at most where nobody says how large it should be. A CPU's memory is
shared with other programs; a GPU's is ours."""


@dataclass(frozen=True, slots=True)
class CacheWish:
    """What is wanted of the cache; None: as much as fits.

    Attributes:
        context: longest prompt plus answer, in tokens.
        tokens: that the cache holds.
        share: of the free memory, for what is not given.
    """

    context: int | None
    tokens: int | None
    max_num_seqs: int
    block_size: int
    share: float


def available_bytes(device: str) -> int:
    """Memory that can still be allocated: of the GPU, or of the machine and its control group."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = (_read_bytes(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    return available if limit is None or used is None else min(available, max(limit - used, 0))


def _read_bytes(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that one token keeps in the cache, all layers."""
    return spec.num_layers * spec.kv_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class CacheSize:
    """``context``: longest prompt plus answer, in tokens. ``num_blocks``: of the cache, the unused block 0 included."""

    context: int
    num_blocks: int


def size_cache(spec: ModelSpec, wish: CacheWish, dtype: torch.dtype, free: int) -> CacheSize:
    """Fits context and cache into ``free`` bytes.

    Raises:
        CapacityError: what was asked for does not fit.
    """
    per_block = token_bytes(spec, dtype) * wish.block_size
    fitting = int(free * wish.share) // per_block  # blocks
    if fitting < 1:
        raise CapacityError(f"{free / 1e9:.2f} GB of memory are free, too little for one cache block ({per_block} B)")
    context = wish.context or min(spec.max_position, (wish.tokens or fitting * wish.block_size))
    per_request = blocks_for(context, wish.block_size)
    if wish.tokens is None:
        blocks = max(per_request, min(per_request * wish.max_num_seqs, fitting))
    else:
        blocks = blocks_for(wish.tokens, wish.block_size)
    if blocks * per_block > free:
        raise CapacityError(
            f"a cache of {blocks * wish.block_size} tokens needs {blocks * per_block / 1e9:.2f} GB, "
            f"{free / 1e9:.2f} GB of memory are free",
            hint=f"lower --max-model-len or --kv-tokens, about {int(free * 0.9) // per_block * wish.block_size} fit",
        )
    if blocks < per_request:
        raise CapacityError(
            f"a cache of {wish.tokens} tokens does not hold one request of the full context, {context} tokens",
            hint="raise --kv-tokens or lower --max-model-len",
        )
    return CacheSize(context, blocks + 1)
