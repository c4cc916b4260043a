"""Kimi's vocabulary, which the reported cases are spelled in."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def kimi(kimi_tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(kimi_tokenizer_dir, 163_840)
