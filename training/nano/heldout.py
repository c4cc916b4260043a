"""What training never sees: decided by a hash of the thing itself, so that no list has to be kept or shared."""

from __future__ import annotations

import hashlib


def held_out(kind: str, text: str, one_in: int = 10) -> bool:
    """True for one in ``one_in`` of all texts of a kind (a template, a tuple of operands, a tool's name …)."""
    digest = hashlib.blake2b(f"{kind}:{text}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % one_in == 0
