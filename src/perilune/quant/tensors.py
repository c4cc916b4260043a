"""Weights as the engine holds them: ``Dense`` or ``Int4``, each a matrix [out, in] in its stored form.

A weight can say its shape and bytes, move, be sliced by outputs or by inputs (what tensor parallelism needs), and be
expanded. It cannot multiply: that is the business of ``ops``. Slices are views where the layout allows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.quant.int4 import CODES_PER_WORD, GROUP_SIZE, dequantize


@dataclass(frozen=True, slots=True)
class Dense:
    """A plain matrix ``weight`` [out, in]."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return (self.weight.shape[0], self.weight.shape[1])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def to(self, device: torch.device | str) -> Dense:
        return Dense(self.weight.to(device))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in] in ``dtype``; the weight itself when it already has it."""
        return self.weight.to(dtype)

    def rows(self, start: int, stop: int) -> Dense:
        """Outputs ``start``…``stop - 1``. Raises ``ConfigError`` outside the matrix."""
        _check_range("outputs", start, stop, self.shape[0])
        return Dense(self.weight[start:stop])

    def columns(self, start: int, stop: int) -> Dense:
        """Inputs ``start``…``stop - 1``. Raises ``ConfigError`` outside the matrix."""
        _check_range("inputs", start, stop, self.shape[1])
        return Dense(self.weight[:, start:stop])


@dataclass(frozen=True, slots=True)
class Int4:
    """A matrix in groups of INT4 codes; see ``quant.int4`` for the bits.

    Attributes:
        packed: int32 [out, in/8].
        scale: bf16 [out, in/group_size]; group g covers inputs ``g·group_size`` … ``(g+1)·group_size - 1``.
    """

    packed: Tensor
    scale: Tensor
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        out, width = self.shape
        wanted = (out, width // self.group_size)
        typed = self.packed.dtype == torch.int32 and self.scale.dtype == torch.bfloat16
        if not typed or width % self.group_size or tuple(self.scale.shape) != wanted:
            raise ConfigError(
                f"INT4 of {self.packed.dtype} {list(self.packed.shape)} with scales of {self.scale.dtype} "
                f"{list(self.scale.shape)}: int32 [out, in/8] and bfloat16 [out, in/{self.group_size}] are needed"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return (self.packed.shape[0], self.packed.shape[1] * CODES_PER_WORD)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scale.nbytes

    def to(self, device: torch.device | str) -> Int4:
        return Int4(self.packed.to(device), self.scale.to(device), self.group_size)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in]: the product code·scale, exact in float32 (and float64), rounded once to ``dtype``."""
        return dequantize(self.packed, self.scale, dtype, group_size=self.group_size)

    def rows(self, start: int, stop: int) -> Int4:
        """Outputs ``start``…``stop - 1``. Raises ``ConfigError`` outside the matrix."""
        _check_range("outputs", start, stop, self.shape[0])
        return Int4(self.packed[start:stop], self.scale[start:stop], self.group_size)

    def columns(self, start: int, stop: int) -> Int4:
        """Inputs ``start``…``stop - 1``, codes and scales alike.

        Raises:
            ConfigError: outside the matrix, or a cut that is not on a group boundary.
        """
        _check_range("inputs", start, stop, self.shape[1])
        if start % self.group_size or stop % self.group_size:
            raise ConfigError(
                f"inputs {start} to {stop} of an INT4 weight with {self.shape[1]} inputs cut a group of "
                f"{self.group_size}, both must be multiples of it",
                hint=f"choose a split whose parts are multiples of {self.group_size}",
            )
        words = slice(start // CODES_PER_WORD, stop // CODES_PER_WORD)
        groups = slice(start // self.group_size, stop // self.group_size)
        return Int4(self.packed[:, words], self.scale[:, groups], self.group_size)


Weight = Dense | Int4


def _check_range(what: str, start: int, stop: int, size: int) -> None:
    if not 0 <= start <= stop <= size:
        raise ConfigError(f"{what} {start} to {stop} of a weight with {size} {what}, 0 to {size} is allowed")
