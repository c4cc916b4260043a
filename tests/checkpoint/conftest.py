"""Safetensors files made by hand, so that they can be wrong in exactly one way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MakeFile = Callable[..., Path]


@pytest.fixture
def make_file(tmp_path: Path) -> MakeFile:
    """``make_file(header, data=b"", name=…, length=None)``: a file with this header, object or raw bytes."""

    def make(
        header: dict[str, Any] | bytes, data: bytes = b"", name: str = "model.safetensors", length: int | None = None
    ) -> Path:
        raw = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / name
        path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
        return path

    return make
