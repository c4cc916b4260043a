"""Which tool a call in the model's output means.

The model writes ``functions.{name}:{n}`` before the arguments. It may also imitate foreign ids (``call_x``, a bare
number, a uuid), which name no tool: then the arguments decide, or there is no call. A name is never invented, and a
name that no tool has is passed on for the client to decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from perilune.chat.messages import Tool, is_tool_name

_PREFIX: Final = "functions."


def name_from_header(header: str, tools: Mapping[str, Tool]) -> str | None:
    """The name in a call's header, or None where it names nothing and the arguments must decide.

    A tool that is really called so wins: without prefix and counter, without counter, without prefix, whole.
    """
    header = header.strip()
    head, _, counter = header.rpartition(":")
    counted = counter.isascii() and counter.isdecimal() and head != ""
    head = head if counted else header
    plain = head.removeprefix(_PREFIX)
    for name in (plain, head, header.removeprefix(_PREFIX), header):
        if name in tools:
            return name
    if counted and is_tool_name(plain):
        return plain
    return next(iter(tools)) if len(tools) == 1 else None


def name_from_arguments(arguments: str, tools: Mapping[str, Tool]) -> str | None:
    """The only tool whose schema fits: all required keys are there, and more keys are known than to any other."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    scores = [(_known_keys(value, tool), name) for name, tool in tools.items()]
    best = max(scores, default=(0, ""))
    if best[0] < 1 or sum(score == best[0] for score, _ in scores) > 1:
        return None
    return best[1]


def is_json(arguments: str) -> bool:
    """Whether a client can parse the arguments; raw control characters in strings are forgiven, as clients do."""
    try:
        json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return False
    return True


def by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name; of two with one name the first counts."""
    return {tool.name: tool for tool in reversed(tools)}


def _known_keys(value: Mapping[str, object], tool: Tool) -> int:
    """Keys that the tool's schema knows; -1 if a required one is missing or the schema is no object's."""
    schema = tool.parameters or {}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return -1
    if any(not isinstance(key, str) or key not in value for key in required):
        return -1
    return sum(key in properties for key in value)
