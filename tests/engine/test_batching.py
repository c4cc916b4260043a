"""A request's tokens do not depend on what runs beside it: in any batch, order, chunk size, after preemption and hits.

Bitwise in the row-invariant mode, where logits are compared too; as tokens on the reference backend in float64.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.engine.build import build_engine
from perilune.engine.engine import Engine
from perilune.engine.options import EngineOptions
from perilune.engine.worker import Worker
from perilune.types import FinishReason, Request, RowPlan, RowResult, SamplingParams, TokenLogprobs, TokenOut

BLOCK = 4
BASE = EngineOptions(max_model_len=96, max_num_seqs=6, block_size=BLOCK)
PREFIX = tuple(b"Tides of the Moon: ")
PROMPTS = [PREFIX + tuple(b"Brest"), PREFIX + tuple(b"Brest"), PREFIX[:9], (65,), PREFIX + tuple(b"Cork, day " * 4)]


def requests(greedy: bool) -> list[Request]:
    made = []
    for i, prompt in enumerate(PROMPTS):
        sampling = {"temperature": 0.0} if greedy else {"temperature": 1.0, "seed": 7 + i, "top_p": 0.9}
        params = SamplingParams(max_tokens=6 + 3 * i, ignore_eos=True, **sampling)  # type: ignore[arg-type]
        made.append(Request(id=str(i), prompt=prompt, sampling=params))
    return made


def run(engine: Engine, wanted: list[Request], rng: random.Random | None = None) -> dict[str, list[int]]:
    """Runs all; with ``rng`` they arrive at random times."""
    told: dict[str, list[int]] = {request.id: [] for request in wanted}
    waiting = wanted.copy()
    while waiting or engine.has_work:
        while waiting and (rng is None or rng.random() < 0.3):
            engine.add(waiting.pop(0))
        for out in engine.step():
            told[out.request_id] += out.tokens
            assert out.finish in (None, FinishReason.LENGTH)
        engine.scheduler.check()
    return told


@contextmanager
def recorded_logits() -> Iterator[dict[tuple[str, int], Tensor]]:
    """Logits by request's seed and position, as the sampler sees them."""
    logits: dict[tuple[str, int], Tensor] = {}
    original = Worker._sample_row

    def recording(self: Worker, row: RowPlan, values: Tensor, masks: dict[int, bytes]) -> RowResult:
        logits[str(self._slots[row.slot].sampling.max_tokens), row.start + len(row.tokens)] = values.clone()
        return original(self, row, values, masks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "_sample_row", recording)
        yield logits


VARIANTS: list[dict[str, Any]] = [
    {},
    {"max_batched_tokens": 3},
    {"max_batched_tokens": 17, "prefix_cache": False},
    {"max_num_seqs": 2, "depth": 2},
    {"kv_tokens": 96, "max_batched_tokens": 29},  # a pool that holds barely one long request: preemption
    {"kv_tokens": 96, "depth": 3, "policy": "fair"},
]


@pytest.mark.parametrize("greedy", [True, False])
def test_bits_are_those_of_the_request_alone(tiny_model: Path, greedy: bool) -> None:
    options = replace(BASE, row_invariant=True)
    expected: dict[str, list[int]] = {}
    with recorded_logits() as alone:
        for request in requests(greedy):
            expected |= run(build_engine(tiny_model, replace(options, prefix_cache=False)), [request])
    assert len(alone) == sum(6 + 3 * i for i in range(len(PROMPTS)))
    preemptions = hits = 0
    for number, variant in enumerate(VARIANTS):
        engine = build_engine(tiny_model, replace(options, **variant))
        with recorded_logits() as together:
            assert run(engine, requests(greedy), random.Random(number)) == expected, variant
        assert all(torch.equal(together[key], values) for key, values in alone.items()), variant
        preemptions += engine.scheduler.stats.preemptions
        hits += engine.scheduler.stats.prefix_hits
    assert preemptions > 0
    assert hits > 0


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_tokens_are_those_of_the_request_alone_on_the_plain_backend(tiny_model: Path, variant: dict[str, Any]) -> None:
    options = replace(BASE, dtype="float64")
    engine = build_engine(tiny_model, replace(options, prefix_cache=False))
    expected: dict[str, list[int]] = {}
    for request in requests(greedy=False):
        expected |= run(engine, [request])
    assert run(build_engine(tiny_model, replace(options, **variant)), requests(greedy=False)) == expected


def test_the_plain_backend_does_not_promise_bits(tiny_model: Path) -> None:
    """If this ever fails, the row-invariant mode is no longer needed."""
    with recorded_logits() as whole:
        run(build_engine(tiny_model, BASE), requests(greedy=True))
    with recorded_logits() as single:
        run(build_engine(tiny_model, replace(BASE, max_batched_tokens=1)), requests(greedy=True))
    assert any(not torch.equal(whole[key], values) for key, values in single.items())


def test_a_conversation_hits_the_cache_of_its_last_turn(tiny_model: Path) -> None:
    engine = build_engine(tiny_model, BASE)
    first = requests(greedy=True)[0]
    answer = run(engine, [first])["0"]
    turn = Request(id="t", prompt=first.prompt + tuple(answer) + (66, 67), sampling=first.sampling)
    computed = len(first.prompt) + len(answer) - 1
    assert told(engine, [turn])["t"][-1].cached_tokens == computed // BLOCK * BLOCK
    other = Request(id="o", prompt=turn.prompt, sampling=first.sampling, cache_salt="another tenant")
    assert told(engine, [other])["o"][-1].cached_tokens == 0


def told(engine: Engine, wanted: list[Request]) -> dict[str, list[TokenOut]]:
    news: dict[str, list[TokenOut]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for out in engine.step():
            news[out.request_id].append(out)
    return news


@pytest.mark.parametrize("variant", VARIANTS)
def test_penalties_and_logprobs_survive_preemption_chunks_and_hits(tiny_model: Path, variant: dict[str, Any]) -> None:
    wishes = [
        {"frequency_penalty": 1.5, "logprobs": 3},
        {"repetition_penalty": 1.8, "logprobs": 0, "prompt_logprobs": 2},
        {"presence_penalty": 2.0, "min_tokens": 5, "ignore_eos": False, "logprobs": 1},
    ]
    wanted = [
        Request(id=str(i), prompt=PREFIX, sampling=SamplingParams(max_tokens=24, temperature=0.0, **wish))  # type: ignore[arg-type]
        for i, wish in enumerate(wishes)
    ]
    options = replace(BASE, dtype="float64")
    expected: dict[str, list[TokenOut]] = {}
    for request in wanted:
        expected |= told(build_engine(tiny_model, replace(options, prefix_cache=False)), [request])
    found = told(build_engine(tiny_model, replace(options, **variant)), wanted)
    for request in wanted:
        for field in ("tokens", "logprobs", "prompt_logprobs"):
            ours = [item for out in found[request.id] for item in getattr(out, field)]
            alone = [item for out in expected[request.id] for item in getattr(out, field)]
            assert len(ours) == len(alone)
            for a, b in zip(ours, alone, strict=True):
                if isinstance(a, TokenLogprobs):
                    assert a.top_ids == b.top_ids
                    assert (a.chosen, *a.top) == pytest.approx((b.chosen, *b.top), abs=1e-9)
                else:
                    assert a == b
        assert len([lp for out in found[request.id] for lp in out.logprobs]) == 24
    scores = [score for out in found["1"] for score in out.prompt_logprobs]
    assert len(scores) == len(PREFIX) - 1
    assert all(len(score.top) == 2 and score.chosen <= score.top[0] for score in scores)
