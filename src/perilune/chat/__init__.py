"""Kimi's chat format: messages to ids, output ids to reasoning, content and calls. Knows no HTTP, no torch."""
