"""Faults of other engines' schedulers, caches and samplers, in small, on a real engine.

Each test names the report and states what is right here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from perilune.checkpoint.tiny import write_tiny
from perilune.engine.build import build_engine
from perilune.engine.engine import Engine
from perilune.engine.options import EngineOptions
from perilune.errors import RequestError
from perilune.model.stack import Network
from perilune.types import FinishReason, Request, SamplingParams, TokenOut

PROMPT = tuple(b"Spring tides come at new and full Moon; neap tides at its quarters.")
BASE = EngineOptions(max_model_len=256, block_size=8, dtype="float64", max_batched_tokens=16)

Build = Callable[[EngineOptions], Engine]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    path: Path = tmp_path_factory.mktemp("cases") / "model"
    write_tiny(path, None, "int4", seed=9)
    return lambda options: build_engine(path, options)


def request(request_id: str = "r", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True, **sampling})
    return Request(id=request_id, prompt=prompt, sampling=params)


def run(engine: Engine, *wanted: Request) -> dict[str, list[TokenOut]]:
    news: dict[str, list[TokenOut]] = {each.id: [] for each in wanted}
    for each in wanted:
        engine.add(each)
    while engine.has_work:
        for out in engine.step():
            news[out.request_id].append(out)
        engine.scheduler.check()
    return news


def ids(news: list[TokenOut]) -> list[int]:
    return [token for out in news for token in out.tokens]


def test_prefix_cache_and_chunks_in_every_mix(build: Build) -> None:
    """vllm#7003, #14069, #17954: prefix caching with MLA, on a CPU, without chunks, crashed or never hit."""
    expected = ids(run(build(replace(BASE, prefix_cache=False, max_batched_tokens=256)), request())["r"])
    for prefix_cache, budget in itertools.product((True, False), (256, 16, 5)):
        engine = build(replace(BASE, prefix_cache=prefix_cache, max_batched_tokens=budget))
        first, second = run(engine, request())["r"], run(engine, request())["r"]
        assert ids(first) == ids(second) == expected
        # All full blocks, but for the one that holds the prompt's last token.
        assert second[-1].cached_tokens == (len(PROMPT) - 1) // 8 * 8 * prefix_cache


@pytest.mark.parametrize("steps", range(1, 8))
def test_aborted_at_any_step_then_asked_again(build: Build, steps: int) -> None:
    """vllm PR 56525, PR 37152: a block published when it was planned, its writer aborted, and garbage on the retry.
    ggml-org/llama.cpp#29163: an interrupted request lost its whole cache."""
    cold = ids(run(build(replace(BASE, prefix_cache=False)), request())["r"])
    engine = build(BASE)
    engine.add(request())
    for _ in range(steps):
        engine.step()
    engine.abort("r")
    again = run(engine, request())["r"]
    assert ids(again) == cold
    computed = min(steps * 16, len(PROMPT) - 1)
    assert again[-1].cached_tokens == computed // 8 * 8, "what was computed is still there"


