# SPDX-License-Identifier: Apache-2.0
"""Bit layouts. One object a format: how values are packed, unpacked and what they mean; nobody else knows where a nibble is.

W4A16, layout version 1. A weight [E, N, K] is E x N/64 x K/64 tiles of 64 rows x 64 k. A tile is 2304 bytes: 4 blocks of
16 rows, each 512 bytes of codes and 64 bytes of scales.

Codes: lane L (g = L // 4, t = L % 4) owns 16 bytes, four little-endian words; word s is k-step s (16 k). In a word, register
j of the tensor core's A fragment has its low half at bits 4j..4j+3 and its high half at bits 16+4j..16+4j+3:
row g + 8 * (j & 1), k = 16 * s + 8 * (j >> 1) + 2 * t + {0 low, 1 high}.

Scales: for g in 0..7, 8 bytes = BF16 [row g | row g + 8][32-group 0 | 1 of the tile].

MXFP8, layout version 1. A weight [E, N, K] is E x N/16 x K/64 blocks of 16 rows x 64 k, 1056 bytes each: two planes of 512 bytes of
elements, 32 bytes of scales.

Elements: lane L owns 16 bytes of plane p, words [k-step 2p | 2p + 1][k half]; a word holds rows g and g + 8 at k = 16 * step + 8 * half +
2 * t + {0 low 16 bits, 1 high}. In 16 bits, row g has its sign at bit 15 and its other bits at 10..4 (as a BF16 number, 2^-120 of its
value); row g + 8 has its sign at 11, its upper three exponent bits at 14..12, the lowest and the mantissa at 3..0.

Scales: for g in 0..7, 4 bytes = E8M0 [row g | row g + 8][32-group 0 | 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .errors import FormatError

_ROWS_AT_ONCE = 1 << 23  # elements packed side by side: bounds the scratch


@dataclass(frozen=True)
class W4A16:
    """Unsigned INT4 codes (value = code - 8) with one BF16 scale per 32 along K."""

    name: ClassVar[str] = "w4a16"
    layout_version: ClassVar[int] = 1
    group: ClassVar[int] = 32
    zero_point: ClassVar[int] = 8
    tile_rows: ClassVar[int] = 64
    tile_k: ClassVar[int] = 64
    block_bytes: ClassVar[int] = 576
    code_bytes: ClassVar[int] = 512
    tile_bytes: ClassVar[int] = 2304
    scale_floor: ClassVar[float] = 2.0**-97
    scale_limit: ClassVar[float] = 2.0**23

    @classmethod
    def why_not(cls, n: int, k: int, *, paired: bool = False) -> str | None:
        """Why [n, k] weights cannot be packed; None where they can."""
        if n < 1 or n % cls.tile_rows:
            way_out = "; a gate/up weight has N = 2 * intermediate size" if paired else ""
            return f"N = {n} is not a positive multiple of {cls.tile_rows}{way_out}"
        if k < 1 or k % cls.tile_k:
            return f"K = {k} is not a positive multiple of {cls.tile_k}"
        return None

    @classmethod
    def packed_shape(cls, experts: int, n: int, k: int) -> tuple[int, int, int, int]:
        return experts, n // cls.tile_rows, k // cls.tile_k, cls.tile_bytes

    @staticmethod
    def pair_rows(rows: Tensor) -> Tensor:
        """[gate | up] rows along dim 0 to pairs: every 16 rows are 8 gate rows and the 8 matching up rows."""
        n = rows.shape[0]
        return rows.reshape(2, n // 16, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    @staticmethod
    def unpair_rows(rows: Tensor) -> Tensor:
        """The inverse of `pair_rows`."""
        n = rows.shape[0]
        return rows.reshape(n // 16, 2, 8, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)

    @staticmethod
    def codes_of_words(words: Tensor) -> Tensor:
        """Checkpoint words int32 [..., K/8] to codes uint8 [..., K]: nibble j of a word is k = 8 * word + j."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
        return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)

    @staticmethod
    def words_of_codes(codes: Tensor) -> Tensor:
        """The inverse of `codes_of_words`."""
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
        nibbles = codes.to(torch.int32).unflatten(-1, (-1, 8)) << shifts
        return nibbles.sum(-1, dtype=torch.int64).to(torch.int32)

    @classmethod
    def pack_expert(cls, out: Tensor, codes: Tensor, scales: Tensor, *, paired: bool) -> None:
        """Fill `out` uint8 [N/64, K/64, 2304] from one expert.

        codes: uint8 [N, K], or checkpoint words int32 [N, K/8]. scales: BF16 [N, K/32]. With `paired`, rows are
        [gate | up] and are interleaved. Scratch is bounded by a constant and one expert's row order.
        """
        n, k = scales.shape[0], scales.shape[1] * cls.group
        if paired:
            order = cls.pair_rows(torch.arange(n, device=codes.device))
        chunk = max(1, _ROWS_AT_ONCE // (k * cls.tile_rows)) * cls.tile_rows
        for start in range(0, n, chunk):
            rows = order[start : start + chunk] if paired else slice(start, min(start + chunk, n))
            part = codes[rows] if codes.dtype == torch.int32 else cls.words_of_codes(codes[rows])
            cls._pack_rows(out[start // 64 : (start + chunk) // 64], part, scales[rows])

    @classmethod
    def _pack_rows(cls, out: Tensor, words: Tensor, scales: Tensor) -> None:
        tiles, k_tiles = out.shape[:2]
        # tile, block, row half, g, k-tile, step, k half; byte t of a word has the codes of a pair's two elements
        sources = words.reshape(tiles, 4, 2, 8, k_tiles, 4, 2)
        to_byte = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
        words = torch.zeros((tiles, 4, 8, k_tiles, 4, 4), dtype=torch.int32, device=words.device)  # ..., step, t
        for k_half in range(2):
            for row_half in range(2):
                shift = 4 * (2 * k_half + row_half)
                pairs = sources[:, :, row_half, :, :, :, k_half].unsqueeze(-1) >> to_byte
                words |= ((pairs & 0x0F) << shift) | ((pairs & 0xF0) << 12 + shift)
        blocks = out.view(tiles, k_tiles, 4, cls.block_bytes)
        words = words.permute(0, 3, 1, 2, 5, 4).reshape(tiles, k_tiles, 4, 128)  # tile, k-tile, block, (g, t, step)
        blocks[..., : cls.code_bytes] = words.contiguous().view(torch.uint8)
        s = scales.reshape(tiles, 4, 2, 8, k_tiles, 2).permute(0, 4, 1, 3, 2, 5).contiguous()
        blocks[..., cls.code_bytes :] = s.view(torch.uint8).reshape(tiles, k_tiles, 4, 64)

    @classmethod
    def unpack_expert(cls, packed: Tensor, *, paired: bool) -> tuple[Tensor, Tensor]:
        """uint8 [N/64, K/64, 2304] to codes uint8 [N, K] and scales BF16 [N, K/32], rows as they were before packing."""
        tiles, k_tiles = packed.shape[:2]
        n, k = tiles * 64, k_tiles * 64
        blocks = packed.reshape(tiles, k_tiles, 4, cls.block_bytes)
        words = blocks[..., : cls.code_bytes].contiguous().view(torch.int32).view(tiles, k_tiles, 4, 8, 4, 4)
        words = words.permute(0, 2, 3, 1, 5, 4)  # tile, block, g, k-tile, step, t
        codes = torch.empty((tiles, 4, 2, 8, k_tiles, 4, 2, 4, 2), dtype=torch.uint8, device=packed.device)
        for k_half in range(2):
            for row_half in range(2):
                for element in range(2):
                    shift = 4 * (2 * k_half + row_half) + 16 * element
                    codes[:, :, row_half, :, :, :, k_half, :, element] = ((words >> shift) & 15).to(torch.uint8)
        s = blocks[..., cls.code_bytes :].contiguous().view(torch.bfloat16).view(tiles, k_tiles, 4, 8, 2, 2)
        scales = s.permute(0, 2, 4, 3, 1, 5).reshape(n, k // cls.group)
        codes = codes.view(n, k)
        return (cls.unpair_rows(codes), cls.unpair_rows(scales)) if paired else (codes, scales)

    @classmethod
    def dequantize(cls, codes: Tensor, scales: Tensor, *, rounded: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        """(code - 8) * scale in `dtype`; with `rounded`, first rounded to BF16 as checkpoints' own dequantizers do."""
        integers = codes.to(torch.float32) - cls.zero_point
        values = integers.unflatten(-1, (-1, cls.group)) * scales.to(torch.float32).unsqueeze(-1)
        values = values.flatten(-2)  # exact in FP32: 4 bits times 8 bits
        return (values.to(torch.bfloat16) if rounded else values).to(dtype)

    @classmethod
    def check_scales(cls, scales: Tensor) -> Tensor:
        """Scales as BF16. FP16 and FP32 are rounded to nearest once; then what is not finite or reaches `scale_limit` is refused,
        and magnitudes below `scale_floor` become 0: between the two, kernels scale weights without losing a bit."""
        rounded = cls.rounded_scales(scales)
        cls.check_largest_scale(float(rounded.abs().amax()) if rounded.numel() else 0.0)
        return torch.where(rounded.abs() < cls.scale_floor, 0.0, rounded)

    @staticmethod
    def rounded_scales(scales: Tensor) -> Tensor:
        if scales.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise FormatError(f"scales are {scales.dtype}; give bfloat16, or float16 / float32, which are rounded to bfloat16 once")
        return scales.to(torch.bfloat16)

    @classmethod
    def check_largest_scale(cls, magnitude: float) -> None:
        """magnitude: NaN if one is NaN."""
        if not math.isfinite(magnitude):
            raise FormatError("scales hold values that are not finite as bfloat16 (inf, NaN or beyond 3.39e38); repair the checkpoint")
        if magnitude >= cls.scale_limit:
            raise FormatError(f"scales reach {magnitude:g}; kernels take magnitudes below {cls.scale_limit:g}, so rescale the weight")


@dataclass(frozen=True)
class MXFP8:
    """OCP MX: E4M3 elements with one E8M0 scale (2^(byte - 127), 255: NaN) per 32 along K."""

    name: ClassVar[str] = "mxfp8"
    layout_version: ClassVar[int] = 1
    group: ClassVar[int] = 32
    tile_rows: ClassVar[int] = 16
    tile_k: ClassVar[int] = 64
    element_bytes: ClassVar[int] = 1024
    tile_bytes: ClassVar[int] = 1056
    largest: ClassVar[float] = 448.0
    scale_bias: ClassVar[int] = 127
    scale_nan: ClassVar[int] = 255

    @classmethod
    def why_not(cls, n: int, k: int, *, paired: bool = False) -> str | None:
        """Why [n, k] weights cannot be packed; None where they can. The same sizes as W4A16."""
        return W4A16.why_not(n, k, paired=paired)

    @classmethod
    def packed_shape(cls, experts: int, n: int, k: int) -> tuple[int, int, int, int]:
        return experts, n // cls.tile_rows, k // cls.tile_k, cls.tile_bytes

    @classmethod
    def pack_expert(cls, out: Tensor, elements: Tensor, scales: Tensor, *, paired: bool) -> None:
        """Fill `out` uint8 [N/16, K/64, 1056] from one expert: elements uint8 [N, K] (E4M3 bits), scales uint8 [N, K/32] (E8M0 bits).

        A group that holds an element NaN gets the scale NaN, which gives the same outputs.
        """
        has_nan = ((elements & 0x7F) == 0x7F).unflatten(-1, (-1, cls.group)).any(-1)
        scales = torch.where(has_nan, cls.scale_nan, scales)
        if paired:
            elements, scales = W4A16.pair_rows(elements), W4A16.pair_rows(scales)
        blocks, k_tiles = out.shape[:2]
        # block, row half, g, k-tile, plane, step of plane, k half, t, pair element
        e = elements.reshape(blocks, 2, 8, k_tiles, 2, 2, 2, 4, 2).to(torch.int32)
        low, high = e[:, 0], e[:, 1]
        halves = (low & 0x80) << 8 | (low & 0x7F) << 4 | (high & 0x80) << 4 | (high & 0x70) << 8 | (high & 0x0F)
        words = halves[..., 0] | halves[..., 1] << 16
        words = words.permute(0, 2, 3, 1, 6, 4, 5).contiguous()  # block, k-tile, plane, g, t, step, k half
        out[..., : cls.element_bytes] = words.view(torch.uint8).reshape(blocks, k_tiles, cls.element_bytes)
        s = scales.reshape(blocks, 2, 8, k_tiles, 2).permute(0, 3, 2, 1, 4)
        out[..., cls.element_bytes :] = s.reshape(blocks, k_tiles, 32)

    @classmethod
    def unpack_expert(cls, packed: Tensor, *, paired: bool) -> tuple[Tensor, Tensor]:
        """uint8 [N/16, K/64, 1056] to elements uint8 [N, K] and scales uint8 [N, K/32], rows as they were before packing."""
        blocks, k_tiles = packed.shape[:2]
        words = packed[..., : cls.element_bytes].contiguous().view(torch.int32).reshape(blocks, k_tiles, 2, 8, 4, 2, 2)
        halves = torch.stack((words & 0xFFFF, words >> 16 & 0xFFFF), dim=-1)
        low = halves >> 8 & 0x80 | halves >> 4 & 0x7F
        high = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
        e = torch.stack((low, high), dim=1)  # block, row half, k-tile, plane, g, t, step, k half, pair element
        elements = e.permute(0, 1, 4, 2, 3, 6, 7, 5, 8).reshape(blocks * 16, k_tiles * 64).to(torch.uint8)
        s = packed[..., cls.element_bytes :].reshape(blocks, k_tiles, 8, 2, 2)
        scales = s.permute(0, 3, 2, 1, 4).reshape(blocks * 16, k_tiles * 2)
        return (W4A16.unpair_rows(elements), W4A16.unpair_rows(scales)) if paired else (elements, scales)

    @classmethod
    def dequantize(cls, elements: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """element * 2^(scale - 127) in `dtype`. Exact in float64; in float32 what reaches 2^128 is infinite."""
        values = elements.view(torch.float8_e4m3fn).to(torch.float64).unflatten(-1, (-1, cls.group))
        factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float64), scales.to(torch.int32) - cls.scale_bias)
        factors = torch.where(scales == cls.scale_nan, torch.nan, factors)
        return (values * factors.unsqueeze(-1)).flatten(-2).to(dtype)

    @classmethod
    def quantize(cls, values: Tensor, *, rule: str = "ocp") -> tuple[Tensor, Tensor]:
        """Floats [.., K] to elements uint8 [.., K] and scales uint8 [.., K/32].

        The exponent of a group is, by rule "ocp" (MX specification 1.0), floor(log2(largest magnitude)) - 8: elements beyond 448 are
        clamped; by rule "round_up", the least one that clamps none, ceil(log2(largest / 448)). It is limited to -127..127. Elements are
        rounded to nearest even. A group of zeros has scale byte 0; a group with an infinity or NaN has the scale NaN.
        """
        if rule not in ("ocp", "round_up"):
            raise FormatError(f"rule {rule!r}; give 'ocp' or 'round_up'")
        groups = values.to(torch.float64).unflatten(-1, (-1, cls.group))
        largest = groups.abs().amax(-1)
        finite = largest.isfinite()  # a NaN makes the maximum NaN
        mantissa, exponent = torch.frexp(torch.where(finite, largest, 0.0))  # mantissa in [0.5, 1)
        exponent = exponent - 9 + (mantissa > cls.largest / 512).to(torch.int32) if rule == "round_up" else exponent - 9
        exponent = torch.where(largest > 0, exponent, -cls.scale_bias).clamp(-cls.scale_bias, cls.scale_bias)
        scaled = torch.ldexp(groups, -exponent.unsqueeze(-1)).clamp(-cls.largest, cls.largest)
        scaled = torch.where(finite.unsqueeze(-1), scaled, 0.0)
        elements = scaled.to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
        return elements, torch.where(finite, exponent + cls.scale_bias, cls.scale_nan).to(torch.uint8)


Format = type[W4A16] | type[MXFP8]
FORMATS: dict[str, Format] = {W4A16.name: W4A16, MXFP8.name: MXFP8}
