"""Plain completions and choices, against the real engine: what is told is what the engine made, in every form."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune.server.state import SamplingDefaults
from perilune.types import FinishReason

if TYPE_CHECKING:
    from tests.server.conftest import ScriptFactory, Served, ServerFactory

ASK: dict[str, Any] = {"prompt": "the tide is", "max_tokens": 12, "seed": 3, "ignore_eos": True}


def complete(server: Served, **fields: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json={**ASK, **fields}, timeout=60)
    assert response.status_code == 200, response.text
    found = response.json()
    assert isinstance(found, dict)
    return found


def streamed(server: Served, **fields: Any) -> list[Any]:
    response = httpx.post(f"{server.url}/v1/completions", json={**ASK, **fields, "stream": True}, timeout=60)
    assert response.status_code == 200, response.text
    events = [event.removeprefix("data: ") for event in response.text.split("\n\n")[:-1]]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def joined(chunks: list[Any], number: int) -> list[dict[str, Any]]:
    """Choices put together from their chunks."""
    choices: list[dict[str, Any]] = [
        {"index": i, "text": "", "logprobs": None, "finish_reason": None} for i in range(number)
    ]
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None
            choice["text"] += piece["text"]
            choice["finish_reason"] = piece["finish_reason"]
            if piece["logprobs"] is not None:
                told = choice["logprobs"] or {name: [] for name in piece["logprobs"]}
                choice["logprobs"] = {name: told[name] + piece["logprobs"][name] for name in told}
    return choices


def ids(server: Served, text: str) -> list[int]:
    return server.engine.tokenizer.encode(text)


def test_shape(server: Served) -> None:
    found = complete(server)
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["model"] == "tiny"
    assert set(found["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == len("the tide is")
    assert found["usage"]["completion_tokens"] == 12


def test_text_and_its_ids_are_one_prompt(server: Served) -> None:
    text = complete(server)["choices"]
    assert complete(server, prompt=ids(server, ASK["prompt"]))["choices"] == text
    many = complete(server, prompt=[ASK["prompt"], "x"])["choices"]
    assert complete(server, prompt=[ids(server, ASK["prompt"]), ids(server, "x")])["choices"] == many
    assert many[0]["text"] == text[0]["text"], "with a seed an answer does not depend on what was sent with it"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"echo": True},
        {"logprobs": 3},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"n": 3, "logprobs": 0},
        {"prompt": ["a", "bc", "def"], "n": 2, "echo": True},
        {"stop": ["e", "q"], "max_tokens": 60},
        {"temperature": 0, "logprobs": 1},
    ],
    ids=str,
)
def test_streamed_equals_whole(server: Served, fields: dict[str, Any]) -> None:
    whole = complete(server, cache_salt="s", **fields)
    whole = complete(server, cache_salt="s", **fields)  # once more: now both find the prompt in the cache
    chunks = streamed(server, cache_salt="s", stream_options={"include_usage": True}, **fields)
    last = chunks.pop()
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert joined(chunks, len(whole["choices"])) == whole["choices"]


def test_without_include_usage_chunks_have_none(server: Served) -> None:
    assert all("usage" not in chunk for chunk in streamed(server))


def test_echo_with_logprobs_is_what_harnesses_sum_up(server: Served) -> None:
    """Arrays of prompt and answer, the first one null; the answer's part is the same when it is asked for later."""
    prompt = "high water"
    found = complete(server, prompt=prompt, echo=True, logprobs=1, max_tokens=4, temperature=0)
    choice, told = found["choices"][0], found["choices"][0]["logprobs"]
    assert choice["text"].startswith(prompt)
    assert {len(told[name]) for name in told} == {len(prompt) + 4}
    assert told["tokens"][: len(prompt)] == list(prompt)
    assert told["text_offset"][: len(prompt)] == list(range(len(prompt)))
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    for token, logprob, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]:
        assert logprob < 0
        assert top[token] == logprob
        assert max(top.values()) >= logprob
        assert 1 <= len(top) <= 2
    # The greedy continuation is the most likely token at each place, and scores the same as part of a prompt.
    generated = told["token_logprobs"][len(prompt) :]
    assert [max(top.values()) for top in told["top_logprobs"][len(prompt) :]] == generated
    names = complete(server, prompt=prompt, max_tokens=4, temperature=0, logprobs=0, return_tokens_as_token_ids=True)
    answer = [int(name.removeprefix("token_id:")) for name in names["choices"][0]["logprobs"]["tokens"]]
    scored = complete(server, prompt=ids(server, prompt) + answer, echo=True, logprobs=1, max_tokens=0)
    assert scored["choices"][0]["finish_reason"] == "length"
    assert scored["usage"]["completion_tokens"] == 0
    again = scored["choices"][0]["logprobs"]["token_logprobs"]
    assert len(again) == len(prompt) + 4
    assert again[len(prompt) :] == pytest.approx(generated, abs=1e-4)


