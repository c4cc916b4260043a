"""The offline API on the bundled model and on a random one."""

from __future__ import annotations

from importlib.resources import as_file, files
from pathlib import Path

import pytest

from perilune.checkpoint.tiny import write_tiny
from perilune.errors import ContextLengthError, RequestError
from perilune.llm import LLM, Prompt
from perilune.types import FinishReason, SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("llm") / "model"
    write_tiny(path, None, "int4", seed=5, tokenizer=None)
    return LLM(path, max_model_len=128, threads=1)


def test_a_batch_keeps_its_order_and_each_prompt_its_answer(llm: LLM) -> None:
    prompts: list[Prompt] = ["moon", "a longer prompt about tides", (65, 66), "moon"]
    batch = llm.generate(prompts, GREEDY)
    assert [len(found.ids) for found in batch] == [12] * 4
    assert batch[0].ids == batch[3].ids
    for prompt, found in zip(prompts, batch, strict=True):
        assert found.ids == llm.generate([prompt], GREEDY)[0].ids
        assert found.finish_reason == FinishReason.LENGTH
    assert batch[2].prompt_ids == (65, 66)


def test_params_for_each_prompt_and_logprobs(llm: LLM) -> None:
    first, second = llm.generate(
        ["ab", "cd"], [GREEDY, SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=0, ignore_eos=True)]
    )
    assert (len(first.ids), len(first.logprobs), len(second.logprobs), len(second.prompt_logprobs)) == (12, 0, 3, 1)
    with pytest.raises(RequestError, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(RequestError, match="a list of them"):
        llm.generate("ab", GREEDY)


def test_a_prompt_that_cannot_run_leaves_none_running(llm: LLM) -> None:
    with pytest.raises(ContextLengthError):
        llm.generate(["ok", "x" * 200], GREEDY)
    assert llm.generate(["ok"], GREEDY)[0].finish_reason == FinishReason.LENGTH


def test_a_stream_that_is_left_ends_its_request(llm: LLM) -> None:
    stream = llm.stream("moon", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm._engine.has_work


def test_a_chat_with_the_bundled_model_thinks_answers_and_calls() -> None:
    calculator = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
    greedy = SamplingParams(max_tokens=200, temperature=0.0)
    with as_file(files("perilune").joinpath("assets", "pico")) as path:
        pico = LLM(Path(path), max_model_len=2048, threads=1)
    answer = pico.chat([{"role": "user", "content": "What is 21 + 34?"}], sampling=greedy)
    assert "55" in answer.content
    assert answer.reasoning
    assert answer.finish_reason == "stop"
    answer = pico.chat([{"role": "user", "content": "What is 21 * 34?"}], [calculator], greedy)
    assert [(call.id, call.name) for call in answer.tool_calls] == [("functions.calculator:0", "calculator")]
    assert answer.finish_reason == "tool_calls"
