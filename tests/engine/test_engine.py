"""One request through scheduler, worker and sampler: the same tokens however it is run, and every end it can have."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from perilune.checkpoint.tiny import tiny_config
from perilune.config import ModelSpec
from perilune.engine.build import build_engine, default_threads
from perilune.engine.engine import Engine
from perilune.engine.options import EngineOptions
from perilune.errors import CapacityError, ContextLengthError, RequestError, UsageError
from perilune.types import FinishReason, Request, SamplingParams, StepPlan, StepResult, TokenOut

PROMPT = tuple(b"The Moon is 384,400 km away, and the perilune is much closer than that.")
SMALL = EngineOptions(max_model_len=256)

Build = Callable[[EngineOptions], Engine]


@pytest.fixture(scope="module")
def build(tiny_model: Path) -> Build:
    return lambda options: build_engine(tiny_model, options)


def request(prompt: tuple[int, ...] = PROMPT, request_id: str = "r", **sampling: Any) -> Request:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}
    return Request(id=request_id, prompt=prompt, sampling=SamplingParams(**fields))


def run(engine: Engine, *requests: Request) -> dict[str, list[TokenOut]]:
    news: dict[str, list[TokenOut]] = {r.id: [] for r in requests}
    for r in requests:
        engine.add(r)
    while engine.has_work:
        for out in engine.step():
            news[out.request_id].append(out)
        engine.scheduler.pool.check()
    return news


def tokens(news: list[TokenOut]) -> list[int]:
    return [token for out in news for token in out.tokens]


def test_same_tokens_in_every_chunk_size_block_size_and_form(build: Build) -> None:
    """Float64, so that the order of sums decides nothing; greedy and seeded."""
    wide = replace(SMALL, dtype="float64")
    greedy: dict[str, Any] = {"temperature": 0.0}
    for sampling in (greedy, {"temperature": 1.0, "seed": 42, "top_p": 0.95, "top_k": 50, "min_p": 0.01}):
        expected = tokens(run(build(wide), request(**sampling))["r"])
        assert len(expected) == 12
        for options in (
            replace(wide, max_batched_tokens=1),
            replace(wide, max_batched_tokens=7, block_size=5),
            replace(wide, attention="decompressed", max_batched_tokens=32),
        ):
            assert tokens(run(build(options), request(**sampling))["r"]) == expected


def test_generating_equals_prefilling_what_was_generated(build: Build) -> None:
    """Each greedy token is also the argmax after a prompt that ends just before it."""
    engine = build(replace(SMALL, dtype="float64"))
    expected = tokens(run(engine, request())["r"])
    for done in (1, 5, 11):
        again = tokens(run(engine, request(prompt=PROMPT + tuple(expected[:done]), max_tokens=1))["r"])
        assert again == expected[done : done + 1]


def test_requests_do_not_leave_traces(build: Build) -> None:
    """A dirty cache of longer requests before changes nothing; queued requests run in order of arrival."""
    engine = build(SMALL)
    alone = tokens(run(build(SMALL), request())["r"])
    news = run(engine, request(PROMPT * 2, "a"), request(PROMPT[:3], "b"), request(PROMPT, "c"))
    assert tokens(news["c"]) == alone
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks - 1


def test_seeds(build: Build) -> None:
    """vllm#51226, mlx-vlm#1844: a seed is honoured, no seed is not seed 0."""
    engine = build(SMALL)
    seeded = [tokens(run(engine, request(temperature=1.0, seed=42))["r"]) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert tokens(run(engine, request(temperature=1.0, seed=43))["r"]) != seeded[0]
    fresh = [tuple(tokens(run(engine, request(temperature=1.0))["r"])) for _ in range(3)]
    assert len(set(fresh)) == 3


def test_a_stop_id_ends_and_is_counted_but_not_told(build: Build) -> None:
    engine = build(SMALL)
    free = tokens(run(engine, request())["r"])
    stop = next(token for i, token in enumerate(free) if i >= 3 and token not in free[:i])
    place = free.index(stop)
    news = run(engine, request(stop_token_ids=(stop,)))["r"]
    assert tokens(news) == free[:place]
    assert news[-1].finish == FinishReason.STOP
    assert news[-1].completion_tokens == place + 1


def test_the_models_end_marker_ends_unless_ignored(build: Build, tiny_model: Path) -> None:
    engine = build(SMALL)
    end = engine.tokenizer.special("<|im_end|>")
    everything_else = tuple(i for i in range(engine.worker.network.spec.vocab_size) if i != end)
    only_end: dict[str, Any] = {"banned_ids": everything_else, "max_tokens": 3}
    news = run(engine, request(ignore_eos=False, **only_end))["r"]
    assert (tokens(news), news[-1].finish, news[-1].completion_tokens) == ([], FinishReason.STOP, 1)
    news = run(engine, request(ignore_eos=True, **only_end))["r"]
    assert (tokens(news), news[-1].finish) == ([end] * 3, FinishReason.LENGTH)


def test_a_stop_string_ends_over_token_borders_and_is_not_told(build: Build) -> None:
    """Only "a" and "b" may come out, so the text is known to hold the stop string in the middle."""
    engine = build(SMALL)
    letters = {engine.tokenizer.encode(letter)[0]: letter for letter in "ab"}
    others = tuple(i for i in range(engine.worker.network.spec.vocab_size) if i not in letters)
    free: dict[str, Any] = {"banned_ids": others, "max_tokens": 40, "temperature": 1.0, "seed": 1}
    text = "".join(letters[token] for token in tokens(run(engine, request(**free))["r"]))
    stop = text[20:26]
    news = run(engine, request(**free, stop=("zz", stop)))["r"]
    told = "".join(letters[token] for token in tokens(news))
    assert told == text[: text.index(stop)]
    assert news[-1].finish == FinishReason.STOP
    assert news[-1].completion_tokens == text.index(stop) + len(stop)
    held = run(engine, request(**free, stop=(text[30:] + "a", text[30:] + "b")))["r"]
    assert "".join(letters[token] for token in tokens(held)) == text, "what was held back is told at the end"


def test_the_token_limit(build: Build) -> None:
    news = run(build(SMALL), request(max_tokens=5))["r"]
    assert len(tokens(news)) == news[-1].completion_tokens == 5
    assert news[-1].finish == FinishReason.LENGTH
    assert sum(out.finish is not None for out in news) == 1


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_frees_everything_at_once(build: Build, steps: int) -> None:
    engine = build(replace(SMALL, max_batched_tokens=16))
    engine.add(request(max_tokens=100))
    engine.add(request(request_id="waiting"))
    for _ in range(steps):
        engine.step()
    for request_id in ("r", "waiting"):
        out = engine.abort(request_id)
        assert out is not None
        assert out.finish == FinishReason.ABORT
    assert engine.abort("r") is None
    assert not engine.has_work
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks - 1
    assert tokens(run(engine, request())["r"]) == tokens(run(build(SMALL), request())["r"])


def test_logits_that_are_not_finite_end_that_request_only(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#42426 (K81)."""
    engine = build(SMALL)
    forward = type(engine.worker.network).forward
    poison = {"on": True}

    def poisoned(network: object, *args: object) -> torch.Tensor:
        logits: torch.Tensor = forward(network, *args)  # type: ignore[arg-type]
        return logits * torch.nan if poison["on"] else logits

    monkeypatch.setattr(type(engine.worker.network), "forward", poisoned)
    news = run(engine, request())["r"]
    assert (tokens(news), news[-1].finish) == ([], FinishReason.ERROR)
    assert "not finite" in news[-1].error
    poison["on"] = False
    assert run(engine, request())["r"][-1].finish == FinishReason.LENGTH


def test_recorded_plans_replay_to_the_same_results(build: Build) -> None:
    """The seam: plans and results are plain data, and a worker is a function of its plans."""
    engine = build(replace(SMALL, max_batched_tokens=16))
    recorded: list[tuple[bytes, bytes]] = []
    run_step = engine.worker.run

    def recording(plan: StepPlan) -> StepResult:
        result = run_step(plan)
        recorded.append((msgspec.msgpack.encode(plan), msgspec.msgpack.encode(result)))
        return result

    engine.worker.run = recording  # type: ignore[method-assign]
    run(engine, request(temperature=1.0), request(PROMPT[:20], "b"))
    fresh = build(replace(SMALL, max_batched_tokens=16)).worker
    assert len(recorded) > 10
    for plan, result in recorded:
        replayed = fresh.run(msgspec.msgpack.decode(plan, type=StepPlan))
        assert replayed == msgspec.msgpack.decode(result, type=StepResult)


def test_requests_that_cannot_be_run_are_refused(build: Build) -> None:
    engine = build(SMALL)
    vocab = engine.worker.network.spec.vocab_size
    with pytest.raises(RequestError, match="prompt is empty"):
        engine.add(request(prompt=()))
    for bad in (-1, vocab, 1 << 70):
        with pytest.raises(RequestError, match=f"0 to {vocab - 1}"):
            engine.add(request(prompt=(1, bad)))
        with pytest.raises(RequestError, match="banned_ids has"):
            engine.add(request(banned_ids=(bad,)))
    for field, value in (("temperature", float("nan")), ("top_p", 0.0), ("min_p", 2.0), ("top_k", -1)):
        wrong: dict[str, Any] = {field: value}
        with pytest.raises(RequestError, match=f"{field} is"):
            engine.add(request(**wrong))
    with pytest.raises(RequestError, match="logit_bias has a value"):
        engine.add(request(logit_bias=((1, float("inf")),)))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        engine.add(request(max_tokens=0))
    with pytest.raises(ContextLengthError, match=r"71 tokens and max_tokens is 186, together over the context of 256"):
        engine.add(request(max_tokens=186))
    assert run(engine, request(max_tokens=185))["r"][-1].completion_tokens == 185


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (EngineOptions(max_model_len=0), UsageError, "--max-model-len is 0"),
        (EngineOptions(max_model_len=1 << 30), UsageError, "max_position_embeddings is 262144"),
        (EngineOptions(max_batched_tokens=-1), UsageError, "--max-batched-tokens is -1"),
        (EngineOptions(max_model_len=262144, block_size=1 << 28), CapacityError, "memory are free"),
    ],
)
def test_options_that_cannot_be_used(
    build: Build, options: EngineOptions, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(build: Build) -> None:
    with pytest.raises(UsageError, match="finds no CUDA device"):
        build(EngineOptions(device="cuda"))


def test_threads_suit_the_model() -> None:
    spec = ModelSpec.from_config(tiny_config())
    assert default_threads(spec) == 1
    assert default_threads(replace(spec, hidden_size=7168, vocab_size=163840)) == len(os.sched_getaffinity(0))
