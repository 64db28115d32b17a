# SPDX-License-Identifier: Apache-2.0
"""torch's side: opcheck, torch.compile, graph capture, programmatic dependent launch, devices, warm-up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import random_ids, random_weight, write_checkpoint

import chord_kernels as chord
from chord_kernels.decode_plan import warp_decode_plan
from chord_kernels.errors import CompileError, FormatError
from chord_kernels.rows import ContiguousRows, MaskedRows


def test_34_opcheck() -> None:
    weight = random_weight(4, 128, 128, device="cuda")
    x = torch.randn((32, 128), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(32, 4, 1, device="cuda"), 4, 16)
    common = (weight.data, False, "store", "auto", False)
    out = torch.empty((32, 128), dtype=torch.bfloat16, device="cuda")
    indexed = (x, *common, routing.sorted_ids, routing.expert_ids, routing.num_tokens_padded, 1, 16, 32, out)
    torch.library.opcheck(torch.ops.chord_kernels.w4a16_indexed.default, indexed)
    m_indices = torch.arange(32, dtype=torch.int32, device="cuda") // 32
    torch.library.opcheck(torch.ops.chord_kernels.w4a16_contiguous.default, (x, *common, m_indices, 128, out))
    counts = torch.full((4,), 8, dtype=torch.int32, device="cuda")
    torch.library.opcheck(torch.ops.chord_kernels.w4a16_masked.default, (x, *common, counts, 8, out))


def test_34_fullgraph_compile_with_dynamic_tokens() -> None:
    weight = random_weight(4, 128, 128, paired=True, device="cuda")

    def forward(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routing = chord.align_indexed(ids, 4, 16)
        return chord.indexed(x, weight, routing, epilogue="swiglu") * 2

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 17, 1, 0):
        x = torch.randn((tokens, 128), device="cuda").to(torch.bfloat16)
        ids = random_ids(tokens, 4, 2, device="cuda")
        assert torch.equal(compiled(x, ids), forward(x, ids))


def test_compile_during_capture_names_the_plan() -> None:
    from chord_kernels.jit import launch

    weight = random_weight(2, 64, 192, device="cuda")
    x = torch.randn((4, 192), device="cuda").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(4, 2, 1, device="cuda"), 2, 8)
    saved = dict(launch._loaded)
    launch._loaded.clear()
    try:
        with pytest.raises(CompileError, match=r"_indexed_store_exact_r8.*warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            chord.indexed(x, weight, routing)
    finally:
        launch._loaded.update(saved)


@pytest.mark.parametrize("contract", ["indexed", "contiguous", "masked"])
def test_capture_and_replay(contract: str) -> None:
    weight = random_weight(4, 256, 256, device="cuda")
    x = torch.randn((512, 256), device="cuda").to(torch.bfloat16)
    routing = {
        "indexed": chord.align_indexed(random_ids(512, 4, 1, device="cuda"), 4, 64),
        "contiguous": ContiguousRows((torch.arange(512, device="cuda") // 128).to(torch.int32)),
        "masked": MaskedRows(torch.full((4,), 100, dtype=torch.int32, device="cuda"), 100),
    }[contract]
    op = getattr(chord, contract)
    out = torch.zeros((512, 256), dtype=torch.bfloat16, device="cuda")
    op(x, weight, routing, out=out)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(x, weight, routing, out=out)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


class _Drawn:
    """Far more units of work than there are SMs, so that CTAs draw most of theirs. Every call fills `out` anew and compares it on its own
    stream, so that a launch that took another's work is seen even if a later one is right."""

    def __init__(self, kind: str, seed: int) -> None:
        self.compute = self._product(seed) if kind == "indexed" else self._layer(seed)
        self.right = self.compute(None)
        self.out = torch.empty_like(self.right)
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def _product(self, seed: int) -> Callable[[torch.Tensor | None], torch.Tensor]:
        weight = random_weight(16, 4096, 512, device="cuda", seed=seed)
        x = torch.randn((16 * 24, 512), device="cuda").to(torch.bfloat16)
        routing = chord.align_indexed(random_ids(16 * 24, 16, 1, device="cuda", seed=seed), 16, 32)
        return lambda out: chord.indexed(x, weight, routing, out=out)

    def _layer(self, seed: int) -> Callable[[torch.Tensor | None], torch.Tensor]:
        pair = random_weight(128, 3072, 256, paired=True, device="cuda", seed=seed), random_weight(128, 256, 1536, device="cuda", seed=seed)
        x, ids = torch.randn((64, 256), device="cuda").to(torch.bfloat16), random_ids(64, 128, 8, device="cuda", seed=seed)
        sizes = {"tokens": 64, "top_k": 8, "experts": 128, "hidden": 256, "intermediate": 1536}
        assert warp_decode_plan("gate_up", "w4a16", arch="sm_90a", sm_count=132, **sizes).draws
        return lambda out: chord.warp_decode(x, *pair, ids, torch.ones((64, 8), device="cuda"), out=out)

    def call(self) -> None:
        self.out.fill_(float("nan"))
        self.compute(self.out)
        self.wrong += (self.out != self.right).sum()


