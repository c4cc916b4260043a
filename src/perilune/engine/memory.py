"""How much memory there is, and how much a model and its cache need. Refuses early what would not fit."""

from __future__ import annotations

from pathlib import Path

import torch

from perilune.config import ModelSpec
from perilune.errors import CapacityError
from perilune.kv.blocks import blocks_for

CACHE_SHARE = 0.5
"""Share of the free memory that the cache may take when no context length is asked for."""


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


def choose_context(spec: ModelSpec, asked: int | None, block_size: int, dtype: torch.dtype, free: int) -> int:
    """The context length to serve: what was asked for, or as much of the model's own as half the free memory holds.

    Raises:
        CapacityError: the cache for what was asked for does not fit.
    """
    per_block = token_bytes(spec, dtype) * block_size
    if asked is None:
        fitting = int(free * CACHE_SHARE) // per_block * block_size
        if fitting < block_size:
            raise CapacityError(
                f"{free / 1e9:.2f} GB of memory are free, too little for one cache block ({per_block} B)"
            )
        return min(spec.max_position, fitting)
    if blocks_for(asked, block_size) * per_block > free:
        needed = blocks_for(asked, block_size) * per_block
        raise CapacityError(
            f"a context of {asked} tokens needs {needed / 1e9:.2f} GB of cache, {free / 1e9:.2f} GB of memory are free",
            hint=f"lower --max-model-len, about {int(free * 0.9) // per_block * block_size} tokens fit",
        )
    return asked
