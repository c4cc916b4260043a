"""The compiled codecs, through ctypes: finds the library, says which ISA unit it runs, calls it.

Owns the Python twin of ``api.h``. Knows pointers, strides and sizes, not tensors: whoever calls keeps the memory alive
and has checked the shapes. Where no library was built (no C++ compiler at install) ``codecs()`` is None and callers
use their torch path, which gives the same bits.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

from perilune.errors import PeriluneError

Isa = Literal["scalar", "avx2", "avx512"]
ISAS: Final[tuple[Isa, ...]] = ("scalar", "avx2", "avx512")
"""Units in the order of ``PlIsa``: a processor that runs one runs all before it."""

_ABI: Final = 1
_LIBRARY: Final = "libperilune_codecs"
_SUFFIXES: Final = (".so", ".dylib")
_STATUS: Final = {-1: "a size or stride does not fit", -2: "this machine cannot run the unit"}


class Int4View(ctypes.Structure):
    """A packed INT4 weight in memory: ``PlInt4`` of ``api.h``.

    ``packed`` int32 [rows, cols / 8] and ``scale`` bf16 [rows, cols / 32] are addresses, strides count elements.
    """

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("packed_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Codecs:
    """The loaded library and the unit that its calls run.

    The calls release the GIL and hold no state: threads may split the rows of one weight between them.
    """

    library: ctypes.CDLL
    path: Path
    isa: Isa

    def with_isa(self, isa: Isa) -> Codecs:
        """The same library restricted to ``isa``: for tests and measurements.

        Raises:
            PeriluneError: this machine or this build cannot run it.
        """
        best = ISAS[self.library.pl_codecs_isa()]
        if ISAS.index(isa) > ISAS.index(best):
            raise PeriluneError(f"the codecs cannot run `{isa}` here, the best unit is `{best}`")
        return Codecs(self.library, self.path, isa)

    def int4_dequantize(
        self, weight: Int4View, out: int, out_stride: int, dtype: Literal["float32", "bfloat16"]
    ) -> None:
        """Writes code times scale to ``out`` [rows, cols] at rows ``out_stride`` elements apart.

        float32 is exact; bfloat16 rounds that once, to nearest even.

        Raises:
            PeriluneError: the sizes contradict each other.
        """
        call = self.library.pl_int4_dequant_f32 if dtype == "float32" else self.library.pl_int4_dequant_bf16
        status = call(ctypes.byref(weight), out, out_stride, ISAS.index(self.isa))
        if status:
            raise PeriluneError(f"int4_dequantize of {weight.rows}×{weight.cols}: {_STATUS.get(status, status)}")


@cache
def codecs() -> Codecs | None:
    """The codecs on the best unit of this machine, or None where none were built.

    Raises:
        PeriluneError: the library belongs to another version of the source, or does not load.
    """
    path = _find()
    return None if path is None else open_codecs(path)


def open_codecs(path: Path) -> Codecs:
    """Loads the library at ``path``; see ``codecs``."""
    hint = "build it again: `make clean`, then `make`; or `pip install .`"
    try:
        library = ctypes.CDLL(str(path))
        abi = library.pl_codecs_abi()
    except (OSError, AttributeError) as error:
        raise PeriluneError(f"`{path}` does not load: {error}", hint=hint) from error
    if abi != _ABI:
        raise PeriluneError(f"`{path}` has interface {abi}, this source needs {_ABI}", hint=hint)
    for name in ("pl_int4_dequant_f32", "pl_int4_dequant_bf16"):
        function = getattr(library, name)
        function.argtypes = (ctypes.POINTER(Int4View), ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32)
        function.restype = ctypes.c_int32
    return Codecs(library, path, ISAS[library.pl_codecs_isa()])


def describe() -> str:
    """One line for start-up and installers: which native code runs, or that none does."""
    found = codecs()
    return f"native codecs: {found.isa}" if found else "native codecs: none built (no C++ compiler), torch serves"


def _find() -> Path | None:
    # An editable install keeps the sources in one folder and the library in another: __path__ lists both.
    candidates = (Path(folder) / f"{_LIBRARY}{suffix}" for folder in __path__ for suffix in _SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)
