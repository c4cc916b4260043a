"""INT4 in groups along the input dimension: compressed-tensors' ``pack-quantized``, symmetric, to the bit.

A row of ``in`` codes q in -8…7 becomes ``ceil(in / 8)`` int32 words; element j sits at bits 4·(j mod 8) of word
j div 8 as the nibble q + 8. The rest of a row's last word is filled with nibble 0, so the width of a row whose length
is no multiple of 8 must be known from elsewhere. Knows tensors, not files or names.

Expanding uses the native codec where one was built; the torch path beside it gives the same numbers to the bit.

Kimi K2's own rule uses 15 levels, -7…7 with scale = amax/7: the defaults here. A float32 product code·scale comes back
as the same codes and scales. One that was rounded to bf16 comes back as the same codes, but amax has lost a bit: of a
scale with 8-bit significand m ≥ 147 and m mod 8 = 4 the last place moves by one.
compressed-tensors' min-max rule is ``divisor=7.5, qmin=-8``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.errors import ConfigError
from perilune.native import Int4View, codecs

GROUP_SIZE = 32
CODES_PER_WORD = 8
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny


def pack(codes: Tensor) -> Tensor:
    """Packs int8 codes [out, in] in -8…7 into int32 words [out, ceil(in/8)].

    Raises:
        ConfigError: a code outside -8…7, or a tensor that is not int8 of two dimensions.
    """
    if codes.dtype != torch.int8 or codes.dim() != 2:
        raise ConfigError(f"INT4 codes are {codes.dtype} of shape {list(codes.shape)}, int8 [out, in] is needed")
    if codes.numel() and not -8 <= int(codes.min()) <= int(codes.max()) <= 7:
        raise ConfigError(f"INT4 codes reach from {int(codes.min())} to {int(codes.max())}, -8 to 7 is allowed")
    out, width = codes.shape
    packed = torch.empty(out, -(-width // CODES_PER_WORD), dtype=torch.int32, device=codes.device)
    nibbles = torch.zeros(out, packed.shape[1] * CODES_PER_WORD, dtype=torch.uint8, device=codes.device)
    nibbles[:, :width] = (codes + 8).to(torch.uint8)
    # Little-endian: byte k of a word holds element 2k in its low and 2k+1 in its high nibble.
    torch.bitwise_or(nibbles[:, 0::2], nibbles[:, 1::2] << 4, out=packed.view(torch.uint8))
    return packed


def unpack(packed: Tensor, in_features: int) -> Tensor:
    """Unpacks int32 words [out, ceil(in/8)] into int8 codes [out, in] in -8…7.

    Raises:
        ConfigError: the words do not hold ``in_features`` codes per row, or are not int32 of two dimensions.
    """
    if packed.dtype != torch.int32 or packed.dim() != 2:
        raise ConfigError(f"packed INT4 is {packed.dtype} of shape {list(packed.shape)}, int32 [out, in/8] is needed")
    words = -(-in_features // CODES_PER_WORD)
    if in_features < 0 or packed.shape[1] != words:
        raise ConfigError(f"packed INT4 has {packed.shape[1]} words per row, {in_features} codes need {words}")
    octets = packed.contiguous().view(torch.uint8)  # [out, 4·words]
    nibbles = torch.stack((octets & 0xF, octets >> 4), dim=-1).flatten(1)  # [out, 8·words]
    return nibbles[:, :in_features].to(torch.int8) - 8


def dequantize(
    packed: Tensor, scale: Tensor, dtype: torch.dtype, *, group_size: int = GROUP_SIZE, native: bool = True
) -> Tensor:
    """Expands packed int32 [out, in/8] and bf16 scales [out, in/group_size] to code·scale [out, in] in ``dtype``.

    The product is exact in float32 (and in float64, when that is asked for) and rounded once to ``dtype``. ``native``
    False keeps to torch. Shapes are the caller's to check, as ``Int4`` does.
    """
    library = codecs() if native and group_size == GROUP_SIZE and packed.device.type == "cpu" else None
    if library is None or dtype not in (torch.float32, torch.bfloat16):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes = unpack(packed, packed.shape[1] * CODES_PER_WORD).to(wide)
        return (codes * scale.to(wide).repeat_interleave(group_size, dim=1)).to(dtype)
    rows, cols = packed.shape[0], packed.shape[1] * CODES_PER_WORD
    out = torch.empty(rows, cols, dtype=dtype)
    packed, packed_stride = _dense_rows(packed)
    scale, scale_stride = _dense_rows(scale)
    view = Int4View(packed.data_ptr(), scale.data_ptr(), packed_stride, scale_stride, rows, cols)
    library.int4_dequantize(view, out.data_ptr(), cols, "float32" if dtype == torch.float32 else "bfloat16")
    return out


def _dense_rows(tensor: Tensor) -> tuple[Tensor, int]:
    # The codec steps from row to row by a stride, so slices of rows or columns need no copy.
    if tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]:
        return tensor, tensor.stride(0)
    return tensor.contiguous(), tensor.shape[1]


def quantize(weight: Tensor, divisor: float = 7, qmin: int = -7, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor]:
    """Rounds a weight [out, in] to INT4: (packed int32 [out, in/8], scale bf16 [out, in/group_size]).

    The scale of a group is amax/divisor rounded to bf16; codes are weight/scale rounded to nearest, ties to even,
    clamped to ``qmin``…7. A group of zeros gets the smallest normal scale and zero codes.

    Raises:
        ConfigError: the group size does not divide ``in``, or the weight is not finite.
    """
    if weight.dim() != 2 or weight.shape[1] % group_size:
        raise ConfigError(f"a weight of shape {list(weight.shape)} cannot be cut into groups of {group_size} inputs")
    out, width = weight.shape
    groups = weight.detach().float().reshape(out, width // group_size, group_size)
    amax = groups.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise ConfigError("a weight with NaN or infinity cannot be quantised")
    scale = (amax / divisor).to(torch.bfloat16).clamp_min(_SMALLEST_SCALE)
    codes = (groups / scale.float().unsqueeze(-1)).round().clamp(qmin, 7).to(torch.int8)
    return pack(codes.reshape(out, width)), scale
