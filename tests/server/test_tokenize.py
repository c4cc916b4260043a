"""/tokenize, /detokenize, /tokenizer_info, /version: as vLLM's clients and lm-eval's remote tokenizer use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from perilune import __version__

if TYPE_CHECKING:
    from tests.server.conftest import Served

HI = [{"role": "user", "content": "hi"}]


def post(server: Served, path: str, **fields: Any) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=fields, timeout=30)
    assert response.status_code == 200, response.text
    found = response.json()
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("text", ["", "tide", "é🙂 \n", "<|im_end|>[EOS]", "x" * 100_000])
def test_there_and_back(server: Served, text: str) -> None:
    found = post(server, "/tokenize", prompt=text, add_special_tokens=False)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == server.engine.max_model_len
    assert found["token_strs"] is None
    assert not any(map(server.engine.tokenizer.is_special, found["tokens"]))
    assert post(server, "/detokenize", tokens=found["tokens"]) == {"prompt": text}


def test_token_strs(server: Served) -> None:
    found = post(server, "/tokenize", prompt="ab", return_token_strs=True, model="tiny")
    assert found["token_strs"] == ["a", "b"]


def test_a_conversation_is_what_chat_runs(server: Served) -> None:
    chat = server.post({"messages": HI, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    tokens = post(server, "/tokenize", messages=HI)["tokens"]
    assert len(tokens) == chat
    text = post(server, "/detokenize", tokens=tokens)["prompt"]
    assert text.endswith("<|im_user|>user<|im_middle|>hi<|im_end|><|im_assistant|>assistant<|im_middle|>")
    shorter = post(server, "/tokenize", messages=HI, add_generation_prompt=False)["tokens"]
    assert tokens[: len(shorter)] == shorter
    assert len(shorter) < len(tokens)
    tool = {"type": "function", "function": {"name": "f"}}
    assert post(server, "/tokenize", messages=HI, tools=[tool])["count"] > chat


def test_tokenizer_info(server: Served) -> None:
    info = httpx.get(f"{server.url}/tokenizer_info").json()
    assert [info[name] for name in ("bos_token", "pad_token", "unk_token")] == ["[BOS]", "[PAD]", "[UNK]"]
    assert info["eos_token"] in server.engine.tokenizer.specials
    assert info["vocab_size"] == server.engine.tokenizer.num_ranks + 256
    assert info["added_tokens"]["<|im_end|>"] == server.engine.tokenizer.special("<|im_end|>")
    assert info["chat_template"] is None


def test_version(server: Served) -> None:
    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
