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

from chord_kernels import MoELayer, ops
from chord_kernels.align import align_rows
from chord_kernels.bench import timing
from chord_kernels.bench.layer_run import sampled_error
from chord_kernels.bench.suites import random_topk_ids, random_weight
from chord_kernels.combine import weighted_sum
from chord_kernels.rows import ContiguousRows, align_contiguous

HIDDEN, INTERMEDIATE, EXPERTS, KNOWN, TOP_K = 7168, 2048, 48, 384, 8
TOKENS = (128, 512, 2048, 8192, 16384)
LIMIT = 5e-3  # from FP64 with unrounded weights; rounding them to BF16 is 4e-3
Calls = tuple[Callable[[], object], Callable[[], object]]  # the whole share, its products alone


class Rank:
    """The first EXPERTS experts, so that a global id is the local one; and tokens of all ranks."""

    def __init__(self, layer: MoELayer, tokens: int) -> None:
        self.layer = layer
        self.ids = random_topk_ids(tokens, KNOWN, seed=tokens)
        self.x = torch.randn((tokens, HIDDEN), device="cuda").to(torch.bfloat16)
        self.weights = torch.rand((tokens, TOP_K), device="cuda")
        self.out = torch.empty_like(self.x)
        self.values = self.x.new_empty((tokens * TOP_K + 1, HIDDEN))  # of every slot; the last row is for what fills blocks up

    def indexed(self) -> Calls:
        """The layer as it is; tokens of more than one batch of warp decode go through aligned blocks."""
        block_rows = ops.block_rows_on(self.x.device, self.ids.numel() / KNOWN)
        routing = align_rows(self.ids, EXPERTS, block_rows, self.layer.expert_map)
        by_slot = self.x.new_empty((self.ids.numel(), INTERMEDIATE))

        def products() -> None:
            ops.indexed(self.x, self.layer.gate_up, routing, epilogue="swiglu", out=by_slot, dependent_launch=True)
            ops.indexed(by_slot, self.layer.down, routing.by_id(), out=self.values[:-1], dependent_launch="weights_first")

        return lambda: self.layer(self.x, self.ids, self.weights, out=self.out), products

    def contiguous(self) -> Calls:
        layout, row_ids = align_contiguous(self.ids, EXPERTS, expert_map=self.layer.expert_map)
        used = int((layout.m_indices >= 0).nonzero().max()) + 1
        used += -used % layout.alignment
        rows, ids = ContiguousRows(layout.m_indices[:used].clone()), row_ids[:used].long()
        slots, tokens = torch.where(ids < 0, self.ids.numel(), ids), ids.clamp(min=0) // TOP_K
        gathered = self.x.index_select(0, tokens)
        hidden, values = self.x.new_empty((used, INTERMEDIATE)), self.x.new_empty((used, HIDDEN))

        def products() -> None:
            ops.contiguous(gathered, self.layer.gate_up, rows, epilogue="swiglu", out=hidden, dependent_launch=True)
            ops.contiguous(hidden, self.layer.down, rows, out=values, dependent_launch="weights_first")

        def whole() -> None:
            torch.index_select(self.x, 0, tokens, out=gathered)
            products()
            self.values.index_copy_(0, slots, values)
            by_slot = self.values[:-1].view(-1, TOP_K, HIDDEN)
            weighted_sum(by_slot, self.ids, self.weights, experts=EXPERTS, expert_map=self.layer.expert_map, out=self.out)

        return whole, products

    def error(self) -> float:
        return sampled_error(self.layer, self.x, self.ids, self.weights, self.out, "exact")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    gate_up = random_weight(EXPERTS, 2 * INTERMEDIATE, HIDDEN, paired=True)
    down = random_weight(EXPERTS, HIDDEN, INTERMEDIATE, paired=False)
    expert_map = torch.full((KNOWN,), -1, dtype=torch.int32, device="cuda")
    expert_map[:EXPERTS] = torch.arange(EXPERTS, dtype=torch.int32, device="cuda")
    layer = MoELayer(gate_up, down, expert_map)
    rows: list[dict[str, float]] = []
    print("| tokens | indexed, us | products alone | contiguous, us | products alone |\n|--|--|--|--|--|")
    for tokens in TOKENS:
        rank = Rank(layer, tokens)
        row: dict[str, float] = {"tokens": tokens}
        for name in ("indexed", "contiguous"):
            whole, products = getattr(rank, name)()
            rank.out.fill_(float("nan"))
            measured = timing.cold(timing.captured(whole), rank.error, limit=LIMIT, samples=20)
            alone = timing.cold(timing.captured(products), lambda error=measured.error: error, limit=LIMIT, samples=20)
            row |= {f"{name}_us": round(measured.us, 1), f"{name}_products_us": round(alone.us, 1), f"{name}_error": measured.error}
        rows.append(row)
        print("|", " | ".join(str(value) for name, value in row.items() if not name.endswith("error")), "|", flush=True)
    if given.out:
        found = {"card": timing.card(), "date": time.strftime("%F"), "commit": given.commit, "command": " ".join(sys.argv), "rows": rows}
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
