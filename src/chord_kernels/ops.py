# SPDX-License-Identifier: Apache-2.0
"""The W4A16 ops: x [rows, K] times each row's expert weight, for three row contracts.

CUDA tensors go to the kernels, CPU tensors to the reference, anything else to an error with its reason. They are torch
library ops (namespace chord_kernels) with fakes, so torch.compile and CUDA graphs take them; inputs are never written.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from . import reference, rows, settings
from .errors import FormatError, UnsupportedError
from .formats import W4A16
from .kernels import ARCHITECTURES, Plan
from .plan import TILE_ARCHITECTURES, Problem, block_rows_for, make_plan, why_not
from .rows import ContiguousRows, IndexedRows, MaskedRows, RowContract
from .weights import PackedWeight

library = torch.library.Library("chord_kernels", "DEF")
_COMMON = "Tensor x, Tensor weight, bool paired, str epilogue, str dequant, int dependence"
library.define(
    f"w4a16_indexed({_COMMON}, Tensor sorted_ids, Tensor expert_ids, Tensor num_tokens_padded, int top_k, int block_rows, "
    "int expected_rows, Tensor(a!) out) -> ()"
)
library.define(f"w4a16_contiguous({_COMMON}, Tensor m_indices, int alignment, Tensor(a!) out) -> ()")
library.define(f"w4a16_masked({_COMMON}, Tensor masked_m, int expected_m, Tensor(a!) out) -> ()")


def indexed(
    x: Tensor,
    weight: PackedWeight,
    routing: IndexedRows,
    *,
    epilogue: str = "store",
    dequant: str = "auto",
    out: Tensor | None = None,
    validate: bool = False,
    dependent_launch: bool | str = False,
) -> Tensor:
    """Rows of x picked by id: out[id] = x[id // top_k] @ weight[expert].T.

    x: BF16 [M, K]. routing: see `IndexedRows`. out: BF16 [M * top_k, N], or [M * top_k, N/2] with epilogue "swiglu"
    (silu(gate) * up in FP32, one rounding; needs a weight packed with gate_up=True). Only rows named by sorted_ids are
    written. dequant: "exact" (no weight is rounded), "bf16" (weight = RN_bf16((code - 8) * scale)) or "auto": exact in
    blocks of up to 16 rows, and in blocks of 32 where experts have at most 16 rows on average; else bf16. Where K is at most 256,
    exact overflows with activations of 2^63 and more. validate checks the routing's values, with a synchronisation.
    dependent_launch: programmatic dependent launch. True: the kernel may be scheduled while the one before it on the stream
    ends, and waits for it before its first read; "weights_first": the one before it writes no routing, so routing is read and
    weights are copied before that wait. Raises FormatError, UnsupportedError, CompileError.

    >>> import torch, chord_kernels as chord
    >>> codes = torch.randint(0, 16, (4, 64, 64), dtype=torch.uint8)
    >>> weight = chord.pack_w4a16(codes, torch.ones(4, 64, 2, dtype=torch.bfloat16))
    >>> routing = chord.align_indexed(torch.tensor([[0, 3], [3, 1]]), num_experts=4, block_rows=16)
    >>> chord.indexed(torch.randn(2, 64, dtype=torch.bfloat16), weight, routing).shape
    torch.Size([4, 64])
    """
    x, out = _prepare(x, weight, routing, x.shape[0] * routing.top_k, epilogue, out, validate)
    if out.shape[0]:
        _ops.w4a16_indexed(
            x, weight.data, weight.paired, epilogue, dequant, _dependence(dependent_launch), routing.sorted_ids, routing.expert_ids,
            routing.num_tokens_padded, routing.top_k, routing.block_rows,
            out.shape[0] if routing.expected_rows is None else routing.expected_rows, out,
        )  # fmt: skip
    return out


def contiguous(
    x: Tensor,
    weight: PackedWeight,
    routing: ContiguousRows,
    *,
    epilogue: str = "store",
    dequant: str = "auto",
    out: Tensor | None = None,
    validate: bool = False,
    dependent_launch: bool | str = False,
) -> Tensor:
    """Rows of x grouped by expert: out[i] = x[i] @ weight[m_indices[i]].T; rows of -1 are not read and not written.

    x: BF16 [m, K]; out: BF16 [m, N], or [m, N/2] with epilogue "swiglu". Each expert's rows begin at a multiple of
    routing.alignment; a row of another expert inside a block is left untouched. The rest as in `indexed`.
    """
    if x.ndim == 2 and routing.m_indices.numel() != x.shape[0]:
        raise FormatError(f"m_indices has {routing.m_indices.numel()} entries for x with {x.shape[0]} rows; it names every row's expert")
    x, out = _prepare(x, weight, routing, x.shape[0], epilogue, out, validate)
    if out.shape[0]:
        _ops.w4a16_contiguous(
            x, weight.data, weight.paired, epilogue, dequant, _dependence(dependent_launch), routing.m_indices, routing.alignment, out
        )
    return out


def masked(
    x: Tensor,
    weight: PackedWeight,
    routing: MaskedRows,
    *,
    epilogue: str = "store",
    dequant: str = "auto",
    out: Tensor | None = None,
    validate: bool = False,
    dependent_launch: bool | str = False,
) -> Tensor:
    """Leading rows of each expert: out[e, i] = x[e, i] @ weight[e].T for i < masked_m[e].

    x: BF16 [E, max_m, K] or [E * max_m, K]; out: BF16 [E * max_m, N], or [E * max_m, N/2] with epilogue "swiglu". Rows from
    masked_m[e] on keep their bytes; counts beyond max_m are clamped. The rest as in `indexed`.
    """
    if routing.masked_m.numel() != weight.experts:
        raise FormatError(f"masked_m has {routing.masked_m.numel()} counts for {weight.experts} experts; give one an expert")
    if x.ndim == 3 and x.shape[0] != weight.experts:
        raise FormatError(f"x is {list(x.shape)} for {weight.experts} experts; give [E, max_m, K]")
    x = x.reshape(-1, x.shape[-1])
    if x.shape[0] % weight.experts:
        raise FormatError(f"x has {x.shape[0]} rows, not a multiple of {weight.experts} experts; give [E * max_m, K]")
    x, out = _prepare(x, weight, routing, x.shape[0], epilogue, out, validate)
    if out.shape[0]:
        _ops.w4a16_masked(
            x, weight.data, weight.paired, epilogue, dequant, _dependence(dependent_launch), routing.masked_m, routing.expected_m, out
        )
    return out


_DEPENDENCE = {False: 0, True: 1, "weights_first": 2}


def _dependence(dependent_launch: bool | str) -> int:
    if dependent_launch not in _DEPENDENCE:
        raise FormatError(f"dependent_launch {dependent_launch!r}; give False, True or 'weights_first'")
    return _DEPENDENCE[dependent_launch]


def _prepare(
    x: Tensor, weight: PackedWeight, routing: RowContract, out_rows: int, epilogue: str, out: Tensor | None, validate: bool
) -> tuple[Tensor, Tensor]:
    """Checks that need no device, and the output."""
    if weight.format is not W4A16:
        raise UnsupportedError(f"a weight in {weight.format.name}; the row contracts take INT4 weights, MXFP8 ones go to warp_decode")
    if x.dtype != torch.bfloat16 or x.ndim != 2:
        raise FormatError(f"x is {x.dtype} {list(x.shape)}; give bfloat16 [rows, K]")
    if x.shape[1] != weight.k:
        raise FormatError(f"x has K = {x.shape[1]}, the weight has K = {weight.k}")
    if not x.is_contiguous():
        raise FormatError(f"x has strides {x.stride()}; give contiguous rows (x.contiguous())")
    if epilogue == "swiglu" and not weight.paired:
        raise FormatError("epilogue 'swiglu' needs a gate/up weight; pack it with gate_up=True")
    if epilogue not in ("store", "swiglu"):
        raise UnsupportedError(f"epilogue {epilogue!r} is not computed; give 'store' or 'swiglu'")
    shape = (out_rows, weight.n // 2 if epilogue == "swiglu" else weight.n)
    if out is None:
        out = x.new_empty(shape)
    elif tuple(out.shape) != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise FormatError(f"out is {out.dtype} {list(out.shape)}, strides {out.stride()}; give contiguous bfloat16 {list(shape)}")
    tensors = (weight.data, out, *routing.tensors)
    if any(tensor.device != x.device for tensor in tensors):
        raise FormatError(f"x is on {x.device}, other tensors on {sorted({str(t.device) for t in tensors})}; put all on one device")
    if validate:
        rows.validate(routing, x.shape[0], weight.experts)
    return x, out


# ---- what the ops do --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def device_arch(device: int) -> tuple[str, int]:
    """Kernel architecture (sm_90a for Hopper) and SM count of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}{'a' if properties.major >= 9 else ''}", properties.multi_processor_count


