"""Text and ids: Kimi's vocabulary, bytes to text as it becomes certain, stop strings. Knows no prompt format, no torch."""
