"""Bytes of a request to a JSON object, before anything looks at a field.

Owns the checks that hold for every endpoint: strict UTF-8 JSON (no byte order mark, NaN, lone surrogates or trailing
text), nesting of at most 64, one object at the top. Knows no field names. Of equal keys the last one counts, as in
every common JSON reader. Meant to run off the event loop: a body may be megabytes.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from perilune.errors import RequestError

MAX_DEPTH: Final = 64
MAX_CONTAINERS: Final = 1 << 18
"""Runs of brackets in one body. A conversation of 1,000 turns with 100 tools stays below 20,000."""

_BOM: Final = b"\xef\xbb\xbf"
# One match swallows text, numbers and whole strings (an unfinished one too) up to the next run of equal brackets, or
# to the end. Possessive quantifiers, and a match from wherever the search stands: linear time on any input.
_BRACKETS: Final = re.compile(
    rb'(?:[^][{}"]++|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))*+(?:([\[{]++)|([\]}]++)|\Z)',
    re.DOTALL,
)


def decode_object(body: bytes) -> dict[str, object]:
    """The JSON object in ``body``, as Python values.

    Raises:
        RequestError: empty, not JSON, nested too deep, or not an object; the message says where.
    """
    if not body or body.isspace():
        raise RequestError("the body is empty, a JSON object is needed", code="invalid_json")
    if body.startswith(_BOM):
        raise RequestError("the body starts with a byte order mark, plain UTF-8 is needed", code="invalid_json")
    _check_depth(body)
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at ")[0].lower()
        raise RequestError(f"the body holds a number that no field can take: {what}", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"the body is not valid JSON: {str(error)[:200]}",
            code="invalid_json",
            hint="NaN, Infinity, comments, trailing commas and lone surrogates are not JSON",
        ) from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {json_type(value)}, an object is needed", code="invalid_json")
    return value


def json_type(value: object) -> str:
    """What JSON calls the type of a decoded value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _check_depth(body: bytes) -> None:
    """Counts brackets outside strings. The decoder recurses, so depth is bounded before it runs.

    Raises:
        RequestError: deeper than ``MAX_DEPTH``, or absurdly many arrays and objects.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for runs, match in enumerate(_BRACKETS.finditer(body)):
        depth += len(match[1] or b"") - len(match[2] or b"")
        if depth > MAX_DEPTH:
            raise RequestError(
                f"the body nests arrays and objects deeper than {MAX_DEPTH} levels", code="nesting_too_deep"
            )
        if runs > MAX_CONTAINERS:
            raise RequestError(
                f"the body holds more than {MAX_CONTAINERS} arrays and objects", code="too_many_containers"
            )
