"""Memory that goes back to the system.

glibc keeps what was freed for later, and learns from large blocks to keep more: after a burst of large bodies a server
would hold their memory for good. Where the C library is another one, nothing is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


def trim() -> bool:
    """Gives back what is free; whether this C library can do so. Blocking for milliseconds, without the interpreter."""
    if _MALLOC_TRIM is None:
        return False
    _MALLOC_TRIM(0)
    return True


def _find() -> Callable[[int], Any] | None:
    try:
        function = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = (ctypes.c_size_t,), ctypes.c_int
    return function


_MALLOC_TRIM = _find()
