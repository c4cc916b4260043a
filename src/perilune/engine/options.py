"""What a user may choose about an engine, and what an engine that runs tells of itself. Torch-free, plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from perilune.config import SchedulingPolicy
from perilune.logs import LogFormat, LogLevel

Device = Literal["cpu", "cuda"]
DtypeName = Literal["bfloat16", "float32", "float64"]
Phase = Literal["loading", "ready", "silent", "failed", "stopped"]
"""``silent``: heartbeats are overdue, which may pass; ``failed`` and ``stopped`` are final."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """None: decided from the model and the machine. For the rest see ``perilune.config.EngineConfig``.

    ``dtype`` defaults to float32 on a CPU (bfloat16 is slower there on the reference backend) and bfloat16 on CUDA;
    ``kv_tokens``, what the cache holds, to a share of the free memory. ``kv_events`` and ``kv_events_replay`` are
    ZMQ addresses on which an engine process publishes what its cache holds (``perilune.engine.publish``). The log is
    that of an engine process.
    """

    max_model_len: int | None = None
    max_batched_tokens: int = 512
    max_num_seqs: int = 16
    kv_tokens: int | None = None
    block_size: int | None = None
    policy: SchedulingPolicy = "fcfs"
    prefix_cache: bool = True
    row_invariant: bool = False
    depth: int = 1
    device: Device = "cpu"
    dtype: DtypeName | None = None
    attention: Literal["absorbed", "decompressed"] = "absorbed"
    threads: int | None = None
    kv_events: str = ""
    kv_events_replay: str = ""
    kv_events_topic: str = ""
    log_format: LogFormat = "text"
    log_level: LogLevel = "warning"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine's start, and gauges. Tokens, blocks and requests.

    Attributes:
        step: steps planned so far: the heartbeat's proof of progress.
        waiting_tokens: prompt and generated tokens of requests that wait.
        cached_blocks: blocks that a prompt can hit, owned or free.
    """

    step: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What the engine is doing. ``error`` says why when ``phase`` is ``failed`` or ``silent``."""

    phase: Phase
    error: str = ""
    stats: EngineStats = EngineStats()

    @property
    def running(self) -> int:
        return self.stats.running

    @property
    def waiting(self) -> int:
        return self.stats.waiting
