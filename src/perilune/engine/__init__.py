"""The loop that turns requests into tokens, and the worker that runs its steps."""
