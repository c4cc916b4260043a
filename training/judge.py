"""Whether an answer is right, by what it says: the number that it ends with, the facts that it names, its calls.

Knows the taught reply and what it must say (``Sample.answers``), nothing of engines and tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from perilune.types import FinishReason
from training.samples import Sample, Tool


@dataclass(frozen=True, slots=True)
class Spoken:
    """An answer as a client sees it. ``calls``: name and raw arguments. ``thought`` is for readers and never judged."""

    content: str
    calls: tuple[tuple[str, str], ...]
    finish: FinishReason | None
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """``valid``: ended by itself and, where calls are due, calls these tools with arguments that fit their schemas."""

    valid: bool
    right: bool


def judge(chat: Sample, spoken: Spoken) -> Verdict:
    """Compares an answer with the taught reply. The order of calls side by side is free."""
    ended = spoken.finish == FinishReason.STOP
    if chat.reply.calls:
        wanted = sorted((call.name, _object(call.arguments)) for call in chat.reply.calls)
        given = sorted((name, _object(arguments)) for name, arguments in spoken.calls)
        valid = ended and [name for name, _ in given] == [name for name, _ in wanted]
        valid = valid and all(_fits(chat.tools, name, arguments) for name, arguments in given)
        return Verdict(valid, valid and given == wanted)
    said = ended and not spoken.calls
    return Verdict(said, said and _says(chat, spoken.content))


def _says(chat: Sample, content: str) -> bool:
    taught = chat.reply.text
    if chat.problem is not None and taught.endswith(f"= {chat.problem.value}."):
        return numbers(content)[-1:] == [chat.problem.value]
    if not chat.answers:
        return content == taught
    if len(chat.answers) == 1 and numbers(taught)[-1:] == list(chat.answers):
        return numbers(content)[-1:] == list(chat.answers)
    return set(numbers(content)) <= set(numbers(taught)) and all(_has(content, answer) for answer in chat.answers)


def numbers(text: str) -> list[str]:
    """All numbers of a text in decimal."""
    return re.findall(r"-?\d+(?:\.\d+)?", text)


def _has(text: str, phrase: str) -> bool:
    """True if the phrase stands there in whole words."""
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def _object(arguments: str) -> str:
    """JSON in one form for equal objects; empty for anything but an object."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return ""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) else ""


def _fits(tools: Sequence[Tool], name: str, arguments: str) -> bool:
    """True if a declared tool of that name takes these arguments: required ones there, known ones of their types."""
    schema = next((tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name), None)
    if schema is None or not arguments:
        return False
    given: dict[str, Any] = json.loads(arguments)
    types: dict[str, type] = {"string": str, "integer": int}
    return all(key in given for key in schema["required"]) and all(
        isinstance(given[key], types[wanted["type"]]) and given[key] in wanted.get("enum", (given[key],))
        for key, wanted in schema["properties"].items()
        if key in given
    )
