"""The special tokens that carry structure in Kimi's format, by name. Their ids are the vocabulary's business."""

from __future__ import annotations

from enum import StrEnum

from perilune.text.tokenizer import Tokenizer


class Marker(StrEnum):
    """One member per marker; its value is the token's name, which is also how it reads in a rendered text."""

    SYSTEM = "<|im_system|>"
    USER = "<|im_user|>"
    ASSISTANT = "<|im_assistant|>"
    MIDDLE = "<|im_middle|>"
    END = "<|im_end|>"
    THINK = "<think>"
    THINK_END = "</think>"
    SECTION = "<|tool_calls_section_begin|>"
    SECTION_END = "<|tool_calls_section_end|>"
    CALL = "<|tool_call_begin|>"
    ARGUMENTS = "<|tool_call_argument_begin|>"
    CALL_END = "<|tool_call_end|>"


def require_markers(tokenizer: Tokenizer) -> None:
    """Refuses a vocabulary in which no chat can be written, before a chat fails by it.

    Raises:
        ConfigError: it lacks a marker.
    """
    for marker in Marker:
        tokenizer.special(marker)


Piece = Marker | str
"""Part of a prompt or an answer: a marker, or text. ``isinstance(piece, Marker)`` tells them apart, equality does not:
the text ``"<think>"`` that a user typed is no marker."""
