# SPDX-License-Identifier: Apache-2.0
"""Plans: legal for every shape that a user can bring, or refused with a reason."""

from __future__ import annotations

import itertools

import pytest

from chord_kernels.errors import UnsupportedError
from chord_kernels.kernels import BLOCK_ROWS, StreamPlan, TilePlan, smem_limit
from chord_kernels.plan import (
    ARCHITECTURES,
    CONTRACTS,
    NEVER_RUN,
    SHIPPED_SHAPES,
    Problem,
    block_rows_for,
    buckets,
    explain,
    make_plan,
    shipped,
    why_not,
)

ROWS = (0, 1, 7, 48, 160, 400, 1024, 5000, 131_072)


def problem(**changes: object) -> Problem:
    base = {
        "arch": "sm_90a",
        "sm_count": 132,
        "contract": "indexed",
        "epilogue": "store",
        "paired": False,
        "experts": 48,
        "n": 4096,
        "k": 7168,
        "rows": 160,
    }
    return Problem(**(base | changes))


@pytest.mark.parametrize("contract", ["indexed", "contiguous", "masked"])
@pytest.mark.parametrize("experts", [1, 8, 48, 384, 896])
def test_every_legal_problem_has_a_legal_plan(contract: str, experts: int) -> None:
    """HAZARDS 14, 25: SM count, batch, model shape, TP and EP."""
    shapes = itertools.product((64, 192, 512, 4096, 7168), (64, 192, 256, 448, 2048, 7168), ROWS, (66, 114, 132), ("auto", "bf16", "exact"))
    for n, k, rows, sm_count, numerics in shapes:
        for paired, epilogue in ((False, "store"), (True, "store"), (True, "swiglu")):
            asked = problem(
                contract=contract,
                experts=experts,
                n=n,
                k=k,
                rows=rows,
                sm_count=sm_count,
                numerics=numerics,
                paired=paired,
                epilogue=epilogue,
            )
            assert why_not(asked) is None
            plan = make_plan(asked)
            assert plan.why_illegal() is None
            assert plan.smem_bytes <= smem_limit(plan.ctas)
            if isinstance(plan, TilePlan):
                groups = plan.threads // 128 - 1
                owned = 65536 // plan.ctas // plan.threads // 8 * 8 * plan.threads
                assert 128 * (plan.consumer_registers * groups + plan.producer_registers) <= owned
                assert k // 64 % plan.k_tiles == 0
                assert plan.least_width >= plan.width_step
                assert (plan.block_rows - plan.least_width) % plan.width_step == 0
            else:
                assert plan.threads <= 1024
                assert plan.block_rows <= 16
                assert k <= 256 or min(experts, rows) * n // 64 <= 2 * sm_count
            if numerics != "auto":
                assert plan.numerics == numerics


def test_warm_up_covers_every_batch() -> None:
    for experts, hidden, inter in SHIPPED_SHAPES.values():
        built = {plan.name for plan in buckets(arch="sm_90a", experts=experts, hidden=hidden, intermediate=inter)}
        for contract, rows in itertools.product(("indexed", "contiguous", "masked"), range(0, 200 * experts, 7)):
            for epilogue, paired, n, k in (
                ("swiglu", True, 2 * inter, hidden),
                ("store", True, 2 * inter, hidden),
                ("store", False, hidden, inter),
            ):
                plan = make_plan(problem(contract=contract, epilogue=epilogue, paired=paired, experts=experts, n=n, k=k, rows=rows))
                assert plan.name in built


def test_names_are_unique() -> None:
    plans = {
        make_plan(asked)
        for contract in CONTRACTS
        for block in BLOCK_ROWS
        for k in (128, 192, 256, 512, 2048, 7168)
        for rows in (1, 48 * 8, 48 * 50, 48 * 200)
        if why_not(asked := problem(contract=contract, block_rows=block, n=512, k=k, rows=rows)) is None
    }
    assert len({plan.name for plan in plans}) == len(plans)


def test_short_pieces_of_large_blocks_are_shared_out_among_more_warpgroups() -> None:
    """While one stores, others multiply. 128 rows do not leave the registers for it."""
    for block, k, groups in ((32, 7168, 4), (64, 7168, 2), (64, 512, 2), (64, 256, 4), (96, 512, 2), (96, 256, 4), (128, 256, 2)):
        plan = make_plan(problem(block_rows=block, k=k, rows=48 * block))
        assert (plan.consumer_groups, plan.panel_tiles) == (groups, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "sm_80"}, "architecture sm_80 has no kernel"),
        ({"arch": "sm_75"}, "sm_75"),
        ({"arch": "sm_120a"}, "sm_120a"),
        ({"arch": "sm_90"}, "sm_90 has no kernel"),
        ({"contract": "ragged"}, "'ragged'"),
        ({"epilogue": "gelu"}, "'gelu' is not computed"),
        ({"epilogue": "swiglu"}, "gate_up=True"),
        ({"numerics": "fp8"}, "'fp8'"),
        ({"n": 96}, "N = 96"),
        ({"k": 96}, "K = 96"),
        ({"k": 672}, "K = 672"),
        ({"experts": 0}, "0 experts"),
        ({"rows": 2**31}, "32 bits"),
        ({"block_rows": 48}, "blocks of 48 rows"),
        ({"block_rows": 64, "numerics": "exact"}, "exact numerics with blocks of 64"),
        ({"contract": "contiguous", "alignment": 100}, "alignment of 100"),
        ({"contract": "contiguous", "alignment": 16, "block_rows": 32}, "alignment of 16 with blocks of 32"),
    ],
)
def test_what_is_not_computed_is_refused_with_its_reason(changes: dict, message: str) -> None:
    """HAZARDS 24, 26, 29."""
    with pytest.raises(UnsupportedError, match=message):
        make_plan(problem(**changes))


