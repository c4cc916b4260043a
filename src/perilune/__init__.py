"""Perilune: an inference stack for Kimi K2 Thinking and its family."""

__version__ = "0.1.0"
