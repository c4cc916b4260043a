"""The messages that cross seams: Request → StepPlan → StepResult → TokenOut.

Plain data (msgspec structs): loggable, replayable, sent between processes as msgpack. No torch, no
behaviour. A plan says everything that a rank must do in one step; ranks never schedule, so one plan
broadcast to all ranks keeps them in step. Fields that one configuration does not need keep their
defaults, so a plan recorded on one rank can be replayed on many.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

LAST_SAMPLED: Final = -1
"""In ``RowPlan.tokens``: the id that the worker itself sampled for this slot in its previous step."""


class FinishReason(StrEnum):
    """Why a request ended. ``stop``: a stop id or stop string; ``length``: a limit; ``abort``: the client left."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when a request ends. Validated where requests enter; trusted inside.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 are off, as are penalties of 0 and a
    ``repetition_penalty`` of 1. ``seed`` None: the engine draws a fresh one. ``banned_ids`` never come out;
    ``logit_bias`` holds pairs of id and bias. ``stop_token_ids`` end the request and are not text; before
    ``min_tokens`` ids neither they nor the model's end marker come out, and no stop string is looked for.
    ``logprobs``: how many of the most likely ids to report beside each sampled one; None for none at all.
    ``prompt_logprobs``: the same for the ids of the prompt, the first one excepted.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    banned_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on what was said before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue.

    ``tenant`` is who pays: fair scheduling shares out by it. ``cache_salt`` separates prefix caches. Lower ``priority``
    runs first, where the policy looks at it.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""


class SlotOpen(msgspec.Struct, frozen=True, kw_only=True):
    """From this step on ``slot`` belongs to a new request. ``seed`` is concrete; ``stop_token_ids`` of ``sampling``
    hold the model's end markers too, unless they are to be ignored. ``prompt_len`` tells prompt from answer.

    ``prompt`` and ``generated`` (ids from before a preemption) are filled only where sampling needs them (penalties):
    the ids to run come in the rows.
    """

    slot: int
    request_id: str
    sampling: SamplingParams
    seed: int
    prompt_len: int
    prompt: tuple[int, ...] = ()
    generated: tuple[int, ...] = ()


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True):
    """``blocks`` are appended to the slot's block table at index ``first``."""

    slot: int
    first: int
    blocks: tuple[int, ...]


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one slot to run: ids at positions ``start … start + len(tokens) - 1``.

    The last ``drafts`` ids are proposals. With ``sample``, the logits of the last ``drafts + 1`` tokens are sampled and
    drafts are accepted while they equal the sample; without it the row only fills the cache (a prompt chunk).
    ``scored``: ids whose log-probabilities are wanted, one behind each of the row's first tokens (prompt logprobs).
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    drafts: int = 0
    sample: bool = True
    scored: tuple[int, ...] = ()


class GrammarRow(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed ids at one sampled position: ``mask`` is little-endian int32 words, bit i%32 of word i//32 allows id i.

    ``row`` indexes ``StepPlan.rows``; ``offset`` counts that row's sampled positions from 0 to ``drafts``.
    """

    row: int
    offset: int
    mask: bytes


class DataParallelStep(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of every data-parallel rank in this step, zeros included: what gathers around the experts are sized by."""

    rank: int = 0
    tokens: tuple[int, ...] = ()


class DcpStep(msgspec.Struct, frozen=True, kw_only=True):
    """Decode context parallelism: position p lives on rank ``(p // interleave) % size``. Size 1 is off."""

    size: int = 1
    interleave: int = 1


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step of one engine. Order of effects: closes, opens, blocks, then the rows run.

    ``step`` increases by one; a block that a plan names may be reused only after that step has retired.
    """

    step: int
    rows: tuple[RowPlan, ...]
    opens: tuple[SlotOpen, ...] = ()
    closes: tuple[int, ...] = ()
    blocks: tuple[BlockDelta, ...] = ()
    grammar: tuple[GrammarRow, ...] = ()
    dp: DataParallelStep = DataParallelStep()
    dcp: DcpStep = DcpStep()

    @property
    def num_tokens(self) -> int:
        """Tokens that this plan runs."""
        return sum(len(row.tokens) for row in self.rows)


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Raw log-probabilities (before bias, penalties, temperature) of one id and of the most likely ids there."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled ids of one row: accepted drafts and one more, with their ``logprobs`` if asked for; ``scores`` of the
    row's ``scored`` ids. ``error`` ends that request and no other."""

    slot: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    scores: tuple[TokenLogprobs, ...] = ()
    error: str = ""


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step produced: one ``RowResult`` per row that was sampled or scored, in the plan's order."""

    step: int
    rows: tuple[RowResult, ...] = ()


class TokenOut(msgspec.Struct, frozen=True, kw_only=True):
    """News of one request, in order. A prompt that takes several steps is announced by a first message without ids when
    it has begun to run. Ids that might begin a stop string are held back until that is certain.

    ``logprobs`` belong to ``tokens``, one each, where they were asked for; ``prompt_logprobs`` continue those of the
    prompt's ids from the second on. ``tail``: bytes of text that come after ``tokens`` and before a matched stop
    string, when the match begins inside a token. ``completion_tokens`` counts every id generated so far, held-back and
    stop ids included; ``cached_tokens`` those of the prompt that the prefix cache held when the request first ran.
    ``finish`` is set exactly once, on the last message; ``error`` says why when it is ``error``.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    tail: bytes = b""
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    error: str = ""
