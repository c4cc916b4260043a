"""Text and ids: Kimi's vocabulary, bytes to text as it becomes certain, stop strings. No prompt format, no torch."""
