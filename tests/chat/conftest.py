"""Vocabularies for chat tests: Kimi's own, and a small one that is quick to parse with and cuts characters."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.text.tokenizer import KIMI_SPECIALS, Tokenizer


@pytest.fixture(scope="session")
def kimi(kimi_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(kimi_tokenizer_dir, 163_840)


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    merges = [b"get_tide", b'{"', b'":', b"port", b"functions", b"\xf0\x9f", b" x"]
    tokens = [bytes((byte,)) for byte in range(256)] + merges
    return Tokenizer(tokens, {len(tokens) + offset: name for offset, name in KIMI_SPECIALS.items()}, 640)
