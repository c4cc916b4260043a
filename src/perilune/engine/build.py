"""From a model directory to a running engine: reads, checks, loads, sizes the cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from perilune.checkpoint.load import Checkpoint
from perilune.config import EngineConfig, ModelSpec
from perilune.engine.engine import Engine
from perilune.engine.memory import CACHE_SHARE, CacheWish, available_bytes, size_cache
from perilune.engine.options import EngineOptions
from perilune.engine.worker import Worker, set_threads
from perilune.errors import UsageError
from perilune.model.stack import Network
from perilune.model.weights import take_weights
from perilune.ops.ref import RefOps
from perilune.ops.rowwise import RowwiseOps
from perilune.text.tokenizer import Tokenizer

SMALL_MATRIX: Final = 1 << 21
"""Elements. Below, two threads decode slower than one; far slower where other programs run beside them."""

Progress = Callable[[int, int], None]


def build_engine(model: Path, options: EngineOptions, progress: Progress | None = None) -> Engine:
    """Loads a checkpoint and sizes the cache.

    Args:
        progress: called with (bytes taken, bytes in all) while weights are read.

    Raises:
        ModelError: the directory can't be served. CapacityError: it doesn't fit. UsageError: an option can't be used.
    """
    _check_options(options)
    checkpoint = Checkpoint.open(model)
    spec = checkpoint.spec
    tokenizer = Tokenizer.from_dir(model, spec.vocab_size)
    if options.max_model_len is not None and options.max_model_len > spec.max_position:
        raise UsageError(
            f"--max-model-len is {options.max_model_len}, the model's max_position_embeddings is {spec.max_position}"
        )
    set_threads(options.threads or default_threads(spec))
    dtype_name = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    dtype: torch.dtype = getattr(torch, dtype_name)
    source = checkpoint.source(dtype, options.device, progress)
    weights = take_weights(spec, source, dtype)
    source.finish()
    ops = RowwiseOps() if options.row_invariant else RefOps()
    network = Network.build(spec, weights, ops, options.attention)

    block_size = options.block_size or (64 if options.device == "cuda" else 32)
    free = available_bytes(options.device)
    wish = CacheWish(
        options.max_model_len, options.kv_tokens, options.max_num_seqs, block_size, CACHE_SHARE[options.device]
    )
    cache = size_cache(spec, wish, dtype, free)
    config = EngineConfig(
        max_model_len=cache.context,
        max_batched_tokens=options.max_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        block_size=block_size,
        policy=options.policy,
        prefix_cache=options.prefix_cache,
        row_invariant=options.row_invariant,
        record_events=bool(options.kv_events),
        depth=options.depth,
        device=options.device,
        dtype=dtype_name,
        attention=options.attention,
    )
    return Engine(Worker(network, config, cache.num_blocks), config, cache.num_blocks, tokenizer)


def default_threads(spec: ModelSpec) -> int:
    """Cores that this process may use; one where every matrix is so small that waiting for others costs more."""
    largest = spec.hidden_size * max(spec.vocab_size, spec.intermediate_size, spec.moe_intermediate_size)
    return 1 if largest < SMALL_MATRIX else len(os.sched_getaffinity(0))


def _check_options(options: EngineOptions) -> None:
    for name in ("max_model_len", "max_batched_tokens", "max_num_seqs", "kv_tokens", "block_size", "threads", "depth"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} is {value}, at least 1 is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device is cuda, but torch finds no CUDA device", hint="use --device cpu, or a CUDA build of torch"
        )