def test_a_row_of_nan_ends_its_request_and_leaves_nothing_in_the_cache(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#53029, sglang#33187: all-NaN rows became random text, and poisoned the cache for others."""
    expected = ids(run(build(BASE), request("other", PROMPT[:40]))["other"])
    engine = build(replace(BASE, max_batched_tokens=256))
    forward = Network.forward

    def poisoned(self: Network, *args: Any) -> Tensor:
        logits = forward(self, *args).clone()
        logits[0] = torch.nan  # the first row of the step
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(Network, "forward", poisoned)
        engine.add(request("sick"))
        engine.add(request("other", PROMPT[:40]))
        first = engine.step()
    sick = [out for out in first if out.request_id == "sick"]
    assert [out.finish for out in sick] == [FinishReason.ERROR]
    assert ids(sick) == []
    told = [out for out in first if out.request_id == "other"]
    while engine.has_work:
        told += engine.step()
    assert ids(told) == expected, "its neighbour is well"
    assert run(engine, request("again"))["again"][-1].cached_tokens <= 40, "only the neighbour's blocks can be hit"


@pytest.mark.parametrize("mates", [0, 1, 7])
def test_a_seed_holds_beside_mates_that_have_none(build: Build, mates: int) -> None:
    """vllm#51226; llama.cpp#19981, vllm#23138: the same seed, another text beside others or from the cache."""
    seeded = request("seeded", temperature=1.0, seed=42)
    alone = ids(run(build(replace(BASE, prefix_cache=False)), seeded)["seeded"])
    engine = build(replace(BASE, kv_tokens=256))
    others = [request(f"mate{i}", PROMPT[i:], temperature=1.0) for i in range(mates)]
    assert ids(run(engine, *others, seeded)["seeded"]) == alone
    assert ids(run(engine, seeded)["seeded"]) == alone, "from the cache"


def only(engine: Engine, text: str) -> tuple[int, ...]:
    """Every id but those of ``text``: banned, they leave the model nothing else to say."""
    allowed = {token for character in text for token in engine.tokenizer.encode(character)}
    return tuple(i for i in range(engine.worker.network.spec.vocab_size) if i not in allowed)


def test_a_limit_within_a_character(build: Build) -> None:
    """ferrox#124, dynamo#12688: half a character at the limit was U+FFFD, or a 500."""
    engine = build(BASE)
    emoji = engine.tokenizer.encode("🙂")
    assert len(emoji) == 4
    bias = tuple((token, 100.0 - 20 * place) for place, token in enumerate(emoji))
    news = run(engine, request(max_tokens=2, banned_ids=only(engine, "🙂"), logit_bias=bias))["r"]
    assert news[-1].finish == FinishReason.LENGTH
    assert len(ids(news)) == 2


def test_a_stop_string_over_the_tokens_of_one_character(build: Build) -> None:
    """FreeToken#464: a stop string of several bytes was never found."""
    engine = build(BASE)
    dna = engine.tokenizer.encode("🧬")
    script = iter((*engine.tokenizer.encode("ab"), *dna, *engine.tokenizer.encode("cd")))
    original = type(engine.worker).run

    def scripted(plan: Any) -> Any:
        result = original(engine.worker, plan)
        rows = tuple(msgspec.structs.replace(row, tokens=(next(script),)) for row in result.rows)
        return msgspec.structs.replace(result, rows=rows)

    engine.worker.run = scripted  # type: ignore[method-assign]
    news = run(engine, request(stop=("🧬",), max_tokens=8))["r"]
    assert engine.tokenizer.decode(ids(news)) == "ab"
    assert news[-1].finish == FinishReason.STOP
    assert news[-1].completion_tokens == 6


def test_events_of_requests_that_are_gone_are_dropped(build: Build) -> None:
    """LMCache#4185, #44100: a late event for a dead request ended the engine; aborts before allocation leaked."""
    engine = build(replace(BASE, depth=3))
    for round_ in range(12):
        for i in range(4):
            engine.add(request(f"{round_}-{i}"))
        for _ in range(round_ % 4):
            engine.step()
        for i in range(4):
            engine.abort(f"{round_}-{i}")
            assert engine.abort(f"{round_}-{i}") is None
    while engine.has_work:
        engine.step()
    engine.scheduler.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks - 1
    assert len(ids(run(engine, request())["r"])) == 10


def test_ids_beyond_the_vocabulary_never_reach_the_logits(build: Build) -> None:
    """vllm#54195, PR 16529, PR 48824: an id above the logits' width wrote into the neighbour's row."""
    engine = build(BASE)
    vocab = engine.worker.network.spec.vocab_size
    for field in ({"stop_token_ids": (vocab,)}, {"logit_bias": ((vocab, 1.0),)}, {"banned_ids": (vocab + 7,)}):
        with pytest.raises(RequestError, match=f"token ids run from 0 to {vocab - 1}"):
            engine.add(request(**field))
