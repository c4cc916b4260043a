"""Bytes to text: every split gives the same text, and no character is shown before it is whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perilune.text.detok import Utf8Stream


def test_a_character_appears_when_it_is_whole() -> None:
    stream = Utf8Stream()
    assert [stream.feed(bytes((byte,))) for byte in "🙂".encode()] == ["", "", "", "🙂"]


def test_a_cut_character_vanishes_and_a_broken_one_shows() -> None:
    stream = Utf8Stream()
    assert stream.feed("é🙂".encode()[:4]) == "é"
    assert stream.flush(cut=True) == ""
    assert stream.feed("🙂".encode()[2:]) == "\ufffd\ufffd"
    assert stream.feed("🙂".encode()[:3]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.feed(b"ok") + stream.flush() == "ok"


@given(st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3).map(str.encode))))
def test_every_split_gives_the_text_of_the_whole(chunks: list[bytes]) -> None:
    stream = Utf8Stream()
    assert "".join(map(stream.feed, chunks)) + stream.flush() == b"".join(chunks).decode("utf-8", "replace")
