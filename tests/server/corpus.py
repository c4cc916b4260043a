"""Bad requests, each with the status that is promised for it. Data only.

After the faults that other servers had (unbounded fields, ids beyond the vocabulary, NaN, nested JSON, templates and
grammars from requests), each as a body of our own. The model behind has 512 known ids and a ``vocab_size`` of 600.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

KNOWN, VOCAB = 512, 600
CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
JSON_TYPE: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Bad:
    """One kind of bad request. ``param``: what the error names, None for nothing in particular."""

    name: str
    path: str
    body: bytes
    status: int = 400
    param: str | None = None
    media_type: str = JSON_TYPE


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


OK_CHAT: Final = {"model": "tiny", "messages": user("hi"), "max_tokens": 2}
OK_TEXT: Final = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


def _chat(name: str, param: str | None, status: int = 400, **fields: Any) -> Bad:
    return Bad(f"chat: {name}", CHAT, json.dumps({**OK_CHAT, **fields}).encode(), status, param)


def _text(name: str, param: str | None, status: int = 400, **fields: Any) -> Bad:
    return Bad(f"text: {name}", TEXT, json.dumps({**OK_TEXT, **fields}).encode(), status, param)


def _tokens(path: str, name: str, param: str | None, status: int = 400, **fields: Any) -> Bad:
    return Bad(f"{path}: {name}", path, json.dumps(fields).encode(), status, param)


def _broken_json() -> Iterator[Bad]:
    bodies = {
        "empty": b"",
        "blank": b" \n",
        "array": b"[1]",
        "string": b'"x"',
        "number": b"5",
        "null": b"null",
        "half": b'{"model":',
        "trailing comma": b'{"model":"tiny",}',
        "comment": b'{/**/"model":"tiny"}',
        "single quotes": b"{'model':'tiny'}",
        "two objects": b"{}{}",
        "text behind": b"{}x",
        "byte order mark": b"\xef\xbb\xbf{}",
        "invalid UTF-8": b'{"model":"\xff"}',
        "overlong UTF-8": b'{"model":"\xc0\xaf"}',
        "NUL": b'{"model":"a\x00b"}',
        "raw line break": b'{"model":"a\nb"}',
        "UTF-16": '{"model":"tiny"}'.encode("utf-16"),
        "lone surrogate": b'{"messages":[{"role":"user","content":"\\ud800x"}],"prompt":"\\ud800x"}',
        "lone low surrogate in a stop": b'{"messages":[{"role":"user","content":"x"}],"prompt":"x","stop":["\\udfff"]}',
        "100,000 brackets": b"[" * 100_000,
        "100,000 braces": b'{"a":' * 100_000,
        "deep in a field": b'{"messages":' + b'[{"a":' * 50_000,
        "depth 65": b'{"x":' + b"[" * 65 + b"]" * 65 + b"}",
        "leading zero": b'{"max_tokens":01}',
        "plus sign": b'{"max_tokens":+1}',
        "hex": b'{"max_tokens":0x10}',
        "True": b'{"stream":True}',
        "undefined": b'{"stream":undefined}',
    }
    for name, body in bodies.items():
        yield Bad(f"JSON: {name}", CHAT, body)
    for path in (TEXT, TOKENIZE, DETOKENIZE):
        for name in ("empty", "array", "half", "100,000 brackets", "invalid UTF-8", "lone surrogate"):
            yield Bad(f"{path} JSON: {name}", path, bodies[name])


def _floats() -> Iterator[Bad]:
    raw = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400")
    wrong = ("1e-320", "1e300", "-3", "true", '"1"', "[]")
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for field in names:
        for value in raw + wrong:
            body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"%b":%b}'
            param = field if value in wrong else None
            yield Bad(f"chat: {field} {value}", CHAT, body % (field.encode(), value.encode()), 400, param)
    for value in raw + wrong[1:]:
        body = b'{"model":"tiny","prompt":"x","logit_bias":{"5":%b}}' % value.replace("-3", "-101").encode()
        yield Bad(f"text: logit_bias {value}", TEXT, body, 400, None if value in raw else "logit_bias.5")


def _integers() -> Iterator[Bad]:
    for field in ("max_tokens", "n", "min_tokens", "seed", "top_k", "priority", "logprobs"):
        wrong: tuple[Any, ...] = (-(2**63), 2**64, 10**40, 1.5, True, "1", {})
        for value in wrong:
            yield _text(f"{field} {value!r:.12}", field, 400, **{field: value})
    yield _chat("n 17", "n", n=17)
    yield _chat("n 129", "n", n=129)
    yield _chat("n 10**9", "n", n=10**9)
    yield _chat("n 0", "n", n=0)
    yield _chat("n -1", "n", n=-1)
    yield _chat("max_tokens 0", "max_tokens", max_tokens=0)
    yield _chat("max_completion_tokens -1", "max_completion_tokens", max_completion_tokens=-1)
    yield _chat("max_tokens beyond the context", "max_tokens", max_tokens=4090)
    yield _chat("min_tokens beyond max_tokens", "min_tokens", min_tokens=3)
    yield _chat("top_logprobs 21", "top_logprobs", logprobs=True, top_logprobs=21)
    yield _chat("top_logprobs alone", "top_logprobs", top_logprobs=2)
    yield _chat("logprobs 5", "logprobs", logprobs=5)
    yield _chat("top_k -2", "top_k", top_k=-2)
    yield _text("max_tokens 0 without echo", "max_tokens", max_tokens=0)
    yield _text("logprobs 21", "logprobs", logprobs=21)


def _ids() -> Iterator[Bad]:
    wrong = {
        "-1": -1,
        "the first of the gap": KNOWN,
        "the last of the gap": VOCAB - 1,
        "vocab": VOCAB,
        "2**31": 2**31,
        "2**32": 2**32,
        "2**63": 2**63,
        "2**63 - 1": 2**63 - 1,
        "10**30": 10**30,
    }
    for name, token in wrong.items():
        yield _chat(f"stop_token_ids {name}", "stop_token_ids", stop_token_ids=[5, token], min_tokens=1)
        yield _chat(f"logit_bias {name}", "logit_bias", logit_bias={str(token): -100})
        yield _text(f"prompt {name}", "prompt", prompt=[5, token])
        yield _text(f"prompts {name}", "prompt", prompt=[[5], [token]])
        yield _tokens(DETOKENIZE, f"tokens {name}", "tokens", tokens=[token])
    for name, value in {"true": True, "1.0": 1.0, '"5"': "5", "null": None, "[5]": [5]}.items():
        yield _chat(f"stop_token_ids {name}", "stop_token_ids", stop_token_ids=[value])
        yield _text(f"prompt with {name}", "prompt", prompt=[5, value])
        yield _tokens(DETOKENIZE, f"tokens {name}", "tokens", tokens=[5, value])
    for key in ("x", "", "1.0", "1e3", " 5", "0x5", "٣", "5" * 5000):
        yield _chat(f"logit_bias key {key[:8]!r}", "logit_bias", logit_bias={key: 1})
    yield _chat("logit_bias array", "logit_bias", logit_bias=[[5, 1]])
    yield _chat("logit_bias of 2000", "logit_bias", logit_bias={str(i): 1 for i in range(2000)})
    yield _chat("stop_token_ids of 100,000", "stop_token_ids", stop_token_ids=[5] * 100_000)


def _prompts() -> Iterator[Bad]:
    yield Bad("text: no prompt", TEXT, b'{"model":"tiny"}', 400, "prompt")
    wrong: tuple[Any, ...] = (None, "", [], {}, 5, True, [[]], [""], ["a", 5], [5, "a"], [["a"]], [None], [[5], []])
    for value in wrong:
        param = {"[[]]": "prompt[0]", "['']": "prompt[0]", "[[5], []]": "prompt[1]", "''": "prompt"}.get(repr(value))
        yield _text(f"prompt {value!r}", param or "prompt", prompt=value)
    yield _text("100,000 prompts", "prompt", prompt=["a"] * 100_000)
    yield _text("1025 prompts", "prompt", prompt=[[5]] * 1025)
    yield _text("n for each of 1024", "n", prompt=[[5]] * 1024, n=2)
    yield _text("16 for each of 65", "n", prompt=["a"] * 65, n=16)
    yield _text("prompt over the context", "prompt", prompt=[5] * 5000)
    yield _text("prompt of just the context", "prompt", prompt=[5] * 4096)
    yield _text("one of many over the context", "prompt", prompt=[[5], [5] * 5000])
    yield _text("suffix", "suffix", suffix="x")
    yield _text("best_of 2", "best_of", best_of=2)
    yield _text("best_of 10**9", "best_of", best_of=10**9)
    yield _text("use_beam_search", "use_beam_search", use_beam_search=True)
    yield _text("echo 1", "echo", echo=1)
    yield _text("prompt_embeds", "prompt_embeds", prompt_embeds="AAAA")
    yield _text("truncate_prompt_tokens", "truncate_prompt_tokens", truncate_prompt_tokens=-1)
    yield _text("guided_regex", "guided_regex", guided_regex="((a{0,100}){0,100}){0,100}b")
    yield _text("grammar", "structured_outputs", structured_outputs={"grammar": "(" * 60_000})
    yield _text("unknown model", "model", 404, model="gpt-9")
    yield _tokens(TOKENIZE, "nothing", "prompt", model="tiny")
    yield _tokens(TOKENIZE, "both", "prompt", prompt="x", messages=user("x"))
    yield _tokens(TOKENIZE, "prompt 5", "prompt", prompt=5)
    yield _tokens(TOKENIZE, "prompt [5]", "prompt", prompt=[5])
    yield _tokens(TOKENIZE, "no messages", "messages", messages=[])
    yield _tokens(TOKENIZE, "role", "messages[0].role", messages=[{"role": "root", "content": "x"}])
    yield _tokens(TOKENIZE, "flag", "return_token_strs", prompt="x", return_token_strs="yes")  # noqa: S106 - no password
    yield _tokens(TOKENIZE, "template", "chat_template", messages=user("x"), chat_template="{{ 1 }}")
    yield _tokens(TOKENIZE, "unknown model", "model", 404, prompt="x", model="gpt-9")
    yield _tokens(DETOKENIZE, "nothing", "tokens")
    yield _tokens(DETOKENIZE, "text", "tokens", tokens="x")
    yield _tokens(DETOKENIZE, "nested", "tokens", tokens=[[5]])
    yield _tokens(DETOKENIZE, "unknown model", "model", 404, tokens=[5], model="gpt-9")


def _messages() -> Iterator[Bad]:
    yield Bad("chat: no messages", CHAT, b'{"model":"tiny"}', 400, "messages")
    yield _chat("messages null", "messages", messages=None)
    yield _chat("messages empty", "messages", messages=[])
    yield _chat("messages text", "messages", messages="hi")
    yield _chat("messages object", "messages", messages={"role": "user"})
    yield _chat("message null", "messages[0]", messages=[None])
    yield _chat("message text", "messages[0]", messages=["hi"])
    yield _chat("no role", "messages[0]", messages=[{"content": "x"}])
    yield _chat("role root", "messages[0].role", messages=[{"role": "root", "content": "x"}])
    yield _chat("role 5", "messages[0].role", messages=[{"role": 5, "content": "x"}])
    yield _chat("content 5", "messages[0].content", messages=user(5))
    yield _chat("content of numbers", "messages[0].content[0]", messages=user([5]))
    for kind in ("image_url", "input_audio", "video_url", "file"):
        part = {"type": kind, kind: {"url": "http://a\\@127.0.0.1/"}}
        yield _chat(f"part {kind}", "messages[0].content[0].type", messages=user([part]))
    yield _chat("part without text", "messages[0].content[0].text", messages=user([{"type": "text"}]))
    yield _chat(
        "partial in the middle",
        "messages[0].partial",
        messages=[{"role": "assistant", "content": "a", "partial": True}, *user("x")],
    )
    yield _chat("over the context", "messages", messages=user("x" * 5000))
    yield _chat("a megabyte over the context", "messages", messages=user("x y " * 250_000))
    yield _chat("tools object", "tools", tools={})
    yield _chat("tool null", "tools[0]", tools=[None])
    yield _chat("tool without a name", "tools[0].function", tools=[{"type": "function", "function": {}}])
    yield _chat("tool of type x", "tools[0].type", tools=[{"type": "x", "function": {"name": "f"}}])
    yield _chat("tool name empty", "tools[0].function.name", tools=[{"type": "function", "function": {"name": ""}}])
    yield _chat("tool name blank", "tools[0].function.name", tools=[{"type": "function", "function": {"name": "a b"}}])
    yield _chat("tool_choice required", "tool_choice", tool_choice="required")
    yield _chat("tool_choice named", "tool_choice", tool_choice={"type": "function", "function": {"name": "f"}})
    yield _chat("tool_choice always", "tool_choice", tool_choice="always")


def _chat_fields() -> Iterator[Bad]:
    yield _chat("model 5", "model", model=5)
    yield _chat("model of 600 characters", "model", model="x" * 600)
    yield _chat("unknown model", "model", 404, model="gpt-9")
    yield _chat("model with a log line", "model", 404, model='x\r\n{"level":"error"')
    yield _chat("stream text", "stream", stream="true")
    yield _chat("stream 1", "stream", stream=1)
    yield _chat("stream_options alone", "stream_options", stream_options={"include_usage": True})
    yield _chat("stream_options array", "stream_options", stream=True, stream_options=[])
    yield _chat("include_usage 1", "stream_options.include_usage", stream=True, stream_options={"include_usage": 1})
    stops: tuple[Any, ...] = (5, [5], "", [""], ["a"] * 17, ["a"] * 100_000, "a" * 257, {}, [None])
    for stop in stops:
        yield _chat(f"stop {len(str(stop))} {str(stop)[:20]}", "stop", stop=stop)
    yield _chat("cache_salt empty", "cache_salt", cache_salt="")
    yield _chat("cache_salt 5", "cache_salt", cache_salt=5)
    yield _chat("cache_salt long", "cache_salt", cache_salt="x" * 600)
    yield _chat("response_format text", "response_format", response_format="json")
    yield _chat("response_format json", "response_format.type", response_format={"type": "json_object"})
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "stsring"}}}
    yield _chat("response_format schema", "response_format.type", response_format=schema)
    yield _chat("guided_json", "guided_json", guided_json={"type": "stsring"})
    yield _chat("guided_regex", "guided_regex", guided_regex="[[")
    yield _chat("guided_choice", "guided_choice", guided_choice=["a"] * 1000)
    yield _chat("guided_grammar", "guided_grammar", guided_grammar="root ::= ")
    yield _chat("structured_outputs", "structured_outputs", structured_outputs={"json": {"$ref": "#"}})
    yield _chat("bad_words", "bad_words", bad_words=["x"] * 128)
    yield _chat("allowed_token_ids", "allowed_token_ids", allowed_token_ids=[2**63])
    yield _chat("prompt_embeds", "prompt_embeds", prompt_embeds="AAAA")
    yield _chat("prompt_logprobs", "prompt_logprobs", prompt_logprobs=1)
    yield _chat("chat_template", "chat_template", chat_template="{% for i in range(10**9) %}")
    yield _chat("template kwargs tokenize", "chat_template_kwargs", chat_template_kwargs={"tokenize": True})
    yield _chat("template kwargs template", "chat_template_kwargs", chat_template_kwargs={"chat_template": "x"})
    yield _chat("template kwargs no", "chat_template_kwargs.thinking", chat_template_kwargs={"thinking": "no"})
    yield _chat("thinking true", "thinking", thinking=True)
    yield _chat("thinking maybe", "thinking.type", thinking={"type": "maybe"})
    yield _chat("functions", "functions", functions=[{"name": "f"}])
    yield _chat("function_call", "function_call", function_call={"name": "f"})
    yield _chat("modalities", "modalities", modalities=["text", "audio"])
    yield _chat("audio", "audio", audio={"voice": "x"})
    yield _chat("best_of", "best_of", best_of=10**9)
    yield _chat("continue_final_message", "continue_final_message", continue_final_message=True)
    yield _chat("parallel_tool_calls", "parallel_tool_calls", parallel_tool_calls="no")


def _media() -> Iterator[Bad]:
    body = json.dumps(OK_CHAT).encode()
    for media_type in ("text/plain", "", "application/jsonp", "multipart/form-data; boundary=x", "*/*"):
        yield Bad(f"media type {media_type!r}", CHAT, body, 415, None, media_type)
    yield Bad("form", TEXT, b"prompt=x", 415, None, "application/x-www-form-urlencoded")
    for path in ("/v1/embeddings", "/v1/responses", "/invocations", "/pause", "/v1/load_lora_adapter", "/score"):
        yield Bad(f"path {path}", path, body, 404)
    for path in ("/v1/models", "/metrics", "/tokenizer_info", "/version", "/health"):
        yield Bad(f"method {path}", path, body, 405)
    for path in ("/V1/completions", "//v1/completions", "/v1/completions/", "/v1/completions;x"):
        yield Bad(f"path {path}", path, body, 404)


CASES: Final = tuple(
    case
    for part in (_broken_json, _floats, _integers, _ids, _prompts, _messages, _chat_fields, _media)
    for case in part()
)
