"""Stop strings: one answer under every chunking, nothing held without need, nothing after a match."""

from __future__ import annotations

import time
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.errors import RequestError
from perilune.text.stop import StopMatcher
from perilune.text.tokenizer import Tokenizer


def _run(tokenizer: Tokenizer, stops: list[str], chunks: list[list[int]]) -> tuple[list[int], bytes, str | None]:
    matcher = StopMatcher(stops, tokenizer)
    ids: list[int] = []
    tail, matched = b"", None
    for chunk in chunks:
        step = matcher.feed(chunk)
        assert matched is None or step == type(step)(), "nothing comes after a match"
        ids += step.tokens
        tail, matched = tail + step.tail, matched or step.matched
    return ids + list(matcher.flush()), tail, matched


def _expected(tokenizer: Tokenizer, stops: list[str], ids: list[int]) -> tuple[list[int], bytes, str | None]:
    """From the definition, quadratic: the match that ends first, of those the longest, in one run of ordinary ids."""
    run: list[tuple[int, int]] = []  # byte → (index of its id, offset in it)
    text = b""
    for index, token in enumerate(ids):
        data = tokenizer.token_bytes(token)
        if not data:
            run, text = [], b""
        for offset, byte in enumerate(data):
            text += bytes((byte,))
            run.append((index, offset))
            found = [stop for stop in stops if text.endswith(stop.encode())]
            if found:
                stop = max(found, key=lambda stop: len(stop.encode()))
                at, inside = run[len(text) - len(stop.encode())]
                return ids[:at], tokenizer.token_bytes(ids[at])[:inside], stop
    return ids, b"", None


STOPS = st.lists(st.sampled_from(["ab", "abc", "bca", "aab", "END", "🧬", "é", "c🧬", "\n\n", "b"]), max_size=4)


@given(stops=STOPS, data=st.data())
@settings(deadline=None, max_examples=300)
def test_every_chunking_gives_the_defined_answer(small: Tokenizer, stops: list[str], data: st.DataObject) -> None:
    alphabet = [*b"abcEND\n", *"🧬é".encode(), *range(256, 266), small.special("<think>"), 639, 5000]
    ids = data.draw(st.lists(st.sampled_from(alphabet), max_size=24))
    borders = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    chunks = [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]
    expected = _expected(small, stops, ids)
    assert _run(small, stops, chunks) == expected
    assert _run(small, stops, [[token] for token in ids]) == expected


def test_all_chunkings_of_a_short_answer(small: Tokenizer) -> None:
    ids = [*b"xa", 256, *b"bEN", 259, *b"D"]  # x a ab b E N END D
    for stops in (["abb"], ["END"], ["NEND"], ["zz"], ["aab", "bEN"]):
        expected = _expected(small, stops, ids)
        for count in range(len(ids)):
            for borders in combinations(range(1, len(ids)), count):
                chunks = [ids[a:b] for a, b in zip([0, *borders], [*borders, len(ids)], strict=True)]
                assert _run(small, stops, chunks) == expected


def test_holds_only_what_may_begin_a_stop(small: Tokenizer) -> None:
    matcher = StopMatcher(["abcabd", "zz"], small)
    assert [matcher.feed([byte]).tokens for byte in b"xabcabc"] == [(120,), (), (), (), (), (), (97, 98, 99)]
    assert matcher.feed(b"q").tokens == (97, 98, 99, 113)
    assert matcher.feed(b"z").tokens == ()
    assert matcher.flush() == (122,)


def test_a_match_inside_a_token_leaves_its_head(small: Tokenizer) -> None:
    step = StopMatcher(["bc"], small).feed([120, 258, 121])  # x abc y
    assert (step.tokens, step.tail, step.matched) == ((120,), b"a", "bc")


def test_a_special_token_breaks_a_match(small: Tokenizer) -> None:
    think = small.special("<think>")
    matcher = StopMatcher(["ab"], small)
    assert matcher.feed([97, think, 98]).tokens == (97, think, 98)


def test_engine_case_39_a_stop_over_four_tokens(small: Tokenizer) -> None:
    """FlashML-org/FreeToken#464: a stop string whose only character is spread over four single-byte tokens."""
    matcher = StopMatcher(["🧬"], small)
    steps = [matcher.feed([token]) for token in [97, *"🧬".encode(), 98]]
    assert [step.matched for step in steps] == [None, None, None, None, "🧬", None]
    assert [step.tokens for step in steps] == [(97,), (), (), (), (), ()]


def test_real_vocabulary(kimi: Tokenizer) -> None:
    ids = kimi.encode("The tide in Brest.\n\nUser: and tomorrow?")
    got, tail, matched = _run(kimi, ["User:", "tomorrow"], [[token] for token in ids])
    assert b"".join(map(kimi.token_bytes, got)) + tail == b"The tide in Brest.\n\n"
    assert matched == "User:"


@pytest.mark.parametrize("stop", ["", "\ud800"], ids=["empty", "surrogate"])
def test_unusable_stop_strings(small: Tokenizer, stop: str) -> None:
    with pytest.raises(RequestError) as error:
        StopMatcher(["fine", stop], small)
    assert error.value.param == "stop"


def test_linear_for_self_similar_stops(small: Tokenizer) -> None:
    stops = ["a" * size + "b" for size in (10, 1_000, 20_000)]
    matcher = StopMatcher([*stops, "ba" * 5_000 + "c"], small)
    started = time.perf_counter()
    matcher.feed(b"a" * 9 + b"c")
    for _ in range(3):
        matcher.feed(b"a" * 9 + b"c" + b"ba" * 30_000)
    assert time.perf_counter() - started < 5
