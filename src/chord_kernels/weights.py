# SPDX-License-Identifier: Apache-2.0
"""Packed expert weights: one layout for every row contract and phase."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import FormatError
from .files import replacing
from .formats import FORMATS, MXFP8, W4A16, Format

_FILE_FORMAT = "chord-"


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """An expert weight [E, N, K], packed.

    data: uint8, contiguous (see `formats`): INT4 (W4A16) [E, N/64, K/64, 2304], MXFP8 [E, N/16, K/64, 1056]. `paired`: rows were
    [gate | up] and are interleaved, so that SwiGLU can be fused; outputs still come as [gate | up].
    """

    data: Tensor
    paired: bool = False
    format: Format = W4A16

    def __post_init__(self) -> None:
        form = self.format
        if self.data.dtype != torch.uint8 or self.data.ndim != 4 or self.data.shape[-1] != form.tile_bytes:
            raise FormatError(
                f"a packed weight is uint8 [E, N/{form.tile_rows}, K/{form.tile_k}, {form.tile_bytes}], got {self.data.dtype} "
                f"{list(self.data.shape)}; make one with pack_{form.name}"
            )
        if not self.data.is_contiguous():
            raise FormatError(f"a packed weight is contiguous, got strides {self.data.stride()}; call .contiguous() on its data")

    @property
    def experts(self) -> int:
        return self.data.shape[0]

    @property
    def n(self) -> int:
        """Output rows N; gate and up rows counted both."""
        return self.data.shape[1] * self.format.tile_rows

    @property
    def k(self) -> int:
        return self.data.shape[2] * self.format.tile_k

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.numel()

    def to(self, device: torch.device | str) -> PackedWeight:
        return PackedWeight(self.data.to(device), self.paired, self.format)

    def unpack_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """codes uint8 [N, K], scales BF16 [N, K/32] of one expert (MXFP8: elements and scales uint8), in the row order they had before."""
        return self.format.unpack_expert(self.data[expert], paired=self.paired)

    def unpack(self) -> tuple[Tensor, Tensor]:
        """codes and scales of all experts: the exact inverse of packing, but for what `pack_mxfp8` says of NaN."""
        codes, scales = zip(*(self.unpack_expert(e) for e in range(self.experts)), strict=True)
        return torch.stack(codes), torch.stack(scales)

    def save(self, path: str | os.PathLike) -> None:
        """Write a safetensors file. It appears whole or not at all."""
        from safetensors.torch import save_file

        metadata = {
            "format": _FILE_FORMAT + self.format.name,
            "layout_version": str(self.format.layout_version),
            "paired": str(int(self.paired)),
        }
        with replacing(path) as temporary:
            save_file({"data": self.data.cpu()}, temporary, metadata=metadata)

    @classmethod
    def load(cls, path: str | os.PathLike, device: torch.device | str = "cpu") -> PackedWeight:
        """Map a file that `save` wrote. Another layout version is refused: pack the checkpoint again."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                form = FORMATS.get(str(metadata.get("format", "")).removeprefix(_FILE_FORMAT))
                if form is None or metadata["format"] != _FILE_FORMAT + form.name:
                    known = " or ".join(repr(_FILE_FORMAT + name) for name in FORMATS)
                    raise FormatError(f"{path} is not a packed weight (format {metadata.get('format')!r}, wanted {known})")
                version = metadata.get("layout_version")
                if version != str(form.layout_version):
                    raise FormatError(
                        f"{path} has layout version {version}, this release reads {form.layout_version}; pack the checkpoint again"
                    )
                return cls(file.get_tensor("data"), metadata.get("paired") == "1", form)
        except SafetensorError as error:
            raise FormatError(f"{path} is not a readable safetensors file: {error}") from error


