"""A process that lives for long and its memory: pauses of Python's collector, and what goes back to the system.

**Pauses.** The collector's oldest generation holds everything that was imported and loaded, and to look through it
stops all streams for a tenth of a second. ``settle`` takes what is there out of its sight and makes it look less often:
reference counts free nearly all that requests leave behind.

**Back to the system.** glibc keeps what was freed for later, and learns from large blocks to keep more: after a burst
of large bodies a server would hold their memory for good. Where the C library is another one, nothing is done.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any, Final

_YOUNG: Final = 20_000
"""Containers made, less those freed, between two looks at the youngest ones; Python's own 700 is a step's worth."""


def settle() -> None:
    """What is there now stays for good: collected once, then left alone. For processes, once they have loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *gc.get_threshold()[1:])


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