@pytest.mark.parametrize(
    ("pins", "field", "value"),
    [
        ({"stages": 3}, "stages", 3),
        ({"stage_k": 128}, "k_tiles", 2),
        ({"panel_rows": 128}, "row_tiles", 1),
        ({"block_rows": 64}, "block_rows", 64),
        ({"kernel": "stream", "stages": 3}, "stages", 3),
    ],
)
def test_pins_override_the_choice(pins: dict, field: str, value: int) -> None:
    assert getattr(make_plan(problem(), pins), field) == value


def test_the_stream_kernel_is_pinned_only_where_it_computes_the_problem() -> None:
    assert isinstance(make_plan(problem(), {"kernel": "stream"}), StreamPlan)
    assert isinstance(make_plan(problem(k=256), {"kernel": "tile"}), TilePlan)
    assert isinstance(make_plan(problem(rows=50_000), {"kernel": "stream"}), TilePlan)


def test_the_stream_kernel_has_what_the_tile_kernel_would_waste() -> None:
    for changes, stream in (
        ({}, False),
        ({"k": 256}, True),  # a piece is over before four warpgroups are under way
        ({"k": 256, "numerics": "bf16"}, False),
        ({"k": 256, "rows": 48 * 30}, False),
        ({"experts": 384, "n": 512, "rows": 32}, True),  # two tiles an SM
        ({"experts": 384, "n": 512, "rows": 40}, False),
        ({"experts": 384, "n": 512, "rows": 32, "block_rows": 16}, False),
    ):
        asked = problem(**changes)
        plan = make_plan(asked)
        assert isinstance(plan, StreamPlan) == stream
        assert ("stream kernel" in explain(asked, plan)[1]) == stream


def test_exact_numerics_wherever_they_are_free() -> None:
    chosen = {rows: make_plan(problem(rows=48 * rows)).numerics for rows in (1, 3, 8, 16, 17, 40, 200)}
    assert chosen == {1: "exact", 3: "exact", 8: "exact", 16: "exact", 17: "bf16", 40: "bf16", 200: "bf16"}


@pytest.mark.parametrize("arch", NEVER_RUN)
def test_blackwell_has_the_stream_kernel_for_every_shape(arch: str) -> None:
    for contract, n, k, rows in itertools.product(("indexed", "contiguous", "masked"), (64, 192, 7168), (64, 448, 7168), ROWS):
        asked = problem(arch=arch, sm_count=148, contract=contract, n=n, k=k, rows=rows)
        plan = make_plan(asked)
        assert isinstance(plan, StreamPlan)
        assert plan.why_illegal() is None
        assert plan.smem_bytes <= smem_limit(plan.ctas)
        assert "compiled, never run" in " ".join(explain(asked, plan))
    built = {plan.name for plan in shipped(arch)}
    assert {make_plan(problem(arch=arch, contract=c)).name for c in ("indexed", "contiguous", "masked")} <= built
    with pytest.raises(UnsupportedError, match="align the routing to one of 8, 16"):
        make_plan(problem(arch=arch, block_rows=64))
    assert block_rows_for(100.0, arch) == 16
    assert set(NEVER_RUN) < set(ARCHITECTURES)


def test_pins_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bytes of shared memory"):
        make_plan(problem(rows=50_000), {"stages": 8})


def test_blocks_widen_with_the_rows() -> None:
    chosen = [block_rows_for(rows / 10) for rows in range(5000)]
    assert chosen[:1281] == sorted(chosen[:1281])
    assert set(chosen) == set(BLOCK_ROWS)
    assert [block_rows_for(rows) for rows in (128, 170, 192, 193)] == [128, 96, 96, 128]  # two blocks of 96 for two of 128


def test_token_widths_are_fine_where_blocks_are_mostly_full() -> None:
    def widths(rows_per_expert: float, **fixed: int) -> tuple[int, ...]:
        plan = make_plan(problem(rows=int(48 * rows_per_expert), **fixed))
        return tuple(range(plan.least_width, plan.block_rows + 1, plan.width_step))

    assert widths(43) == (40, 48, 56, 64)
    assert widths(85) == widths(128) == (80, 96, 112, 128)
    assert widths(171) == (48, 64, 80, 96)
    assert widths(341) == widths(43, block_rows=128) == (32, 64, 96, 128)
    assert widths(171, block_rows=64) == (16, 32, 48, 64)
    assert widths(20) == (8, 16, 24, 32)
    assert widths(2, block_rows=16) == (8, 16)


def test_a_contiguous_block_never_crosses_an_alignment() -> None:
    for alignment in (8, 16, 64, 128, 192, 256):
        for rows in (48, 48 * 500):
            plan = make_plan(problem(contract="contiguous", alignment=alignment, rows=rows))
            assert alignment % plan.block_rows == 0


def test_explanations_state_the_numbers() -> None:
    asked = problem()
    text = " ".join(explain(asked, make_plan(asked)))
    assert "3.3 rows an expert" in text
    assert "132 SMs" in text