def check_layer(gate_up: PackedWeight, down: PackedWeight) -> None:
    """Raises FormatError unless the two make a layer."""
    if gate_up.format is not down.format:
        raise FormatError(f"gate_up is {gate_up.format.name} and down {down.format.name}; a layer has one format")
    if not gate_up.paired or down.paired:
        raise FormatError("gate_up must be packed with gate_up=True and down without it")
    if (down.experts, down.n, 2 * down.k) != (gate_up.experts, gate_up.k, gate_up.n):
        raise FormatError(
            f"gate_up is [{gate_up.experts}, {gate_up.n}, {gate_up.k}], down is [{down.experts}, {down.n}, {down.k}]; "
            "for gate_up [E, 2I, H] down is [E, H, I]"
        )


def empty_weight(form: Format, experts: int, n: int, k: int, *, paired: bool = False, device: torch.device | str = "cpu") -> PackedWeight:
    """An uninitialised weight to be filled expert by expert with `pack_expert_into`."""
    if reason := form.why_not(n, k, paired=paired):
        raise FormatError(f"cannot pack a weight of N = {n}, K = {k}: {reason}")
    return PackedWeight(torch.empty(form.packed_shape(experts, n, k), dtype=torch.uint8, device=device), paired, form)


def pack_expert_into(weight: PackedWeight, expert: int, values: Tensor, scales: Tensor) -> None:
    """Fill expert `expert` of `weight` from tensors on any device, scales [N, K/32].

    INT4: codes uint8 [N, K] or int32 words [N, K/8], and floats. MXFP8: float8_e4m3fn or uint8 [N, K], and uint8 or float8_e8m0fnu.
    """
    n, k, form = weight.n, weight.k, weight.format
    if form is MXFP8:
        values, scales = _bits(values, "float8_e4m3fn", "elements"), _bits(scales, "float8_e8m0fnu", "scales")
        if tuple(values.shape) != (n, k):
            raise FormatError(f"elements are {list(values.shape)}; give [{n}, {k}]")
    else:
        wanted = (n, k) if values.dtype == torch.uint8 else (n, k // 8)
        if values.dtype not in (torch.uint8, torch.int32) or tuple(values.shape) != wanted:
            raise FormatError(
                f"codes are {values.dtype} {list(values.shape)}; give uint8 codes [{n}, {k}] or int32 checkpoint words [{n}, {k // 8}]"
            )
    if tuple(scales.shape) != (n, k // form.group):
        raise FormatError(
            f"scales are {list(scales.shape)}, {'elements' if form is MXFP8 else 'codes'} are [{n}, {k}]: with group size {form.group} "
            f"the scales must be [{n}, {k // form.group}]; a K-sharded weight needs its scales cut along K too"
        )
    scales = scales.to(weight.device)
    form.pack_expert(
        weight.data[expert],
        values.to(weight.device),
        scales if form is MXFP8 else W4A16.check_scales(scales),
        paired=weight.paired,
    )


def pack_w4a16(codes: Tensor, scales: Tensor, *, gate_up: bool = False) -> PackedWeight:
    """Pack INT4 expert weights; once, for every row contract and phase.

    codes: uint8 [E, N, K] with values 0..15, or checkpoint words int32 [E, N, K/8] (nibble j of a word is k = 8 * word + j).
    A weight is (code - 8) * scale. scales: [E, N, K/32], BF16; FP16 and FP32 are rounded to BF16 once. N % 64 == 0 and
    K % 64 == 0. gate_up: rows are [gate | up] (gate first) and are interleaved so that SwiGLU can be fused. The result is
    on the codes' device; memory peaks at input + output + one expert. Raises FormatError.

    >>> import torch, chord_kernels as chord
    >>> codes = torch.randint(0, 16, (2, 128, 64), dtype=torch.uint8)
    >>> weight = chord.pack_w4a16(codes, torch.ones(2, 128, 2, dtype=torch.bfloat16))
    >>> weight.n, weight.k, torch.equal(weight.unpack()[0], codes)
    (128, 64, True)
    """
    if codes.ndim != 3 or scales.ndim != 3 or codes.shape[:2] != scales.shape[:2]:
        raise FormatError(f"codes {list(codes.shape)} and scales {list(scales.shape)} must be [E, N, ...] with the same E and N")
    if codes.dtype not in (torch.uint8, torch.int32):
        raise FormatError(f"codes are {codes.dtype}; give uint8 codes [E, N, K] or int32 checkpoint words [E, N, K/8]")
    experts, n = codes.shape[:2]
    k = codes.shape[2] * (1 if codes.dtype == torch.uint8 else 8)
    if codes.dtype == torch.uint8 and codes.numel() and int(codes.max()) > 15:
        raise FormatError(f"codes reach {int(codes.max())}; INT4 codes are 0..15 (value = code - 8). Are these packed bytes?")
    weight = empty_weight(W4A16, experts, n, k, paired=gate_up, device=codes.device)
    for expert in range(experts):
        pack_expert_into(weight, expert, codes[expert], scales[expert])
    return weight


def pack_w4a16_grouped(codes: Tensor, scales: Tensor, *, mode: str = "contiguous", gate_up: bool = False) -> PackedWeight:
    """The published spelling. mode "contiguous" or "masked": both give the one layout that serves either."""
    if mode not in ("contiguous", "masked"):
        raise FormatError(f"mode {mode!r} is not known; give 'contiguous' or 'masked' (both return the same layout)")
    return pack_w4a16(codes, scales, gate_up=gate_up)


def pack_mxfp8(elements: Tensor, scales: Tensor, *, gate_up: bool = False) -> PackedWeight:
    """Pack MXFP8 expert weights for `warp_decode`.

    elements: float8_e4m3fn or uint8 (the same bits) [E, N, K]. scales: uint8 or float8_e8m0fnu [E, N, K/32], 2^(byte - 127); byte 255 is
    NaN. N % 64 == 0 and K % 64 == 0. gate_up: rows are [gate | up] (gate first; interleaved ones must be converted before). The result is
    on the elements' device. A group of 32 that holds an element NaN gets the scale NaN: the same outputs, and the one thing that
    unpacking does not give back. Raises FormatError.

    >>> import torch, chord_kernels as chord
    >>> elements, scales = chord.quantize_mxfp8(torch.randn(2, 128, 64))
    >>> weight = chord.pack_mxfp8(elements, scales)
    >>> weight.n, weight.k, torch.equal(weight.unpack()[0], elements)
    (128, 64, True)
    """
    if elements.ndim != 3 or scales.ndim != 3 or elements.shape[0] != scales.shape[0]:
        raise FormatError(f"elements {list(elements.shape)} and scales {list(scales.shape)} must be [E, N, K] and [E, N, K/32]")
    weight = empty_weight(MXFP8, *elements.shape, paired=gate_up, device=elements.device)
    for expert in range(weight.experts):
        pack_expert_into(weight, expert, elements[expert], scales[expert])
    return weight


def quantize_mxfp8(values: Tensor, *, rule: str = "ocp") -> tuple[Tensor, Tensor]:
    """Floats [.., K], K % 32 == 0, to MXFP8 elements uint8 [.., K] and scales uint8 [.., K/32]; rules in `formats.MXFP8.quantize`."""
    if not values.is_floating_point() or values.ndim < 1 or values.shape[-1] % MXFP8.group:
        raise FormatError(f"values are {values.dtype} {list(values.shape)}; give floats [.., K] with K a multiple of {MXFP8.group}")
    return MXFP8.quantize(values, rule=rule)


def _bits(tensor: Tensor, name: str, what: str) -> Tensor:
    if tensor.dtype == torch.uint8:
        return tensor
    if tensor.dtype == getattr(torch, name, None):
        return tensor.view(torch.uint8)
    raise FormatError(f"{what} are {tensor.dtype}; give {name}, or its bits as uint8")
