"""Runs step plans: owns the network, the cache and the slots of one rank. Never schedules.

``run`` is a function of the plan and of the plans before it, so a recorded run can be replayed.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from perilune.config import EngineConfig
from perilune.engine.inputs import Slot, apply_plan, build_inputs
from perilune.errors import EngineError
from perilune.model.stack import Network
from perilune.sample.logprobs import token_logprobs
from perilune.sample.sampler import sample, unpack_mask
from perilune.types import RowPlan, RowResult, StepPlan, StepResult, TokenLogprobs


class Worker:
    """One rank."""

    def __init__(self, network: Network, config: EngineConfig, num_blocks: int) -> None:
        self.network = network
        self.config = config
        self.kv = network.new_cache(num_blocks, config.block_size)
        self._slots: dict[int, Slot] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """Executes one step.

        Raises:
            EngineError: the plan contradicts the plans before it. A row that can't be sampled ends in its result.
        """
        apply_plan(plan, self._slots)
        if not plan.rows:
            return StepResult(step=plan.step)
        inputs = build_inputs(plan, self._slots, self.config.block_size, self.config.device)
        logits = self.network.forward(inputs.ids, inputs.batch, self.kv, inputs.wanted)
        rows, first = [], 0
        for index, scored, sampled in inputs.shares:
            row = plan.rows[index]
            masks = {g.offset: g.mask for g in plan.grammar if g.row == index}
            scores = self._score_row(row, logits[first : first + scored])
            first += scored
            result = self._sample_row(row, logits[first : first + sampled], masks)
            first += sampled
            rows.append(msgspec.structs.replace(result, scores=scores) if scores else result)
        return StepResult(step=plan.step, rows=tuple(rows))

    def _score_row(self, row: RowPlan, logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the row's ``scored`` ids."""
        top = self._slots[row.slot].sampling.prompt_logprobs or 0
        return tuple(token_logprobs(values, token, top) for values, token in zip(logits, row.scored, strict=True))

    def _sample_row(self, row: RowPlan, logits: Tensor, masks: dict[int, bytes]) -> RowResult:
        """Samples position by position and stops at the first draft that the sample contradicts."""
        slot = self._slots[row.slot]
        drafts = row.tokens[len(row.tokens) - row.drafts :]
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for offset in range(len(logits)):
            position = row.start + len(row.tokens) - row.drafts + offset
            mask = masks.get(offset)
            allowed = None if mask is None else unpack_mask(mask, logits.shape[-1], str(logits.device))
            try:
                token = sample(logits[offset], slot.sampling, slot.seed, position, slot.history, allowed)
            except EngineError as error:
                return RowResult(slot=row.slot, tokens=tuple(tokens), logprobs=tuple(logprobs), error=error.message)
            tokens.append(token)
            if slot.sampling.logprobs is not None:
                logprobs.append(token_logprobs(logits[offset], token, slot.sampling.logprobs))
            if slot.sampling.penalised:
                slot.history.generated.append(token)
            slot.last_sampled = token
            if offset < row.drafts and token != drafts[offset]:
                break
        return RowResult(slot=row.slot, tokens=tuple(tokens), logprobs=tuple(logprobs))


def set_threads(count: int) -> None:
    """Threads of the reference backend's arithmetic, for the whole process."""
    torch.set_num_threads(count)
