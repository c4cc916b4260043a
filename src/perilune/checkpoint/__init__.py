"""Checkpoints in Hugging Face layout: read, checked, written. Files are hostile until checked."""
