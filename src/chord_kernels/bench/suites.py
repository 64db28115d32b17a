# SPDX-License-Identifier: Apache-2.0
"""Named cases (the Kimi K2 shapes under EP and TP), their floors and the recorded figures of the peers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from .. import ops, reference
from ..formats import W4A16
from ..rows import ContiguousRows, MaskedRows, RowContract, align_indexed, row_table
from ..weights import PackedWeight, empty_weight, pack_expert_into

READ_GBS = 4500.0  # measured on an H200 at 0.8 GB; see docs/facts.md
TENSOR_TFLOPS = 790.0
TOP_K = 8

_HIDDEN, _INTER, _EXPERTS = 7168, 2048, 384
_POINTS = {
    "decode": (1, 4, 8, 20, 30, 40, 50, 64, 128),
    "masked": (8, 16, 32, 64, 128, 256),
    "prefill": (1024, 2048, 4096, 8192, 16384),
    "tp8": (1, 8, 32, 64, 128, 1024, 2048, 4096, 8192, 16384),
    "contiguous": (128, 256, 512),
}
_CONTRACTS = {"decode": "indexed", "prefill": "indexed", "tp8": "indexed", "masked": "masked", "contiguous": "contiguous"}
STAGES = ("gate_up", "down")


@dataclass(frozen=True)
class Case:
    """One GEMM of one section at one point; names as in the peers' data file, plus -ep16 and -ep32 sections of our own."""

    section: str
    stage: str
    point: int
    experts: int
    n: int
    k: int
    contract: str

    @property
    def tokens(self) -> int:
        """Tokens that this GPU routes; rows an expert for the balanced contracts."""
        return max(self.point // 8, 1) if self.section.startswith("prefill") else self.point

    @property
    def routed_rows(self) -> int:
        return self.tokens * TOP_K if self.contract == "indexed" else self.point * self.experts

    @property
    def name(self) -> str:
        return f"{self.section} {self.stage} {self.point}"

    def bytes_moved(self, distinct_experts: float) -> float:
        """Codes and scales of the experts that are touched, activations read once, outputs written once."""
        activations = self.tokens if self.contract == "indexed" and self.stage == "gate_up" else self.routed_rows
        return distinct_experts * self.n * self.k * (0.5 + 2 / 32) + 2.0 * activations * self.k + 2.0 * self.routed_rows * self.n

    @property
    def flops(self) -> float:
        return 2.0 * self.routed_rows * self.n * self.k

    @property
    def expected_experts(self) -> float:
        if self.contract != "indexed":
            return self.experts
        return self.experts * (1 - (1 - TOP_K / self.experts) ** self.tokens)

    @property
    def floor_us(self) -> float:
        """The larger of bytes over the read ceiling and operations over the tensor ceiling."""
        return max(self.bytes_moved(self.expected_experts) / READ_GBS / 1e3, self.flops / TENSOR_TFLOPS / 1e6)


def _cases(section: str, suffix: str, experts: int, inter: int) -> Iterator[Case]:
    for stage in STAGES:
        n, k = (2 * inter, _HIDDEN) if stage == "gate_up" else (_HIDDEN, inter)
        for point in _POINTS[section]:
            yield Case(section + suffix, stage, point, experts, n, k, _CONTRACTS[section])


def all_cases() -> list[Case]:
    """Every case, sections in a fixed order."""
    found: list[Case] = []
    for section in _POINTS:
        if section == "tp8":
            found += _cases(section, "", _EXPERTS, _INTER // 8)
            continue
        for ranks in (8, 16, 32):
            if ranks == 8 or section in ("masked", "contiguous"):
                found += _cases(section, "" if ranks == 8 else f"-ep{ranks}", _EXPERTS // ranks, _INTER)
    return found


@lru_cache(maxsize=1)
def _peers() -> dict:
    return json.loads((Path(__file__).parent / "peers-h200.json").read_text())


def recorded_peer_us(case: Case) -> float | None:
    """The best recorded peer on an H200; None where none was recorded."""
    key = (case.section, case.stage, case.point)
    rows = [row for row in _peers()["cases"] if (row["section"], row["stage"], row["point"]) == key]
    return min((row[name] for row in rows for name in ("humming_us", "chord_us") if row.get(name)), default=None)


def recorded_small_batch(case: str, tokens: int) -> dict[str, float]:
    """Floor and the recorded peer of a small-batch case, as result-row fields; empty where none was recorded."""
    for row in _peers()["small_batch_graph"]["rows"]:
        if (row["case"], row["tokens"]) == (case, tokens):
            return {"floor_us": row["floor_us"], "recorded_peer_us": row["humming_us"]}
    return {}


# ---- inputs -----------------------------------------------------------------------------------------------------------------


def random_weight(experts: int, n: int, k: int, *, paired: bool, device: str = "cuda", seed: int = 0) -> PackedWeight:
    """Uniform codes and scales between 0.005 and 0.025, packed expert by expert."""
    generator = torch.Generator(device).manual_seed(seed)
    weight = empty_weight(W4A16, experts, n, k, paired=paired, device=device)
    for expert in range(experts):
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device, generator=generator)
        scales = torch.rand((n, k // 32), device=device, generator=generator) * 0.02 + 0.005
        pack_expert_into(weight, expert, codes, scales.to(torch.bfloat16))
    return weight


def random_topk_ids(tokens: int, experts: int, top_k: int = TOP_K, *, device: str = "cuda", seed: int | None = None) -> Tensor:
    """Router ids as the peers draw them: seed M, normal scores, top-k."""
    generator = torch.Generator(device).manual_seed(tokens if seed is None else seed)
    return torch.randn((tokens, experts), device=device, generator=generator).topk(top_k, dim=1).indices.to(torch.int32)


@dataclass
class Inputs:
    """Everything one call needs, and its output, poisoned with NaN."""

    case: Case
    weight: PackedWeight
    x: Tensor
    routing: RowContract
    out: Tensor
    epilogue: str = "store"
    distinct_experts: int = field(default=0)

    def call(self) -> Tensor:
        op = {"indexed": ops.indexed, "contiguous": ops.contiguous, "masked": ops.masked}[self.case.contract]
        return op(self.x, self.weight, self.routing, out=self.out, epilogue=self.epilogue)

    def check(self, rows: int = 96) -> float:
        """Relative error against FP64 with unrounded weights, on sampled rows of the first, middle and last expert."""
        source, target, expert = row_table(self.routing, self.x.reshape(-1, self.x.shape[-1]).shape[0], self.weight.experts)
        used = expert.unique()
        picked = torch.cat([(expert == e).nonzero().flatten()[: rows // 3] for e in (used[0], used[len(used) // 2], used[-1])])
        value = self.out[target[picked]].double()
        truth = torch.empty_like(value)
        for e in expert[picked].unique().tolist():
            mine = expert[picked] == e
            x = self.x.reshape(-1, self.x.shape[-1])[source[picked][mine]]
            product = reference.expert_product(x, *self.weight.unpack_expert(e), dequant="exact", dtype=torch.float64)
            truth[mine] = reference.swiglu(product) if self.epilogue == "swiglu" else product
        return reference.relative_error(value, truth)


def make_inputs(case: Case, weight: PackedWeight, *, epilogue: str = "store", block_rows: int | None = None, seed: int = 0) -> Inputs:
    """Fresh activations and routing of a case, on the weight's device."""
    device = str(weight.device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(rows: int) -> Tensor:
        return torch.randn((rows, case.k), device=device, generator=generator).to(torch.bfloat16)

    routing: RowContract
    if case.contract == "indexed":
        ids = random_topk_ids(case.tokens, case.experts, device=device)
        block = block_rows or ops.block_rows_on(weight.device, case.routed_rows / case.experts)
        routing = align_indexed(ids, case.experts, block)
        distinct = int(ids.unique().numel())
        if case.stage == "down":
            routing = routing.by_id()
            x, out_rows = normal(case.routed_rows), case.routed_rows
        else:
            x, out_rows = normal(case.tokens), case.routed_rows
    else:
        distinct, out_rows = case.experts, case.routed_rows
        x = normal(case.routed_rows)
        if case.contract == "contiguous":
            experts = torch.arange(case.experts, dtype=torch.int32, device=device)
            routing = ContiguousRows(experts.repeat_interleave(case.point))
        else:
            routing = MaskedRows(torch.full((case.experts,), case.point, dtype=torch.int32, device=device), case.point)
    n = case.n // 2 if epilogue == "swiglu" else case.n
    out = torch.full((out_rows, n), float("nan"), dtype=torch.bfloat16, device=device)
    return Inputs(case, weight, x, routing, out, epilogue, distinct)


def weights_for(cases: list[Case]) -> Iterator[tuple[PackedWeight, list[Case]]]:
    """Cases grouped by the weight they share, one weight alive at a time."""
    groups: dict[tuple[int, int, int, bool], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.experts, case.n, case.k, case.stage == "gate_up"), []).append(case)
    for (experts, n, k, paired), members in groups.items():
        weight = random_weight(experts, n, k, paired=paired)
        yield weight, members
        del weight
