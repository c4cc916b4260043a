"""From a step plan to tensors: ids, positions, cache slots, block tables. Owns the worker's view of its slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.errors import EngineError
from perilune.ops import Batch
from perilune.sample.sampler import History
from perilune.types import LAST_SAMPLED, SamplingParams, StepPlan


@dataclass(slots=True)
class Slot:
    """What the worker keeps of one request between steps."""

    sampling: SamplingParams
    seed: int
    history: History
    blocks: list[int] = field(default_factory=list)
    last_sampled: int = 0


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Tensors of one step.

    Attributes:
        ids: int64 [T].
        wanted: int64 [n], the tokens whose logits are scored or sampled.
        shares: for each row of the plan that has any in ``wanted``, its index, how many are scored, how many sampled.
    """

    ids: Tensor
    batch: Batch
    wanted: Tensor
    shares: tuple[tuple[int, int, int], ...]


def apply_plan(plan: StepPlan, slots: dict[int, Slot]) -> None:
    """Closes, opens and extends slots as the plan says."""
    for slot in plan.closes:
        slots.pop(slot, None)
    for opened in plan.opens:
        history = History(opened.prompt_len, opened.prompt, list(opened.generated))
        slots[opened.slot] = Slot(opened.sampling, opened.seed, history)
    for delta in plan.blocks:
        blocks = slots[delta.slot].blocks
        if delta.first != len(blocks):
            raise EngineError(
                f"step {plan.step}: blocks of slot {delta.slot} start at {delta.first}, not {len(blocks)}"
            )
        blocks.extend(delta.blocks)


def build_inputs(plan: StepPlan, slots: dict[int, Slot], block_size: int, device: str) -> StepInputs:
    """Lays out the plan's rows one after the other."""
    ids: list[int] = []
    positions: list[int] = []
    cache_slots: list[int] = []
    wanted: list[int] = []
    row_starts = [0]
    shares: list[tuple[int, int, int]] = []
    for index, row in enumerate(plan.rows):
        slot = slots[row.slot]
        span = range(row.start, row.start + len(row.tokens))
        ids.extend(slot.last_sampled if token == LAST_SAMPLED else token for token in row.tokens)
        positions.extend(span)
        cache_slots.extend(slot.blocks[p // block_size] * block_size + p % block_size for p in span)
        sampled = row.drafts + 1 if row.sample else 0
        wanted.extend(range(row_starts[-1], row_starts[-1] + len(row.scored)))
        wanted.extend(range(len(ids) - sampled, len(ids)))
        row_starts.append(len(ids))
        if row.scored or sampled:
            shares.append((index, len(row.scored), sampled))
    tables = [slots[row.slot].blocks for row in plan.rows]
    width = max(map(len, tables))
    padded = [table + [-1] * (width - len(table)) for table in tables]

    def to_tensor(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    batch = Batch(
        positions=to_tensor(positions),
        slots=to_tensor(cache_slots),
        row_starts=tuple(row_starts),
        kv_lens=tuple(row.start + len(row.tokens) for row in plan.rows),
        block_tables=to_tensor(padded),
    )
    return StepInputs(to_tensor(ids), batch, to_tensor(wanted), tuple(shares))
