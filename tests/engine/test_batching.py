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

from perilune.engine.build import EngineOptions, build_engine
from perilune.engine.engine import Engine
from perilune.engine.worker import Worker
from perilune.types import FinishReason, Request, RowPlan, RowResult, SamplingParams

BASE = EngineOptions(max_model_len=96, max_num_seqs=6, block_size=4)
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
    engine.add(turn)
    news = []
    while engine.has_work:
        news += engine.step()
    computed = len(first.prompt) + len(answer) - 1
    assert news[-1].cached_tokens == computed // BASE.block_size * BASE.block_size  # type: ignore[operator]
    other = Request(id="o", prompt=turn.prompt, sampling=first.sampling, cache_salt="another tenant")
    engine.add(other)
    while engine.has_work:
        news += engine.step()
    assert news[-1].cached_tokens == 0
