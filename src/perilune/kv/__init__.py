"""Bookkeeping of the cache: which block belongs to whom. Torch-free."""
