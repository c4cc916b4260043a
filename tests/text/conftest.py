"""Vocabularies: Kimi's own, and a small one whose tokens cut characters and words in awkward places."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.text.tokenizer import KIMI_SPECIALS, Tokenizer


@pytest.fixture(scope="session")
def kimi(kimi_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(kimi_tokenizer_dir, 163_840)


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    merges = [
        b"ab",
        b"bc",
        b"abc",
        b"END",
        b"ND",
        "é".encode(),
        "🧬".encode()[:2],
        "🧬".encode()[1:],
        b"a\xf0",
        b"\n\n",
    ]
    tokens = [bytes((byte,)) for byte in range(256)] + merges
    return Tokenizer(tokens, {len(tokens) + offset: name for offset, name in KIMI_SPECIALS.items()}, 640)