def test_logprobs_of_a_whole_vocabulary_sum_to_one(server: Served) -> None:
    told = complete(server, logprobs=20, temperature=2)["choices"][0]["logprobs"]
    assert all(20 <= len(top) <= 21 for top in told["top_logprobs"])
    assert all(sum(map(math.exp, top.values())) <= 1 + 1e-6 for top in told["top_logprobs"])


def test_parts_of_characters_have_names_and_offsets(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    engine.steps = [[token] for token in engine.ids("a🙂b")]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        assert complete(served, prompt="é", echo=True)["choices"][0]["text"] == "éa🙂b"
        chunks = streamed(served, prompt="é")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "🙂", "b", ""]


def test_special_tokens_are_no_text(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    engine.steps = [engine.ids("a", "<think>", "b", "</think>", "<|im_user|>", "c")]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        found = complete(served, prompt=engine.ids("x", "<|im_user|>"), echo=True)
    assert found["choices"][0]["text"] == "xabc"


def test_choices_are_what_their_seeds_give_alone(server: Served) -> None:
    many = complete(server, n=4)["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2, 3]
    alone = [complete(server, seed=3 + i)["choices"][0]["text"] for i in range(4)]
    assert [choice["text"] for choice in many] == alone
    assert len(set(alone)) == 4
    two = complete(server, n=2, prompt=["the tide is", "the tide is"])["choices"]
    assert [choice["text"] for choice in two] == [*alone[:2], *alone[:2]]


def test_without_a_seed_answers_differ_and_can_be_repeated(server: Served) -> None:
    body = {**ASK, "seed": None, "prompt": ["the tide is"] * 2, "n": 2}
    responses = [httpx.post(f"{server.url}/v1/completions", json=body, timeout=60) for _ in range(2)]
    texts = [choice["text"] for response in responses for choice in response.json()["choices"]]
    assert len(set(texts)) == 8
    seed = int(responses[0].headers["x-perilune-seed"])
    assert [complete(server, seed=seed + i)["choices"][0]["text"] for i in range(4)] == texts[:4]


def test_a_prompt_is_computed_once_for_all_its_choices(server: Served) -> None:
    prompt = "a prompt that fills some blocks of the cache, " * 8
    before = server.engine.status().stats
    found = complete(server, prompt=prompt, n=4, cache_salt="once")
    after = server.engine.status().stats
    block = server.engine.config.block_size
    assert found["usage"]["prompt_tokens"] == len(prompt)
    assert found["usage"]["completion_tokens"] == 48
    assert found["usage"]["cached_tokens"] == 0
    shared = (len(prompt) - 1) // block * block
    assert after.prefix_hits - before.prefix_hits == 3 * shared
    again = complete(server, prompt=prompt, n=2, cache_salt="once")["usage"]
    assert again["cached_tokens"] == again["prompt_tokens_details"]["cached_tokens"] == shared
    assert complete(server, prompt=prompt, cache_salt="other")["usage"]["cached_tokens"] == 0


def test_every_field_reaches_the_engine(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    asked = {
        "min_tokens": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2, "6": -100},
        "priority": 7,
        "logprobs": 4,
        "echo": True,
        "top_k": 9,
        "min_p": 0.25,
        "stop_token_ids": [7],
    }
    with serve(lambda: (engine, SamplingDefaults())) as served:
        complete(served, **asked)
    (request,) = engine.requests
    sampling = request.sampling
    assert request.priority == 7
    assert (sampling.min_tokens, sampling.presence_penalty, sampling.frequency_penalty) == (2, 0.5, -0.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.5, ((5, 2.0), (6, -100.0)))
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.top_k, sampling.min_p) == (4, 4, 9, 0.25)
    assert (sampling.seed, sampling.stop_token_ids) == (3, (7,))


def test_biases_and_penalties_do_something(server: Served) -> None:
    only = complete(server, logit_bias={str(ids(server, "z")[0]): 100}, temperature=0)
    assert only["choices"][0]["text"] == "z" * 12
    varied = complete(server, logit_bias={str(ids(server, "z")[0]): 4}, presence_penalty=2, temperature=0)
    assert varied["choices"][0]["text"] != "z" * 12
    end = ids(server, "a")[0]
    fields = {"logit_bias": {str(end): 100}, "stop_token_ids": [end], "temperature": 0}
    assert complete(server, **fields)["usage"]["completion_tokens"] == 1
    assert complete(server, **fields, min_tokens=5)["usage"]["completion_tokens"] == 6


def test_one_choice_that_fails_fails_all_of_them(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script(finish=FinishReason.ERROR)
    engine.steps = [engine.ids("a")]
    with serve(lambda: (engine, SamplingDefaults())) as served:
        response = httpx.post(f"{served.url}/v1/completions", json={**ASK, "n": 3}, timeout=10)
        assert response.status_code == 500
        assert "/secret" not in response.text
        stream = httpx.post(f"{served.url}/v1/completions", json={**ASK, "n": 3, "stream": True}, timeout=10)
    assert '"error"' in stream.text
    assert "[DONE]" not in stream.text
    assert "/secret" not in stream.text


# ── chat ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def chat(server: Served, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3, **fields}
    response = server.post(body)
    assert response.status_code == 200, response.text
    found = response.json()
    assert isinstance(found, dict)
    return found


def test_chat_choices(server: Served) -> None:
    fields: dict[str, Any] = {"cache_salt": "chat", "logit_bias": {"5": -100}}
    alone = [chat(server, seed=3 + i, **fields)["choices"][0]["message"] for i in range(3)]
    whole = chat(server, n=3, **fields)
    assert [choice["message"] for choice in whole["choices"]] == alone
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 12, "seed": 3, "n": 3, **fields}
    events = server.events({**body, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]"
    assert events.pop()["usage"] == whole["usage"]
    texts, ends, used = [""] * 3, [0] * 3, 0
    for event in events:
        (piece,) = event["choices"]
        texts[piece["index"]] += piece["delta"].get("content", "")
        if piece["finish_reason"]:
            ends[piece["index"]] += 1
            used += piece["usage"]["completion_tokens"]
    assert texts == [message["content"] or "" for message in alone]
    assert ends == [1, 1, 1]
    assert used == whole["usage"]["completion_tokens"]


def test_chat_logprobs_stand_where_their_text_stands(script: ScriptFactory, serve: ServerFactory) -> None:
    engine = script()
    steps = [engine.ids("<think>", "ab"), engine.ids("c", "</think>", "d"), engine.ids("e"), engine.ids("é")[:1]]
    engine.steps = [*steps, engine.ids("é")[1:]]
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    with serve(lambda: (engine, SamplingDefaults())) as served:
        (choice,) = served.post(body).json()["choices"]
        events = served.events(body)
        plain = served.post({**body, "logprobs": False, "top_logprobs": 0}).json()["choices"][0]
    assert plain["logprobs"] is None
    assert choice["message"]["content"] == "deé"
    assert choice["message"]["reasoning_content"] == "abc"
    told = choice["logprobs"]
    assert [entry["token"] for entry in told["reasoning_content"]] == ["a", "b", "c"]
    assert [entry["token"] for entry in told["content"]] == ["d", "e", "bytes:\\xc3", "bytes:\\xa9"]
    assert bytes(octet for entry in told["content"] for octet in entry["bytes"]).decode() == "deé"
    for entry in told["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 2
    streamed_told: dict[str, list[Any]] = {"content": [], "reasoning_content": []}
    for event in events[:-1]:
        piece = event["choices"][0]["logprobs"]
        for name in streamed_told:
            streamed_told[name] += [] if piece is None else piece[name]
    assert streamed_told == {name: told[name] for name in streamed_told}


def test_chat_logprobs_from_the_real_engine(server: Served) -> None:
    found = chat(server, logprobs=True, top_logprobs=3, temperature=0, ignore_eos=True)
    entries = found["choices"][0]["logprobs"]["content"]
    assert entries
    for entry in entries:
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert [top["logprob"] for top in entry["top_logprobs"]] == sorted(
            (top["logprob"] for top in entry["top_logprobs"]), reverse=True
        )
