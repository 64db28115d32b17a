# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: one rank's share of a layer by indexed rows and by contiguous ones, of the same routing.

rows_of_a_rank.py [--out FILE]: Kimi K2's experts on one of eight ranks (48 of 384). Contiguous rows have to be gathered before the products
and scattered behind them; their layout is not timed, and their number is known beforehand, which an engine's is not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import chord_kernels as chord
from chord_kernels import ops
from chord_kernels.align import align_rows
from chord_kernels.bench import timing
from chord_kernels.bench.suites import random_topk_ids, random_weight
from chord_kernels.combine import weighted_sum
from chord_kernels.rows import ContiguousRows, align_contiguous

HIDDEN, INTERMEDIATE, EXPERTS, KNOWN, TOP_K = 7168, 2048, 48, 384, 8
TOKENS = (128, 512, 2048, 8192, 16384)
LIMIT = 1e-2  # of one path from the other: up to 96 rows an expert their kernels round otherwise


class Rank:
    def __init__(self, tokens: int) -> None:
        self.ids = random_topk_ids(tokens, KNOWN, seed=tokens)
        self.map = torch.full((KNOWN,), -1, dtype=torch.int32, device="cuda")
        self.map[:EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
        self.x = torch.randn((tokens, HIDDEN), device="cuda").to(torch.bfloat16)
        self.weights = torch.rand((tokens, TOP_K), device="cuda")
        self.out = torch.empty_like(self.x)
        self.values = self.x.new_empty((tokens * TOP_K, HIDDEN))
        self.by_slot = self.x.new_empty((tokens * TOP_K, INTERMEDIATE))

    def sum(self) -> None:
        values = self.values.view(-1, TOP_K, HIDDEN)
        weighted_sum(values, self.ids, self.weights, experts=EXPERTS, expert_map=self.map, out=self.out)

    def indexed(self, gate_up: chord.PackedWeight, down: chord.PackedWeight) -> tuple[Callable[[], None], Callable[[], None]]:
        """(the whole share, its products alone)"""
        block_rows = ops.block_rows_on(self.x.device, self.ids.numel() / KNOWN)
        aligned = align_rows(self.ids, EXPERTS, block_rows, self.map)

        def products(routing: chord.IndexedRows = aligned) -> None:
            ops.indexed(self.x, gate_up, routing, epilogue="swiglu", out=self.by_slot, dependent_launch=True)
            ops.indexed(self.by_slot, down, routing.by_id(), out=self.values, dependent_launch="weights_first")

        def whole() -> None:
            products(align_rows(self.ids, EXPERTS, block_rows, self.map))
            self.sum()

        return whole, products

    def contiguous(self, gate_up: chord.PackedWeight, down: chord.PackedWeight) -> tuple[Callable[[], None], Callable[[], None]]:
        layout, row_ids = align_contiguous(self.ids, EXPERTS, expert_map=self.map)
        used = int((layout.m_indices >= 0).nonzero().max()) + 1
        used += -used % layout.alignment
        rows, slots = ContiguousRows(layout.m_indices[:used].clone()), row_ids[:used].clamp(min=0).long()
        real = (row_ids[:used] >= 0).nonzero().flatten()
        tokens, gathered = slots // TOP_K, self.x.new_empty((used, HIDDEN))
        hidden, values = self.x.new_empty((used, INTERMEDIATE)), self.x.new_empty((used, HIDDEN))
        torch.index_select(self.x, 0, tokens, out=gathered)

        def products() -> None:
            ops.contiguous(gathered, gate_up, rows, epilogue="swiglu", out=hidden, dependent_launch=True)
            ops.contiguous(hidden, down, rows, out=values, dependent_launch="weights_first")

        def whole() -> None:
            torch.index_select(self.x, 0, tokens, out=gathered)
            products()
            self.values.index_copy_(0, slots[real], values[real])
            self.sum()

        return whole, products


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    gate_up = random_weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN, paired=True)
    down = random_weight(EXPERTS, HIDDEN, INTERMEDIATE, paired=False)
    rows: list[dict[str, float]] = []
    print("| tokens | indexed, us | products alone | contiguous, us | products alone |\n|--|--|--|--|--|")
    for tokens in TOKENS:
        rank = Rank(tokens)
        row: dict[str, float] = {"tokens": tokens}
        first: Tensor | None = None
        for name in ("indexed", "contiguous"):
            whole, products = getattr(rank, name)(gate_up, down)
            rank.out.fill_(float("nan"))
            whole()
            first = rank.out.clone() if first is None else first
            apart = float((rank.out.double() - first.double()).norm() / first.double().norm())
            for what, call in (("us", whole), ("products_us", products)):
                row[f"{name}_{what}"] = round(timing.cold(timing.captured(call), lambda apart=apart: apart, limit=LIMIT, samples=20).us, 1)
        rows.append(row)
        print("|", " | ".join(str(value) for value in row.values()), "|", flush=True)
    if given.out:
        found = {"card": timing.card(), "date": time.strftime("%F"), "commit": given.commit, "command": " ".join(sys.argv), "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