KINDS = pytest.mark.parametrize("kind", ["indexed", "warp_decode"])


@KINDS
def test_launches_on_several_streams_draw_apart(kind: str) -> None:
    cases = [_Drawn(kind, seed) for seed in range(3)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(20):
        for case, stream in zip(cases, streams, strict=True):
            with torch.cuda.stream(stream):
                case.call()
    torch.cuda.synchronize()
    assert [int(case.wrong) for case in cases] == [0, 0, 0]


@KINDS
def test_graphs_of_one_stream_draw_apart_on_others(kind: str) -> None:
    """Captured on the same stream, replayed side by side, and beside a call outside any graph."""
    cases = [_Drawn(kind, seed) for seed in range(3)]
    graphs = []
    for case in cases[:2]:
        case.call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.call()
            case.call()
        graphs.append((graph, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        cases[2].call()
    torch.cuda.synchronize()
    assert [int(case.wrong) for case in cases] == [0, 0, 0]


@pytest.mark.parametrize("dependence", [True, "weights_first"])
@pytest.mark.parametrize("kernel", ["tile", "stream"])
@pytest.mark.parametrize("block_rows", [8, 64])
def test_dependent_launches_see_each_others_results(
    dependence: bool | str, kernel: str, block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long chains of dependent launches, each reading what the one before wrote."""
    monkeypatch.setenv("CHORD_W4A16_KERNEL", kernel)
    weight = random_weight(1, 256, 256, device="cuda")
    routing = chord.align_indexed(torch.zeros((64, 1), dtype=torch.int32, device="cuda"), 1, block_rows)
    start = torch.randn((64, 256), device="cuda").to(torch.bfloat16)

    def chain(dependent: bool | str) -> torch.Tensor:
        x = start
        for _ in range(40):
            x = chord.indexed(x, weight, routing, dependent_launch=dependent)
        return x

    expected = chain(False)
    for _ in range(5):
        assert torch.equal(chain(dependence), expected)


def test_the_tensors_device_is_used() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    weight = random_weight(2, 64, 64, device="cuda:1")
    x = torch.randn((4, 64), device="cuda:1").to(torch.bfloat16)
    routing = chord.align_indexed(random_ids(4, 2, 1, device="cuda:1"), 2, 8)
    assert torch.cuda.current_device() == 0
    out = chord.indexed(x, weight, routing)
    assert out.device.index == 1
    assert torch.cuda.current_device() == 0
    expected = chord.indexed(x.to("cuda:0"), weight.to("cuda:0"), chord.align_indexed(random_ids(4, 2, 1).to("cuda:0"), 2, 8))
    both = chord.indexed(x, weight, chord.align_indexed(random_ids(4, 2, 1).to("cuda:1"), 2, 8))
    assert torch.equal(expected.cpu(), both.cpu())
    gate_up = random_weight(8, 256, 384, paired=True, device="cuda:1")
    assert chord.MoELayer(gate_up, random_weight(8, 384, 128, device="cuda:1")).warmup() > 0
    assert torch.cuda.current_device() == 0
    with pytest.raises(FormatError, match="one device"):
        chord.indexed(x.to("cuda:0"), weight, routing)


def test_warmup_loads_what_every_batch_needs() -> None:
    from chord_kernels.jit import launch

    gate_up = random_weight(8, 256, 384, paired=True, device="cuda")
    layer = chord.MoELayer(gate_up, random_weight(8, 384, 128, device="cuda", seed=1))
    assert layer.warmup() > 0
    before = len(launch._loaded)
    for tokens in (1, 3, 20, 100, 700):
        layer(
            torch.randn((tokens, 384), device="cuda").to(torch.bfloat16),
            random_ids(tokens, 8, 2, device="cuda"),
            torch.rand((tokens, 2), device="cuda"),
        )
    assert len(launch._loaded) == before


def test_26_kernels_are_for_the_architecture_of_the_device() -> None:
    from chord_kernels.ops import device_arch
    from chord_kernels.plan import ARCHITECTURES

    arch, sm_count = device_arch(0)
    assert arch in ARCHITECTURES
    assert sm_count == torch.cuda.get_device_properties(0).multi_processor_count


def test_a_checkpoint_layer_on_the_gpu(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, layers=1, experts=8, hidden=512, inter=256)
    from chord_kernels.bench import layer_run

    _, layer, top_k = layer_run.from_checkpoint(tmp_path, None, "cuda")
    for row in layer_run.run(layer, top_k, (1, 20, 300)):
        assert row.error < layer_run.ERROR_LIMIT
