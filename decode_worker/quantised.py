"""Vectors in 8 or 4 bits per element: a scale, and a code for each. The reference of csrc/cpu/attend_kernel.inc.

A vector x[d] becomes d codes, its scale in the low bits of the first sixteen of them: who reads a code never has to
take that bit out, since the code was chosen, among those with this low bit, as the nearest to its element. A vector
takes d * bits / 8 bytes that way, and a record stays a few whole cache lines.

    8 bits   int8 code c: x = c * scale; byte e is element e, its low bit bit e of the scale
    4 bits   code c in 0..15: R x = (c - 7.5) * scale; byte j is element 2j, then 2j + 1 in its high half. The low byte
             of the scale lies in the low halves, the high one in the high ones

The scale is a bfloat16, rounded up, so that the largest element has a code. R is `rotated`: elements that are large in
every vector, as some of a key's are, would leave few of sixteen codes for all the others.
"""

from __future__ import annotations

import torch

SCALE_BITS = 16
ROUND_TOP = {8: 127.0, 4: 7.5}


def quantised(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x: float [..., d], d a multiple of 16 -> uint8 [..., d * bits / 8]. What is not a number makes the whole vector
    not one."""
    x = x.float()
    if bits == 4:
        x = rotated(x)
    scale = _rounded_up(x.abs().amax(-1, keepdim=True) / ROUND_TOP[bits])
    y = (x / torch.where(scale > 0, scale, 1.0)).nan_to_num(0.0)
    # 4 bits count from 0: half a step between the two codes next to zero.
    y = y if bits == 8 else y + ROUND_TOP[4]
    low, high = (-127.0, 127.0) if bits == 8 else (0.0, 15.0)
    codes = y.round().clamp(low, high)
    bit = _bits_of(scale, bits)
    first = ((y[..., :SCALE_BITS] - bit) / 2).round() * 2 + bit
    # The next code of the same low bit, where the nearest one lies outside.
    first = torch.where(first > high, first - 2, torch.where(first < low, first + 2, first))
    codes[..., :SCALE_BITS] = first
    if bits == 8:
        return codes.to(torch.int8).view(torch.uint8)
    halves = codes.to(torch.uint8)
    return halves[..., 0::2] | halves[..., 1::2] << 4


def restored(raw: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., d * bits / 8] -> float32 [..., d]."""
    if bits == 8:
        codes = raw.contiguous().view(torch.int8)
        low = codes[..., :SCALE_BITS].int() & 1
        return codes.float() * _scale_of(low)
    codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    low = torch.cat((codes[..., 0:SCALE_BITS:2], codes[..., 1:SCALE_BITS:2]), dim=-1).int() & 1
    return rotated((codes.float() - ROUND_TOP[4]) * _scale_of(low))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Hadamard's matrix over blocks of the largest power of two that divides d: orthonormal, and its own inverse."""
    d = x.shape[-1]
    block = d & -d
    y = x.reshape(-1, d // block, block)
    half = 1
    while half < block:
        pairs = y.view(-1, d // (2 * half), 2, half)
        y = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        half *= 2
    return (y * block**-0.5).reshape(x.shape)


def _rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """To a bfloat16 that is not less; NaN stays."""
    up = ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    return torch.where(scale.isfinite(), up, scale)


def _bits_of(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The low bits of the first codes, float32 [..., 16]."""
    place = torch.arange(SCALE_BITS)
    if bits == 4:
        place = place // 2 + place % 2 * 8
    return (scale.view(torch.int32) >> (16 + place.to(scale.device)) & 1).float()


def _scale_of(low: torch.Tensor) -> torch.Tensor:
    """low: int32 [..., 16], bit i of the scale -> float32 [..., 1]."""
    place = torch.arange(SCALE_BITS, device=low.device, dtype=torch.int32)
    bits = (low << place).sum(-1, keepdim=True, dtype=torch.int32)
    return (bits << 16).view(torch.float32)
