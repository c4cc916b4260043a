"""Public bug reports about parsing Kimi K2's output, each with a minimal input of our own and the right answer.

Every row is parsed whole, id by id, cut at every place, and (where it spells no marker as text) from text in the same
ways: all must give the same answer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from perilune.chat.markers import Marker, Piece
from perilune.chat.messages import Tool, read_tools
from perilune.chat.parse import CallDelta, CallStart, ContentDelta, Event, OutputParser, ReasoningDelta, TextParser
from perilune.chat.render import encode_pieces
from perilune.text.tokenizer import Tokenizer
from perilune.types import FinishReason

THINK, THINK_END, END = Marker.THINK, Marker.THINK_END, Marker.END
SECTION, SECTION_END = Marker.SECTION, Marker.SECTION_END


def _tool(name: str, required: Sequence[str], **properties: str) -> Tool:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(required),
    }
    return read_tools([{"type": "function", "function": {"name": name, "parameters": schema}}])[0]


TIDE = _tool("get_tide", ["port"], port="string", day="integer")
LOG = _tool("read_log", ["path"], path="string")
LOG2 = _tool("read_log2", ["path"], path="string", lines="integer")


def _call(header: str, arguments: str) -> tuple[Piece, ...]:
    return (Marker.CALL, header, Marker.ARGUMENTS, arguments, Marker.CALL_END)


def _tide(number: int = 0, arguments: str = '{"port":"B"}') -> tuple[Piece, ...]:
    return _call(f"functions.get_tide:{number}", arguments)


def _log(number: int = 0, path: str = "/a") -> tuple[Piece, ...]:
    return _call(f"functions.read_log:{number}", f'{{"path":"{path}"}}')


@dataclass(frozen=True)
class Answer:
    """What a client sees. ``calls``: (id, name, arguments)."""

    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str, str], ...] = ()
    finish: str = "stop"


@dataclass(frozen=True)
class Row:
    id: str
    pieces: tuple[Piece, ...]
    answer: Answer
    tools: tuple[Tool, ...] = (TIDE, LOG)
    history: int = 0
    in_think: bool = False
    reason: FinishReason = FinishReason.STOP
    allow_calls: bool | None = None
    text: bool = True


def _calls(*calls: tuple[str, str], first: int = 0) -> tuple[tuple[str, str, str], ...]:
    return tuple((f"functions.{name}:{n}", name, args) for n, (name, args) in enumerate(calls, first))


def _structured(
    *calls: tuple[str, str], reasoning: str | None = None, content: str | None = None, first: int = 0
) -> Answer:
    return Answer(reasoning, content, _calls(*calls, first=first), "tool_calls")


B = ("get_tide", '{"port":"B"}')
A = ("read_log", '{"path":"/a"}')

ROWS = (
    Row(
        "K01",
        (THINK, "Look up.", SECTION, *_tide(0, '{"port":"Brest"}'), SECTION_END, END),
        _structured(("get_tide", '{"port":"Brest"}'), reasoning="Look up."),
    ),
    Row(
        "K02", (THINK, "a", THINK_END, SECTION, " spurious ", *_tide(), SECTION_END, END), _structured(B, reasoning="a")
    ),
    Row(
        "K03",
        (THINK, "a", THINK_END, "Ok.", SECTION, *_tide(), SECTION_END, END),
        _structured(B, reasoning="a", content="Ok."),
    ),
    Row(
        "K06",
        (SECTION, *_tide(0, '{"port":"Brest"}'), *_log(1, "/x"), SECTION_END, END),
        _structured(("get_tide", '{"port":"Brest"}'), ("read_log", '{"path":"/x"}')),
    ),
    Row("K07", (SECTION, *_call("functions.get_tide:0\n", '{"port":"B"}'), SECTION_END, END), _structured(B)),
    Row(
        "K08",
        (THINK_END, "This is text:", SECTION, *_tide(), SECTION_END),
        _structured(B, reasoning="", content="This is text:"),
        in_think=True,
    ),
    Row(
        "K09",
        (THINK_END, "Hello.", SECTION, *_tide(0, "{}"), SECTION_END, END),
        _structured(("get_tide", "{}"), content="Hello."),
    ),
    Row("K11", (THINK, "Need file.", *_log(), END), _structured(A, reasoning="Need file.")),
    Row(
        "K12",
        (THINK, "pre ", SECTION, *_log(), SECTION_END, " post", THINK_END, "Done.", END),
        _structured(A, reasoning="pre ", content=" postDone."),
    ),
    Row(
        "K13",
        (THINK, "x ", SECTION, *_log(), *_log(1, "/b"), SECTION_END, END),
        _structured(A, ("read_log", '{"path":"/b"}'), reasoning="x "),
    ),
    Row(
        "K14",
        (SECTION, " ", *_call(" functions.read_log:0 ", ' {"path":"/a"} '), " ", SECTION_END),
        _structured(A),
    ),
    Row("K16", ("1 <",), Answer(content="1 <")),
    Row(
        "K19",
        (THINK, "a", THINK_END, SECTION, *_tide(0, "{}"), SECTION_END, END),
        _structured(("get_tide", "{}"), reasoning="a"),
    ),
    Row("K21", (THINK, "thinking"), Answer("thinking", finish="length"), reason=FinishReason.LENGTH),
    Row("K23", (THINK, "a", THINK_END, "Answer.", END), Answer("a", "Answer.")),
    Row("K24", ("A mutex...", THINK_END, "It is"), Answer("A mutex...", "It is"), in_think=True),
    Row("K26", (THINK, "r", THINK_END, "ok ", END), Answer("r", "ok "), history=1),
    Row("K28", ("Hi.", SECTION, SECTION_END, END), Answer(content="Hi.")),
    Row(
        "K29",
        (
            "P:",
            SECTION,
            *_tide(0, '{"port":"L"}'),
            SECTION_END,
            " next: ",
            SECTION,
            *_tide(1, '{"port":"D"}'),
            SECTION_END,
            END,
        ),
        _structured(("get_tide", '{"port":"L"}'), ("get_tide", '{"port":"D"}'), content="P: next: "),
    ),
    Row("K32", (SECTION, *_call("get_tide:2", '{"port":"B"}'), SECTION_END), _structured(B)),
    Row("K33", (SECTION, *_tide(5), SECTION_END), _structured(B, first=5), history=5),
    Row("K34", (SECTION, *_tide(0), SECTION_END), _structured(B, first=3), history=3),
    Row("K36", (SECTION, *_tide(7), *_tide(8), SECTION_END), _structured(B, B)),
    Row(
        "K37",
        (SECTION, *_call("functions.list-files:0", '{"path":"/"}'), SECTION_END),
        _structured(("list-files", '{"path":"/"}')),
        tools=(TIDE, _tool("list-files", [], path="string")),
    ),
    Row(
        "K38",
        (SECTION, *_call("functions.calendar.add:0", "{}"), SECTION_END),
        _structured(("calendar.add", "{}")),
        tools=(TIDE, _tool("calendar.add", [])),
    ),
    Row(
        "K39",
        (SECTION, *_call("functions.ns:add:0", "{}"), SECTION_END),
        _structured(("ns:add", "{}")),
        tools=(TIDE, _tool("ns:add", [])),
    ),
    Row("K41", (*_call("0", '{"path":"/a"}'), END), Answer(), tools=(LOG, LOG2)),
    Row("K41 broken JSON", (*_call("0", '{"path":'), END), Answer()),
    Row(
        "K42",
        (SECTION, *_call("call00003", '{"port":"Paris"}'), SECTION_END),
        _structured(("get_tide", '{"port":"Paris"}'), first=2),
        history=2,
    ),
    Row("K43", (SECTION, *_call("toolu_01Ab", '{"path":"/a"}'), SECTION_END), _structured(A)),
    Row(
        "K43 only tool", (SECTION, *_call("c1f0-77", "{}"), SECTION_END), _structured(("read_log", "{}")), tools=(LOG,)
    ),
    Row(
        "K44",
        (*_call("weird@id", '{"zzz":1}'), SECTION_END, SECTION, *_tide(0, '{"port":"D"}'), SECTION_END),
        _structured(("get_tide", '{"port":"D"}')),
    ),
    Row("K51", (SECTION, *_log(0), SECTION_END), _structured(A, first=1), history=1),
    Row("K52", (SECTION, *_tide(0, ""), SECTION_END), _structured(("get_tide", "{}"))),
    Row(
        "K53",
        (SECTION, *_tide(0, '{"port":"B", "ok": fasle'), SECTION_END, END),
        _structured(("get_tide", '{"port":"B", "ok": fasle')),
    ),
    Row(
        "K56",
        (SECTION, *_tide(0, '{"port":"}]{ </think> x"}'), SECTION_END),
        _structured(("get_tide", '{"port":"}]{ </think> x"}')),
        text=False,
    ),
    Row(
        "K57",
        (SECTION, *_tide(0, '{"port":"<div>x</div>"}'), SECTION_END),
        _structured(("get_tide", '{"port":"<div>x</div>"}')),
    ),
    Row("K58", (SECTION, *_tide(0, '{"port":"a\tb"}'), SECTION_END), _structured(("get_tide", '{"port":"a\tb"}'))),
    Row("K59", (SECTION, *_tide(0, '{"port":"🙂é中"}'), SECTION_END), _structured(("get_tide", '{"port":"🙂é中"}'))),
    Row(
        "K61",
        (SECTION, *_tide(0, '\n{\n "port": "B"\n}\n'), SECTION_END),
        _structured(("get_tide", '{\n "port": "B"\n}')),
    ),
    Row(
        "K62",
        (THINK, "r", THINK_END, SECTION, *_tide(0, '{"port":"B","day":2}'), SECTION_END),
        _structured(("get_tide", '{"port":"B","day":2}'), reasoning="r"),
    ),
    Row("K66", (SECTION, *_tide(), SECTION_END, END), _structured(B)),
    Row(
        "K67 none",
        (THINK, "r", THINK_END, "No.", SECTION, *_tide(), SECTION_END, END),
        Answer("r", "No."),
        allow_calls=False,
    ),
    Row("K68", (SECTION, *_call("?", "{}"), SECTION_END, END), Answer()),
    Row("K68 half", (SECTION, Marker.CALL, "functions.get_tide:0", SECTION_END, END), Answer()),
    Row(
        "length cuts a call",
        (SECTION, Marker.CALL, "functions.get_tide:0", Marker.ARGUMENTS, '{"port":'),
        replace(_structured(("get_tide", '{"port":')), finish="length"),
        reason=FinishReason.LENGTH,
    ),
    Row(
        "stray markers",
        (THINK_END, SECTION_END, Marker.ARGUMENTS, "a", Marker.CALL_END, "b", END, "c"),
        Answer(content="abc"),
    ),
    Row("two thinks", (THINK, "a", THINK, "b", THINK_END, "c", THINK_END, "d"), Answer("ab", "cd")),
    Row("empty think", (THINK, THINK_END, "c"), Answer("", "c")),
    Row("blank before think", ("\n ", THINK, "a", THINK_END, "\n b \n"), Answer("a", "\n b \n")),
    Row("blank before content", ("\n ", "b"), Answer(content="\n b")),
    Row("blank behind a section", (SECTION, *_tide(), SECTION_END, "\n\n", END), _structured(B)),
    Row(
        "half call, then a whole one",
        (SECTION, Marker.CALL, "functions.read_log:0", *_tide(1), SECTION_END),
        _structured(B),
    ),
    Row(
        "calls without ends",
        (SECTION, *_tide()[:-1], *_log(1)[:-1], SECTION_END, END),
        _structured(B, A),
    ),
    Row("undeclared name", (SECTION, *_call("functions.fly:0", "{}"), SECTION_END), _structured(("fly", "{}"))),
    Row("name with spaces", (SECTION, *_call("functions.do it:0", '{"path":"/a"}'), SECTION_END), _structured(A)),
    Row(
        "a tool called like an id",
        (SECTION, *_call("functions.v:1", "{}"), *_call("functions.v:1:1", "{}"), SECTION_END),
        _structured(("v:1", "{}"), ("v:1", "{}")),
        tools=(TIDE, _tool("v:1", [])),
    ),
    Row("no tools declared", ("Hi", SECTION, *_tide(), SECTION_END), Answer(content="Hi"), tools=()),
)


def _answer(events: Iterable[Event], finish: str) -> Answer:
    reasoning: list[str] = []
    content: list[str] = []
    starts: list[CallStart] = []
    arguments: list[str] = []
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case ContentDelta(text):
                assert text
                content.append(text)
            case CallStart(index=index):
                assert index == len(starts)
                starts.append(event)
                arguments.append("")
            case CallDelta(index, more):
                assert more
                assert index == len(starts) - 1
                arguments[-1] += more
    calls = tuple((start.id, start.name, args) for start, args in zip(starts, arguments, strict=True))
    return Answer("".join(reasoning) if reasoning else None, "".join(content) or None, calls, finish)


def _parser(row: Row, tokenizer: Tokenizer) -> OutputParser:
    return OutputParser(tokenizer, row.tools, row.history, row.in_think, row.allow_calls)


def _parse(row: Row, tokenizer: Tokenizer, chunks: Iterable[Sequence[int]]) -> Answer:
    parser = _parser(row, tokenizer)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    events += parser.finish(row.reason)
    return _answer(events, parser.finish_reason)


def _parse_text(row: Row, chunks: Iterable[str]) -> Answer:
    parser = TextParser(row.tools, row.history, row.in_think, row.allow_calls)
    events = [event for chunk in chunks for event in parser.feed(chunk)]
    events += parser.finish(row.reason)
    return _answer(events, parser.finish_reason)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_row(kimi: Tokenizer, row: Row) -> None:
    ids = encode_pieces(row.pieces, kimi)
    assert _parse(row, kimi, [ids]) == row.answer
    assert _parse(row, kimi, ([token] for token in ids)) == row.answer
    for cut in range(1, len(ids)):
        assert _parse(row, kimi, [ids[:cut], ids[cut:]]) == row.answer


@pytest.mark.parametrize("row", [row for row in ROWS if row.text], ids=lambda row: row.id)
def test_row_from_text(row: Row) -> None:
    text = "".join(row.pieces)
    assert _parse_text(row, [text]) == row.answer
    assert _parse_text(row, text) == row.answer
    for cut in range(1, len(text)):
        assert _parse_text(row, [text[:cut], text[cut:]]) == row.answer


def test_k04_no_limit_on_a_section(kimi: Tokenizer) -> None:
    arguments = json.dumps({"port": "seven seas " * 18_000})
    row = Row("K04", (SECTION, *_tide(0, arguments), SECTION_END, END), _structured(("get_tide", arguments)))
    ids = encode_pieces(row.pieces, kimi)
    assert _parse(row, kimi, [ids]) == row.answer
    assert _parse(row, kimi, ([token] for token in ids)) == row.answer
    assert _parse_text(row, ("".join(row.pieces)[at : at + 7] for at in range(0, 200_000, 7))).calls[0][1] == "get_tide"


def test_k17_half_a_marker_is_held_back() -> None:
    parser = TextParser((TIDE, LOG), 0)
    assert parser.feed("<think>some") == [ReasoningDelta("some")]
    assert parser.feed("<|tool") == []
    rest = parser.feed("_calls_section_begin|>" + "".join(_log()))
    assert rest == [CallStart(0, "functions.read_log:0", "read_log"), CallDelta(0, '{"path":"/a"}')]
    assert parser.finish(FinishReason.STOP) == []


def test_k18_singular_markers_from_some_quantised_models() -> None:
    parser = TextParser((TIDE, LOG), 0)
    text = "<|tool_call_section_begin|>" + "".join(_log()) + "<|tool_call_section_end|>Ok"
    events = [event for char in text for event in parser.feed(char)] + parser.finish(FinishReason.STOP)
    assert _answer(events, parser.finish_reason) == _structured(A, content="Ok")


def test_k22_reasoning_tokens_at_the_limit(kimi: Tokenizer) -> None:
    ids = [kimi.special(THINK), *kimi.encode("The quick brown fox")]
    assert len(ids) == 5
    parser = OutputParser(kimi, (), 0)
    events = [event for token in ids for event in parser.feed([token])] + parser.finish(FinishReason.LENGTH)
    assert _answer(events, parser.finish_reason) == Answer("The quick brown fox", finish="length")
    assert parser.reasoning_tokens == 4


def test_k24_k26_reasoning_tokens_are_strictly_between_the_marks(kimi: Tokenizer) -> None:
    inside = OutputParser(kimi, (), 0, starts_in_think=True)
    inside.feed(encode_pieces(("1234567", THINK_END, "1234567", END), kimi))
    assert inside.reasoning_tokens == 3
    across = OutputParser(kimi, (TIDE,), 0)
    across.feed(encode_pieces(("a", THINK, "1234567", THINK, "1234567", SECTION, *_tide(), SECTION_END, "b"), kimi))
    assert across.reasoning_tokens == 6


def test_k31_markers_have_no_text(kimi: Tokenizer) -> None:
    ids = encode_pieces((THINK, "a", THINK_END, SECTION, *_tide(), SECTION_END, END), kimi)
    assert b"".join(map(kimi.token_bytes, ids)) == b'afunctions.get_tide:0{"port":"B"}'
    row = Row("K31", (), _structured(B, reasoning="a"))
    assert _parse(row, kimi, [ids]) == row.answer


@pytest.mark.parametrize("row", [row for row in ROWS if row.answer.calls], ids=lambda row: row.id)
def test_k49_a_name_is_whole_and_told_once(kimi: Tokenizer, row: Row) -> None:
    parser = _parser(row, kimi)
    events = [event for token in encode_pieces(row.pieces, kimi) for event in parser.feed([token])]
    starts = [event for event in events + parser.finish(row.reason) if isinstance(event, CallStart)]
    assert [(start.id, start.name) for start in starts] == [call[:2] for call in row.answer.calls]


def test_k41_k53_what_is_dropped_or_broken_is_counted(kimi: Tokenizer) -> None:
    counts = {}
    for row in ROWS:
        parser = _parser(row, kimi)
        parser.feed(encode_pieces(row.pieces, kimi))
        parser.finish(row.reason)
        counts[row.id] = (parser.dropped_calls, parser.invalid_arguments)
    assert counts["K41"] == counts["K41 broken JSON"] == counts["K68"] == counts["K68 half"] == (1, 0)
    assert counts["K53"] == (0, 1)
    assert counts["K01"] == counts["K58"] == counts["K52"] == (0, 0)


def test_k54_long_arguments_in_single_characters_take_linear_time(kimi: Tokenizer) -> None:
    arguments = json.dumps({"port": "x y" * 10_000})
    before = encode_pieces((SECTION, Marker.CALL, "functions.get_tide:0", Marker.ARGUMENTS), kimi)
    ids = [*before, *(token for char in arguments for token in kimi.encode(char)), kimi.special(Marker.CALL_END)]
    row = Row("K54", (), _structured(("get_tide", arguments)))
    started = time.perf_counter()
    assert _parse(row, kimi, ([token] for token in ids)) == row.answer
    assert time.perf_counter() - started < 5  # 0.1 s here


def test_k59_no_replacement_character_while_a_character_is_incomplete(kimi: Tokenizer) -> None:
    single = {kimi.token_bytes(token): token for token in range(256)}

    def spread(text: str) -> Iterator[int]:
        return (single[bytes((byte,))] for byte in text.encode())

    parser = OutputParser(kimi, (TIDE,), 0)
    events = parser.feed(encode_pieces((Marker.CALL, "functions.get_tide:0", Marker.ARGUMENTS), kimi))
    for token in spread('{"port":"🙂é中"}'):
        events += parser.feed([token])
    assert [event.arguments for event in events if isinstance(event, CallDelta)] == list('{"port":"🙂é中"}')


def test_engine_case_39_a_character_cut_by_the_limit_vanishes(kimi: Tokenizer) -> None:
    """antonellof/ferrox#124, ai-dynamo/dynamo#12688: max_tokens ends the answer inside a character."""
    single = {kimi.token_bytes(token): token for token in range(256)}
    ids = [single[bytes((byte,))] for byte in "🙂".encode()]
    parser = OutputParser(kimi, (), 0)
    assert [parser.feed([token]) for token in ids] == [[], [], [], [ContentDelta("🙂")]]
    cut = OutputParser(kimi, (), 0)
    assert cut.feed(ids[:2]) + cut.finish(FinishReason.LENGTH) == []
    assert cut.finish_reason == "length"
