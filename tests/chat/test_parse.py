"""Laws of the parsers: one answer under every chunking, the answer that the contract defines, total on any ids."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.chat.lexer import MarkerLexer
from perilune.chat.markers import Marker, Piece
from perilune.chat.messages import Tool, read_tools
from perilune.chat.parse import CallDelta, CallStart, ContentDelta, Event, OutputParser, ReasoningDelta, TextParser
from perilune.chat.render import encode_pieces
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason


def _tool(name: str, **schema: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


TOOLS = read_tools(
    [
        _tool("get_tide", properties={"port": {}, "day": {}}, required=["port"]),
        _tool("read_log", properties={"path": {}}, required=["path"]),
    ]
)


def _merged(events: Iterable[Event]) -> list[Event]:
    """Neighbouring deltas of one kind put together; what a client ends up with, in order."""
    merged: list[Event] = []
    for event in events:
        match merged[-1:], event:
            case [ReasoningDelta(a)], ReasoningDelta(b):
                merged[-1] = ReasoningDelta(a + b)
            case [ContentDelta(a)], ContentDelta(b):
                merged[-1] = ContentDelta(a + b)
            case [CallDelta(i, a)], CallDelta(j, b) if i == j:
                merged[-1] = CallDelta(i, a + b)
            case _:
                merged.append(event)
    return merged


Outcome = tuple[list[Event], str, int, int, int]


def _parse(tokenizer: Tokenizer, chunks: Iterable[Sequence[int]], reason: FinishReason = FinishReason.STOP) -> Outcome:
    parser = OutputParser(tokenizer, TOOLS, 2)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    events += parser.finish(reason)
    merged = _merged(events)
    return merged, parser.finish_reason, parser.reasoning_tokens, parser.dropped_calls, parser.invalid_arguments


def _cuts(ids: Sequence[int], borders: Iterable[int]) -> Iterator[Sequence[int]]:
    return (ids[a:b] for a, b in pairwise([0, *sorted(borders), len(ids)]))


TEXTS = [
    *("functions.get_tide:0", "functions.read_log:7", "call_1", "0", "get_tide", ":", "functions."),
    *('{"port":"B"}', '{"path":"/a","x":1}', "{", '{"port', "[1]", "é🙂", " ", "\n", "x", " y ", ""),
]
REASONS = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT])
PIECES = st.lists(st.one_of(st.sampled_from(Marker), st.sampled_from(TEXTS)), max_size=14)
MARKER_TEXT = re.compile("|".join(map(re.escape, Marker)))


@given(PIECES, REASONS, st.data())
@settings(deadline=None, max_examples=250)
def test_every_chunking_gives_one_answer(
    small: Tokenizer, pieces: list[Piece], reason: FinishReason, data: st.DataObject
) -> None:
    ids = encode_pieces(pieces, small)
    borders = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    whole = _parse(small, [ids], reason)
    assert _parse(small, _cuts(ids, borders), reason) == whole
    assert _parse(small, ([token] for token in ids), reason) == whole
    assert not MARKER_TEXT.search(repr(whole[0]))


ANY_IDS = st.lists(
    st.one_of(
        st.integers(0, 262).filter(lambda token: token != ord("<")),
        st.integers(263, 263 + 24),
        st.sampled_from([-1, -(1 << 70), 263 + 254, 519, 639, 640, 10**6, 1 << 70]),
    ),
    max_size=30,
)


@given(ANY_IDS, REASONS, st.data())
@settings(deadline=None, max_examples=250)
def test_any_ids_are_some_answer(small: Tokenizer, ids: list[int], reason: FinishReason, data: st.DataObject) -> None:
    borders = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    whole = _parse(small, [ids], reason)
    assert _parse(small, _cuts(ids, borders), reason) == whole
    assert not MARKER_TEXT.search(repr(whole[0]))
    indices = [event.index for event in whole[0] if isinstance(event, CallStart)]
    assert indices == list(range(len(indices)))


def _defined(pieces: Sequence[Piece]) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    """The contract as a walk over the whole output: reasoning, content, calls (header, raw arguments)."""
    state, reasoning, content, calls = "content", None, "", list[tuple[str, str]]()
    header = arguments = blank = ""
    held = True

    for piece in [*pieces, None]:
        if isinstance(piece, str) and not isinstance(piece, Marker):
            if state == "content":
                blank += piece
                if not held or blank.strip():
                    content, blank, held = content + blank, "", False
            elif state == "reason":
                reasoning = (reasoning or "") + piece
            elif state == "header":
                header += piece
            elif state == "arguments":
                arguments += piece
            continue
        leaves = piece in (None, Marker.SECTION, Marker.CALL)
        leaves |= piece is Marker.THINK_END and state == "reason"
        leaves |= piece is Marker.SECTION_END and state in ("tools", "header", "arguments")
        leaves |= piece is Marker.CALL_END and state in ("header", "arguments")
        if leaves:
            if state == "reason":
                reasoning = reasoning or ""
            if state == "arguments":
                calls.append((header.strip(), arguments.strip() or "{}"))
            if piece in (Marker.THINK_END, Marker.SECTION_END):
                state, held, blank = "content", piece is Marker.SECTION_END, ""
            elif piece is Marker.CALL:
                state, header = "header", ""
            else:
                state = "tools"
        elif piece is Marker.THINK and state == "content":
            state, blank = "reason", ""
        elif piece is Marker.ARGUMENTS and state == "header":
            state, arguments = "arguments", ""
    return reasoning, content or None, calls


def _compare_with_definition(small: Tokenizer, pieces: Sequence[Piece], outcome: Outcome) -> None:
    reasoning, content, calls = _defined(pieces)
    # Headers of this test name tools that exist, so that what is compared is the machine, not the names.
    events = outcome[0]
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == (content or "")
    thoughts = [event.text for event in events if isinstance(event, ReasoningDelta)]
    assert ("".join(thoughts) if thoughts else None) == reasoning
    named = [arguments for header, arguments in calls if header == "get_tide"]
    assert [event.arguments for event in events if isinstance(event, CallDelta)] == named
    assert outcome[1] == ("tool_calls" if named else "stop")


SHORT: tuple[Piece, ...] = (
    *(Marker.THINK, Marker.THINK_END, Marker.SECTION, Marker.SECTION_END),
    *(Marker.CALL, Marker.ARGUMENTS, Marker.CALL_END, "get_tide", " "),
)


def test_all_short_answers_under_all_chunkings(small: Tokenizer) -> None:
    """Every sequence of up to four of nine pieces, each a single token; the longest in two chunks or single tokens."""
    single = {small.token_bytes(token): token for token in range(small.num_ranks)}
    ids = {piece: small.special(piece) if isinstance(piece, Marker) else single[piece.encode()] for piece in SHORT}
    for length in range(5):
        for pieces in product(SHORT, repeat=length):
            tokens = [ids[piece] for piece in pieces]
            whole = _parse(small, [tokens])
            _compare_with_definition(small, pieces, whole)
            for mask in range(1 << max(length - 1, 0)) if length < 4 else (2, 7):
                borders = [place + 1 for place in range(length - 1) if mask >> place & 1]
                assert _parse(small, _cuts(tokens, borders)) == whole


@given(
    st.lists(
        st.one_of(st.sampled_from(SHORT), st.sampled_from(SHORT), st.sampled_from(["x", "\n y", "é"])), max_size=16
    )
)
@settings(deadline=None, max_examples=250)
def test_long_answers_are_what_the_contract_defines(small: Tokenizer, pieces: list[Piece]) -> None:
    _compare_with_definition(small, pieces, _parse(small, [encode_pieces(pieces, small)]))


@given(PIECES, REASONS, st.data())
@settings(deadline=None, max_examples=200)
def test_text_and_ids_give_the_same_answer(
    small: Tokenizer, pieces: list[Piece], reason: FinishReason, data: st.DataObject
) -> None:
    text = "".join(pieces)
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = TextParser(TOOLS, 2)
    events = [event for a, b in pairwise([0, *borders, len(text)]) for event in parser.feed(text[a:b])]
    events += parser.finish(reason)
    by_ids = _parse(small, [encode_pieces(pieces, small)], reason)
    assert (_merged(events), parser.finish_reason) == by_ids[:2]


FRAGMENTS = st.sampled_from(
    [
        *Marker,
        "<|tool_call_section_begin|>",
        "<",
        "<|",
        "<|tool_call",
        "_begin|>",
        "s_section_begin|>",
        "<th",
        "ink>",
        "a",
        "</",
    ]
)


@given(st.lists(FRAGMENTS, max_size=8).map("".join), st.data())
@settings(max_examples=300)
def test_lexer_finds_the_markers_that_a_search_finds(text: str, data: st.DataObject) -> None:
    singular = text.replace("<|tool_call_section_begin|>", Marker.SECTION)
    singular = singular.replace("<|tool_call_section_end|>", Marker.SECTION_END)
    expected = [piece for piece in re.split(f"({MARKER_TEXT.pattern})", singular) if piece]
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    lexer = MarkerLexer()
    pieces: list[Piece] = []
    for a, b in pairwise([0, *borders, len(text)]):
        pieces += lexer.feed(text[a:b])
    pieces.append(lexer.flush())
    joined = [""]
    for piece in pieces:
        if isinstance(piece, Marker):
            joined += [piece, ""]
        else:
            joined[-1] += piece
    assert [piece for piece in joined if piece] == expected


def test_text_is_released_at_once() -> None:
    lexer = MarkerLexer()
    assert lexer.feed("a < b <thin") == ["a < b "]
    assert lexer.feed("g <") == ["<thing "]
    assert lexer.feed("|tool_call") == []
    assert lexer.feed("_begin|>x") == [Marker.CALL, "x"]
    assert lexer.flush() == ""


def test_events_come_as_soon_as_they_are_certain(small: Tokenizer) -> None:
    parser = OutputParser(small, TOOLS, 0)
    call = [*encode_pieces([Marker.CALL, "functions.get_tide:0"], small), small.special(Marker.ARGUMENTS)]
    assert parser.feed([ord("a")]) == [ContentDelta("a")]
    assert parser.feed(call) == [CallStart(0, "functions.get_tide:0", "get_tide")]
    assert parser.feed(b" {") == [CallDelta(0, "{")]
    assert parser.feed(b" \n") == []
    assert parser.feed(b"}") == [CallDelta(0, " \n}")]
    assert parser.feed([small.special(Marker.CALL_END)]) == []


def test_a_tail_before_a_stop_string_is_text(small: Tokenizer) -> None:
    parser = OutputParser(small, TOOLS, 0)
    assert parser.feed(b"\xf0\x9f") == []
    assert parser.feed_tail("🙂".encode()[2:] + b"!") == [ContentDelta("🙂!")]
    assert parser.finish(FinishReason.STOP) == []
    assert parser.finish_reason == "stop"


@pytest.mark.parametrize(
    ("token", "label"), [("<|im_user|>", "foreign"), ("[EOS]", "end"), ("<|reserved_token_268|>", "reserved")]
)
def test_other_special_tokens_are_no_text(small: Tokenizer, token: str, label: str) -> None:
    parser = OutputParser(small, TOOLS, 0)
    assert parser.feed([97, small.special(token), 98]) == [ContentDelta("a"), ContentDelta("b")], label


def test_hostile_output_takes_linear_time(small: Tokenizer) -> None:
    call, arguments, think = (small.special(marker) for marker in (Marker.CALL, Marker.ARGUMENTS, Marker.THINK))
    for ids in (
        [call, *b":" * 60_000, arguments],
        [call, *b"call_1", arguments, *b"[" * 60_000],
        [call, *b"get_tide:0", arguments, *b" " * 60_000, 97],
        [32] * 60_000,
        [think] * 60_000,
        [call, arguments] * 30_000,
    ):
        started = time.perf_counter()
        _parse(small, ([token] for token in ids))
        assert time.perf_counter() - started < 5  # 0.2 s here


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"port": "B"}, "get_tide"),
        ({"port": "B", "path": "x", "day": 1}, "get_tide"),
        ({"path": "x"}, "read_log"),
        ({"port": "B", "path": "x"}, None),
        ({"day": 1}, None),
        ({}, None),
        ([], None),
    ],
)
def test_arguments_decide_for_foreign_ids(small: Tokenizer, arguments: object, name: str | None) -> None:
    pieces = (Marker.CALL, "call_9", Marker.ARGUMENTS, json.dumps(arguments), Marker.CALL_END)
    events, finish, *_ = _parse(small, [encode_pieces(pieces, small)])
    assert finish == ("tool_calls" if name else "stop")
    if name is None:
        assert events == []
    else:
        assert events == [CallStart(0, f"functions.{name}:2", name), CallDelta(0, json.dumps(arguments))]


def test_schemas_that_are_none_decide_nothing(small: Tokenizer) -> None:
    odd: list[Tool] = [
        *read_tools([_tool("a", properties=["x"]), _tool("b", required="x"), _tool("c", required=[3])]),
        *read_tools([{"type": "function", "function": {"name": "d"}}]),
    ]
    parser = OutputParser(small, odd, 0)
    pieces = (Marker.CALL, "1", Marker.ARGUMENTS, '{"x":1}', Marker.CALL_END)
    assert parser.feed(encode_pieces(pieces, small)) + parser.finish(FinishReason.STOP) == []
    assert parser.dropped_calls == 1
