"""Small floating-point codes, exact to the bit: e4m3 (FP8), e2m1 (FP4), powers of two as scales.

Arithmetic of the released models' quantisation: the scale of a tile is the smallest power of two
that brings its largest value into the code's range, found on the bits of an fp32 number; values
round to the nearest code, ties to the even one. What is not a number makes its whole tile so.
Below the functions on torch tensors stand those that Triton kernels call.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGEST = {"e4m3": 448.0, "e2m1": 6.0}
# Tiles whose values are all smaller share the scale of this one: 2^-22, and the smallest there is.
SMALLEST_AMAX = {"e4m3": 1e-4, "e2m1": 6.0 * 2.0**-126}
NAN_EXPONENT = 128  # 255 as a ue8m0 byte
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FLT_MAX = torch.finfo(torch.float32).max


def scale_exponent(amax: Tensor, code: str) -> Tensor:
    """Exponents of the scales of tiles whose largest magnitude is `amax` (fp32, any shape): int32.

    NAN_EXPONENT where `amax` is NaN.
    """
    wanted = amax.clamp(SMALLEST_AMAX[code], _FLT_MAX) * (1.0 / LARGEST[code])
    bits = wanted.view(torch.int32)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).int()
    return exponent.masked_fill(amax.isnan(), NAN_EXPONENT)


def power_of_two(exponent: Tensor) -> Tensor:
    """2 to the power of an int32 exponent from -126 to 127, exactly; NaN for +-NAN_EXPONENT."""
    power = (exponent + 127 << 23).view(torch.float32)
    return power.masked_fill(exponent.abs() == NAN_EXPONENT, torch.nan)


def from_ue8m0(byte: Tensor) -> Tensor:
    """fp32 scales from their bytes (exponent + 127); 0 for 0, as in rows not written yet."""
    return (byte.int() << 23).view(torch.float32).masked_fill(byte == 255, torch.nan)


def encode_e4m3(x: Tensor) -> Tensor:
    """Codes (uint8) of fp32 values, any shape; what is larger than 448 becomes 448."""
    codes = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), 0x7F)


def decode_e4m3(codes: Tensor) -> Tensor:
    """fp32 values of codes (uint8), any shape."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e2m1(x: Tensor) -> Tensor:
    """Codes of fp32 values [..., n], two in a byte, the even channel's low: uint8 [..., n // 2]."""
    size = x.abs()
    codes = x.signbit().to(torch.uint8) << 3
    for boundary in (0.25, 1.25, 2.5, 5.0):  # a tie goes down, to the even code
        codes += size > boundary
    for boundary in (0.75, 1.75, 3.5):  # a tie goes up
        codes += size >= boundary
    return codes[..., 0::2] | codes[..., 1::2] << 4


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values [..., 2 * n] of bytes [..., n]."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=codes.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)  # [256, 2]
    return pairs[codes.int()].flatten(-2)


@triton.jit
def tile_exponent(
    amax: tl.tensor, is_nan: tl.tensor, LARGEST: tl.constexpr, SMALLEST_AMAX: tl.constexpr
) -> tl.tensor:
    """`scale_exponent`; `is_nan` because a maximum passes over NaN."""
    inverse: tl.constexpr = 1.0 / LARGEST
    wanted = tl.minimum(tl.maximum(amax, SMALLEST_AMAX), 3.4028234663852886e38) * inverse
    bits = wanted.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 127 + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return tl.where(is_nan, 128, exponent)


@triton.jit
def tile_power(exponent: tl.tensor) -> tl.tensor:
    """`power_of_two`."""
    power = (exponent + 127 << 23).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(exponent) == 128, float("nan"), power)


@triton.jit
def ue8m0_scale(byte: tl.tensor) -> tl.tensor:
    """`from_ue8m0`."""
    scale = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return tl.where(byte == 255, float("nan"), scale)


@triton.jit
def e4m3_code(x: tl.tensor) -> tl.tensor:
    """`encode_e4m3`, on the bits: the interpreter's cast rounds ties away from zero."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    # 20 of the 23 bits of the mantissa go; half of what goes, less one on even codes, is added.
    normal = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
    # Below 2^-6 codes are 2^-9 apart, as fp32 numbers from 2^14 on are.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    sign = x.to(tl.int32, bitcast=True) >> 24 & 0x80
    code = tl.where(size < 0.015625, subnormal, normal) | sign
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def e4m3_value(code: tl.tensor) -> tl.tensor:
    """`decode_e4m3`."""
    value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)  # 480 in the interpreter


@triton.jit
def e2m1_code(x: tl.tensor) -> tl.tensor:
    """Codes (int32, four bits) of fp32 values."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | (x.to(tl.int32, bitcast=True) >> 28 & 8)


@triton.jit
def e2m1_value(code: tl.tensor) -> tl.tensor:
    """fp32 values of codes (int32, four bits): fp32 numbers with an exponent 126 too small."""
    bits = (code & 7) << 22 | (code & 8) << 28
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def bf16_bits(x: tl.tensor) -> tl.tensor:
    """fp32 values as the bits of bf16 (uint16), ties to even: the interpreter's cast cuts off."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16)
