"""Which library the native tests run: the installed one, or one built with sanitizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune import native


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", type=Path, help="test this build instead of the installed one")


@pytest.fixture(scope="session")
def codecs(request: pytest.FixtureRequest) -> native.Codecs:
    """The library under test; skipped, by name, where the machine had no compiler."""
    path = request.config.getoption("--native-library", default=None)
    found = native.open_codecs(path) if path else native.codecs()
    if found is None:
        pytest.skip("no native library: no C++ compiler was there at install")
    return found