def has_kernels(device: torch.device) -> bool:
    """Whether a kernel is compiled for this device."""
    return device.type == "cuda" and device_arch(device.index)[0] in ARCHITECTURES


def block_rows_on(device: torch.device, rows_per_expert: float) -> int:
    """Token rows a block of the plan for this many on average; what to align indexed routing to. CPU tensors take any."""
    return block_rows_for(rows_per_expert, device_arch(device.index)[0] if device.type == "cuda" else TILE_ARCHITECTURES[0])


def why_not_here(weight: PackedWeight, contract: str, epilogue: str = "store") -> str | None:
    """Why this op cannot run on the weight's device; None where it can. CPU always can."""
    if weight.device.type == "cpu":
        return None
    if weight.device.type != "cuda":
        return f"device {weight.device} has no kernels; use CUDA or CPU tensors"
    arch, sm_count = device_arch(weight.device.index)
    return why_not(Problem(arch, sm_count, contract, epilogue, weight.paired, weight.experts, weight.n, weight.k, rows=1))


@lru_cache(maxsize=4096)
def _plan(problem: Problem, pins: tuple[tuple[str, int | str], ...]) -> Plan:
    return make_plan(problem, dict(pins))


def plan_of(problem: Problem) -> Plan:
    """The plan that an op uses for this problem under the current environment."""
    return _plan(problem, tuple(sorted(settings.schedule_pins().items())))


