"""Fixtures that many tests need: where reference material lies, small threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The reference material beside the checkout; tests that need it are skipped, by name, where it is absent."""
    if not (SHARED / "README.md").is_file():
        pytest.skip(f"reference material is not at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def kimi_tokenizer_dir(shared: Path) -> Path:
    """Kimi's real vocabulary."""
    return shared / "data" / "kimi_tokenizer"


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """For tests that configure the process's log: afterwards it is what it was before."""
    root, ours = logging.getLogger(), logging.getLogger("perilune")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
