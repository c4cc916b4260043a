"""Bodies that are no JSON object, or absurd ones: refused before anything looks at a field."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.server import jsonbody
from perilune.server.jsonbody import MAX_DEPTH, decode_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(alphabet='ab"\\[]{}:,\n😀', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='k"[]\\', max_size=3), inner, max_size=4)
    ),
    max_leaves=40,
)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth_of, value), default=0)
    return 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "empty"),
        (b" \n\t", "empty"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b"{", "not valid JSON"),
        (b"{} {}", "trailing characters"),
        (b'{"a":1,}', "not valid JSON"),
        (b'{"a":NaN}', "not valid JSON"),
        (b'{"a":Infinity}', "not valid JSON"),
        (b'{"a":1e400}', "number out of range"),
        (b'{"a":' + b"9" * 5000 + b"}", "number that no field can take"),
        (b'{"a":"\\ud800x"}', "not valid JSON"),
        (b'{"a":"\\udc00 abc"}', "surrogate"),
        (b'{"a":"\xed\xa0\x80"}', "Invalid UTF-8"),
        (b'{"a":"\xff"}', "Invalid UTF-8"),
        (b'{"a":"\x00"}', "not valid JSON"),
        (b"[]", "JSON array"),
        (b"null", "JSON null"),
        (b"true", "JSON boolean"),
        (b"1", "JSON number"),
        (b'"x"', "JSON string"),
        (b"[" * 100_000, "deeper than 64"),
        (b'{"a":' * 100_000, "deeper than 64"),
        (b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", "deeper than 64"),
        (b'{"a":[' + b"[],{}," * 200_000 + b"1]}", "arrays and objects"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_refuses(body: bytes, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        decode_object(body)
    assert len(caught.value.message) < 300
    assert caught.value.status == 400


def test_of_equal_keys_the_last_counts() -> None:
    assert decode_object(b'{"a":1,"a":2}') == {"a": 2}


def test_depth_up_to_the_bound_is_fine() -> None:
    body = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert depth_of(decode_object(body)) == MAX_DEPTH


@settings(max_examples=50)
@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=4), st.integers(1, 8), st.booleans())
def test_counts_depth_as_a_parser_does(value: dict[str, Any], bound: int, ascii_only: bool) -> None:
    """Brackets, quotes and backslashes inside strings count for nothing."""
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonbody, "MAX_DEPTH", bound)
        if depth_of(value) > bound:
            with pytest.raises(RequestError, match="deeper"):
                decode_object(body)
        else:
            assert decode_object(body) == value


@pytest.mark.parametrize("unit", [b'\\"', b'"', b"\\", b'"\\"', b"[]", b'"[",', b"1"])
def test_time_is_linear(unit: bytes) -> None:
    """A scan that starts anew at each byte takes minutes for these; a linear one takes milliseconds."""
    body = b'{"a":[' + b"[]," * 65 + b'"' + unit * 200_000
    start = time.perf_counter()
    with pytest.raises(RequestError):
        decode_object(body)
    assert time.perf_counter() - start < 2