def _problem(
    x: Tensor, weight: Tensor, paired: bool, epilogue: str, dequant: str, contract: str, routed_rows: int, **fields: int
) -> Problem:
    arch, sm_count = device_arch(x.device.index)
    n, k = weight.shape[1] * 64, weight.shape[2] * 64
    return Problem(
        arch, sm_count, contract, epilogue, paired, weight.shape[0], n, k, routed_rows, numerics=dequant, source_rows=x.shape[0], **fields
    )


def _launch(
    problem: Problem,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    routing: tuple[Tensor | None, Tensor | None, Tensor | None],
    limit: int,
    blocks: int,
    top_k: int,
    dependence: int,
) -> None:
    """blocks: the most blocks there can be; the kernel reads the true number on the device."""
    from .jit.launch import load

    plan = plan_of(problem)
    grid = min(problem.sm_count * plan.ctas, blocks * -(-problem.n // plan.piece_rows))
    if grid == 0:
        return
    index = x.device.index
    with torch.cuda.device(index):
        capturing = torch.cuda.is_current_stream_capturing
        kernel, stream = load(plan, index, capturing=capturing), torch.cuda.current_stream(index).cuda_stream
        counter = kernel.counter(stream, capturing)
        addresses = (x.data_ptr(), weight.data_ptr(), out.data_ptr(), counter, *(0 if t is None else t.data_ptr() for t in routing))
        scalars = (problem.n // 64, problem.k // 64, int(dependence == _DEPENDENCE["weights_first"]), limit, blocks, top_k, problem.experts)
        kernel.launch(stream, grid, addresses + scalars, dependent=dependence != 0)


def _indexed_cuda(
    x: Tensor, weight: Tensor, paired: bool, epilogue: str, dequant: str, dependence: int, sorted_ids: Tensor,
    expert_ids: Tensor, num_tokens_padded: Tensor, top_k: int, block_rows: int, expected_rows: int, out: Tensor,
) -> None:  # fmt: skip
    problem = _problem(x, weight, paired, epilogue, dequant, "indexed", expected_rows, block_rows=block_rows)
    blocks = min(sorted_ids.numel() // block_rows, expert_ids.numel())
    _launch(problem, x, weight, out, (sorted_ids, expert_ids, num_tokens_padded), out.shape[0], blocks, top_k, dependence)


def _contiguous_cuda(
    x: Tensor, weight: Tensor, paired: bool, epilogue: str, dequant: str, dependence: int, m_indices: Tensor, alignment: int,
    out: Tensor,
) -> None:  # fmt: skip
    problem = _problem(x, weight, paired, epilogue, dequant, "contiguous", x.shape[0], alignment=alignment)
    blocks = -(-x.shape[0] // plan_of(problem).block_rows)
    _launch(problem, x, weight, out, (m_indices, None, None), x.shape[0], blocks, 1, dependence)


def _masked_cuda(
    x: Tensor, weight: Tensor, paired: bool, epilogue: str, dequant: str, dependence: int, masked_m: Tensor, expected_m: int,
    out: Tensor,
) -> None:  # fmt: skip
    experts = weight.shape[0]
    max_m = x.shape[0] // experts
    problem = _problem(x, weight, paired, epilogue, dequant, "masked", experts * min(expected_m, max_m))
    blocks = experts * -(-max_m // plan_of(problem).block_rows)
    _launch(problem, x, weight, out, (None, None, masked_m), max_m, blocks, 1, dependence)


def _reference(x: Tensor, weight: Tensor, paired: bool, epilogue: str, dequant: str, routing: RowContract, out: Tensor) -> None:
    reference.grouped(x, PackedWeight(weight, paired), routing, out, epilogue=epilogue, dequant="exact" if dequant == "auto" else dequant)


def _indexed_cpu(x, weight, paired, epilogue, dequant, dependence, sorted_ids, expert_ids, padded, top_k, block_rows, expected_rows, out):
    _reference(x, weight, paired, epilogue, dequant, IndexedRows(sorted_ids, expert_ids, padded, top_k, block_rows), out)


def _contiguous_cpu(x, weight, paired, epilogue, dequant, dependence, m_indices, alignment, out):
    _reference(x, weight, paired, epilogue, dequant, ContiguousRows(m_indices, alignment), out)


def _masked_cpu(x, weight, paired, epilogue, dequant, dependence, masked_m, expected_m, out):
    _reference(x, weight, paired, epilogue, dequant, MaskedRows(masked_m, expected_m), out)


for _name, _cuda, _cpu in (
    ("w4a16_indexed", _indexed_cuda, _indexed_cpu),
    ("w4a16_contiguous", _contiguous_cuda, _contiguous_cpu),
    ("w4a16_masked", _masked_cuda, _masked_cpu),
):
    library.impl(_name, _cuda, "CUDA")
    library.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"chord_kernels::{_name}", lambda *args: None, lib=library)

_ops = torch.ops.chord_kernels
