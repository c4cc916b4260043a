"""The checkout as data: its Python files, parsed once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src", "tests", "benchmarks", "training", "scripts")


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def trees() -> dict[str, ast.Module]:
    """Every Python file of the project, by its path in the checkout."""
    paths = (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}
