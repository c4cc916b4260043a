"""Perilune: an inference stack for Kimi K2 Thinking and its family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perilune.llm import LLM
    from perilune.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """``LLM`` and ``SamplingParams``, imported when they are used: the program's start must not wait for torch."""
    if name == "LLM":
        from perilune.llm import LLM

        return LLM
    if name == "SamplingParams":
        from perilune.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'perilune' has no attribute {name!r}")
