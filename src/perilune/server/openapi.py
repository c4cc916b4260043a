"""``/openapi.json`` and ``/docs``: what this server takes, from the very tables by which it checks.

OpenAPI 3.1. Responses are described by their structs' own JSON Schema. The page is one file without outside resources,
so that it works where nothing else can be reached, and no one learns that it was opened.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from perilune import __version__
from perilune.server.limits import Limits
from perilune.server.params import Param
from perilune.server.prepare import Detokenized, Tokenized
from perilune.server.replies import ErrorBody
from perilune.server.schema import CHAT
from perilune.server.text_schema import COMPLETION, DETOKENIZE, TOKENIZE
from perilune.server.text_wire import TextCompletion
from perilune.server.tokenize_api import TokenizerInfo
from perilune.server.wire import Completion

_REF: Final = "#/components/schemas/{name}"
_TABLES: Final[Mapping[str, Iterable[Param[Any]]]] = {
    "ChatRequest": CHAT,
    "CompletionRequest": COMPLETION,
    "TokenizeRequest": TOKENIZE,
    "DetokenizeRequest": DETOKENIZE,
}
_POSTS: Final = (
    ("/v1/chat/completions", "Answer a conversation", "ChatRequest", "Completion"),
    ("/v1/completions", "Continue text", "CompletionRequest", "TextCompletion"),
    ("/tokenize", "Token ids of text or of a conversation", "TokenizeRequest", "Tokenized"),
    ("/detokenize", "Text of token ids", "DetokenizeRequest", "Detokenized"),
)
_GETS: Final = (
    ("/v1/models", "The names of the model"),
    ("/v1/models/{name}", "One of them"),
    ("/tokenizer_info", "Special tokens and sizes"),
    ("/version", "The server's version"),
    ("/health", "Whether the process lives"),
    ("/ready", "Whether requests are taken"),
    ("/metrics", "Prometheus metrics"),
    ("/openapi.json", "This description"),
    ("/docs", "This description, for people"),
)
_STATUSES: Final = {
    "400": "The request is wrong; `param` names the field",
    "401": "No API key, where one is needed",
    "403": "A web page of another origin",
    "404": "No such model or path",
    "408": "It did not arrive, or was not answered, in time",
    "413": "The body is too large",
    "415": "The body is not plain application/json",
    "421": "A Host header that is not this server's",
    "429": "A key's own limit; `retry-after` says when to come back",
    "500": "The request failed",
    "503": "Loading, full, ending or failed; `retry-after` says when to come back",
}


def document(limits: Limits) -> dict[str, Any]:
    """The whole description."""
    _, schemas = msgspec.json.schema_components(
        (ErrorBody, Completion, TextCompletion, Tokenized, Detokenized, TokenizerInfo), ref_template=_REF
    )
    schemas = dict(schemas)
    for name, table in _TABLES.items():
        schemas[name] = _body(table)
        if "n" in schemas[name]["properties"]:
            schemas[name]["properties"]["n"]["maximum"] = limits.max_choices
    paths = {path: {"post": _post(about, body, reply)} for path, about, body, reply in _POSTS}
    paths |= {path: {"get": _get(path, about)} for path, about in _GETS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Perilune", "version": __version__, "description": "OpenAI-compatible inference server"},
        "security": [{}, {"key": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def page(limits: Limits) -> str:
    """The description for people."""
    described = document(limits)
    sections = []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            sections.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            sections.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                sections.append(_field_table(described["components"]["schemas"][name]))
    rows = "".join(f"<tr><td>{status}<td>{html.escape(about)}" for status, about in _STATUSES.items())
    body = "\n".join(sections)
    return (
        "<!doctype html>\n<html lang=en><meta charset=utf-8><title>Perilune API</title>\n"
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;width:100%}td,th{border-top:1px solid #8884;padding:.2rem .6rem;"
        "text-align:left;vertical-align:top}code{font-size:.92em}:root{color-scheme:light dark}</style>\n"
        f"<h1>Perilune {html.escape(__version__)}</h1>\n"
        "<p>The same for programs: <a href=openapi.json>openapi.json</a></p>\n"
        f"{body}\n<h2>Errors</h2>\n<table>{rows}</table>\n</html>\n"
    )


def _body(table: Iterable[Param[Any]]) -> dict[str, Any]:
    """JSON Schema of a request. Unknown fields are ignored, so they are allowed."""
    properties = {param.name: _property(param) for param in table}
    required = [param.name for param in table if param.required]
    return {"type": "object", "properties": properties, "required": required}


def _property(param: Param[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = dict(param.schema)
    if isinstance(schema.get("type"), str) and not param.required:
        schema["type"] = [schema["type"], "null"]  # null means absent
    elif "oneOf" in schema and not param.required:
        schema["oneOf"] = [*schema["oneOf"], {"type": "null"}]
    return {**schema, "description": param.about or "not supported: only the values that ask for nothing"}


def _post(about: str, body: str, reply: str) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"$ref": _REF.format(name=reply)}}}
    if reply in ("Completion", "TextCompletion"):
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": about,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": _REF.format(name=body)}}},
        },
        "responses": {"200": {"description": "OK", "content": content}, **_errors()},
    }


def _get(path: str, about: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": about, "responses": {"200": {"description": "OK"}, **_errors()}}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def _errors() -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": _REF.format(name="ErrorBody")}}}
    return {status: {"description": about, "content": body} for status, about in _STATUSES.items()}


def _field_table(schema: Mapping[str, Any]) -> str:
    rows = []
    for name, described in schema["properties"].items():
        rows.append(f"<tr><td><code>{html.escape(name)}</code><td>{html.escape(described['description'])}")
        rows.append(f"<td><code>{html.escape(_values(described))}</code>")
    return f"<table><tr><th>field<th><th>values{''.join(rows)}</table>"


def _values(described: Mapping[str, Any]) -> str:
    if "enum" in described:
        return " | ".join(msgspec.json.encode(value).decode() for value in described["enum"] if value is not None)
    kinds = described.get("type", "")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if "minimum" in described:
        kind += f" {described['minimum']} … {described['maximum']}"
    return kind
