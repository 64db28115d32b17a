# SPDX-License-Identifier: Apache-2.0
"""The `chord` command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from .errors import ChordError, FormatError, UnsupportedError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Quantized Mixture-of-Experts kernels.")
cache_app = typer.Typer(no_args_is_help=True, help="The folder of compiled kernels.")
app.add_typer(cache_app, name="cache")

ShapeOption = Annotated[Optional[str], typer.Option(help="A named shape: kimi-k2-ep8, -ep16, -ep32, -tp8; MXFP8: qwen3-30b, qwen3-235b.")]  # noqa: UP045  typer on 3.10


def _shape(name: str) -> tuple[str, int, int, int]:
    """Weight format, experts, hidden and intermediate size."""
    from .plan import SHIPPED_MXFP8_SHAPES, SHIPPED_SHAPES

    if name in SHIPPED_SHAPES:
        return "w4a16", *SHIPPED_SHAPES[name]
    if name in SHIPPED_MXFP8_SHAPES:
        return "mxfp8", *SHIPPED_MXFP8_SHAPES[name]
    raise FormatError(f"shape {name!r} is not known; give one of {', '.join([*SHIPPED_SHAPES, *SHIPPED_MXFP8_SHAPES])}")


def _console():
    from rich.console import Console

    # Tables keep their columns when the output is a file.
    return Console(width=None if sys.stdout.isatty() else 150)


@app.command()
def doctor() -> None:
    """Explain this machine: versions, GPU, cache, and for each op yes or the reason why not."""
    from rich.table import Table

    from . import doctor as machine

    console = _console()
    found = Table(title="This machine", show_header=False)
    for what, value in machine.facts():
        found.add_row(what, value)
    console.print(found)
    ops = Table("op", "epilogue", "runs here", title="W4A16 ops")
    for row in machine.support():
        ops.add_row(*row)
    console.print(ops)


@app.command()
def run(
    checkpoint: Annotated[Optional[Path], typer.Argument(help="Folder of an INT4 or MXFP8 checkpoint.")] = None,  # noqa: UP045
    shape: ShapeOption = None,
    layer: Annotated[Optional[int], typer.Option(help="Layer of the checkpoint; its first with experts by default.")] = None,  # noqa: UP045
    phase: Annotated[str, typer.Option(help="decode or prefill.")] = "decode",
    tokens: Annotated[Optional[int], typer.Option(help="Tokens; several usual counts by default.")] = None,  # noqa: UP045
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write a result file (GPU only).")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record where there is no git checkout.")] = None,
) -> None:
    """Run one MoE layer, check it against FP64 and time it."""
    from .bench import layer_run, report

    if (checkpoint is None) == (shape is None):
        raise FormatError("give either a checkpoint folder or --shape")
    if phase not in layer_run.TOKENS:
        raise FormatError(f"phase {phase!r} is not known; give one of {', '.join(layer_run.TOKENS)}")
    where = layer_run.pick_device(device)
    title, moe, top_k = (
        layer_run.from_checkpoint(checkpoint, layer, where) if checkpoint else layer_run.from_shape(shape, *_shape(shape), where)
    )
    counts = (tokens,) if tokens is not None else layer_run.TOKENS[phase]
    rows = list(layer_run.run(moe, top_k, counts))
    _console().print(layer_run.table(title, rows, format_name=moe.gate_up.format.name))
    if out and where == "cuda":
        report.write_json(out, report.result_file([row.as_result(title) for row in rows], commit_id=commit))


@app.command()
def plan(
    shape: ShapeOption = "kimi-k2-ep8",
    tokens: Annotated[int, typer.Option(help="Tokens routed to this GPU's experts.")] = 20,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 8,
    contract: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="The op of a row contract (indexed, contiguous, masked); what a layer takes by default."),
    ] = None,
    arch: Annotated[str, typer.Option(help="Architecture to plan for.")] = "sm_90a",
    sm_count: Annotated[int, typer.Option(help="Its SM count.")] = 132,
    as_json: Annotated[bool, typer.Option("--json", help="Every field of the plans instead, one JSON object a line.")] = False,
) -> None:
    """Show which kernels a layer would use, and why."""
    import json

    from .decode_plan import (
        WARP_DECODE_BATCHES,
        WARP_DECODE_PRODUCTS,
        explain_warp_decode,
        warp_decode_plan,
        warp_decodes,
        why_not_warp_decode,
    )
    from .plan import Problem, explain, make_plan
    from .settings import schedule_pins

    format_name, experts, hidden, inter = _shape(shape or "kimi-k2-ep8")
    console = _console()
    if contract is None and warp_decodes(format_name, tokens, top_k, experts, hidden=hidden, sm_count=sm_count):
        part = min(tokens, WARP_DECODE_BATCHES[-1])
        if reason := why_not_warp_decode(arch, format_name, part, top_k, experts, hidden, inter):
            raise UnsupportedError(reason)
        for product in WARP_DECODE_PRODUCTS:
            sizes = {"tokens": part, "top_k": top_k, "experts": experts}
            decode = warp_decode_plan(product, format_name, arch=arch, sm_count=sm_count, hidden=hidden, intermediate=inter, **sizes)
            if as_json:
                print(json.dumps({"stage": product, **decode.describe()}))
                continue
            console.print(f"[bold]{product}[/bold]: {decode.name}")
            for line in explain_warp_decode(decode, **sizes):
                console.print(f"  - {line}")
        return
    if format_name != "w4a16":
        raise UnsupportedError(f"{shape} has MXFP8 weights, which only warp decode computes; leave --contract out")
    for stage, epilogue, n, k in (("gate_up", "swiglu", 2 * inter, hidden), ("down", "store", hidden, inter)):
        problem = Problem(arch, sm_count, contract or "indexed", epilogue, stage == "gate_up", experts, n, k, rows=tokens * top_k)
        chosen = make_plan(problem, schedule_pins())
        if as_json:
            print(json.dumps({"stage": stage, **chosen.describe()}))
            continue
        console.print(f"[bold]{stage}[/bold] N {n} K {k}: {chosen.name}")
        for line in explain(problem, chosen):
            console.print(f"  - {line}")


@app.command()
def compile(
    shape: ShapeOption = None,
    arch: Annotated[str, typer.Option(help="Architecture to compile for; no GPU is needed.")] = "sm_90a",
    report: Annotated[bool, typer.Option(help="Compile anew and show registers and spills instead of filling the cache.")] = False,
) -> None:
    """Prebuild every kernel that a shape (or every shipped shape) needs."""
    from rich.table import Table

    from .jit.compiler import build_all, compile_uncached
    from .plan import ARCHITECTURES, layer_kernels, shipped
    from .progress import progress

    if arch not in ARCHITECTURES:
        raise FormatError(f"architecture {arch!r} has no kernels; give one of {', '.join(ARCHITECTURES)}")
    if shape:
        format_name, experts, hidden, inter = _shape(shape)
        plans = layer_kernels(arch, format_name, experts=experts, hidden=hidden, intermediate=inter)
    else:
        plans = shipped(arch)
    console = _console()
    with progress(f"compiling {len(plans)} kernels", len(plans)) as step:
        if not report:
            build_all(plans, done=lambda _: step())
            console.print(f"{len(plans)} kernels for {arch} are in the cache")
            return
        shown = Table("kernel", "registers", "cubin KiB", "fault", title=f"{len(plans)} kernels for {arch}")
        for each in plans:
            code, built = compile_uncached(each)
            shown.add_row(each.name, str(built.registers), f"{len(code) / 1024:.0f}", built.fault or "-")
            step()
    console.print(shown)


@app.command()
def bench(
    sections: Annotated[
        list[str] | None, typer.Argument(help="Sections such as decode, tp8, masked-ep16, small, warp-decode; all by default.")
    ] = None,
    points: Annotated[Optional[str], typer.Option(help="Only these points, separated by commas.")] = None,  # noqa: UP045
    peer: Annotated[bool, typer.Option(help="Also time humming-kernels in this process.")] = False,
    samples: Annotated[int, typer.Option(help="Timed calls a case.")] = 50,
    out: Annotated[Optional[Path], typer.Option(help="Write a result file.")] = None,  # noqa: UP045
    plot: Annotated[Optional[Path], typer.Option(help="Write a plot of the ratios to the floor.")] = None,  # noqa: UP045
    commit: Annotated[Optional[str], typer.Option(help="Commit to record where there is no git checkout.")] = None,  # noqa: UP045
) -> None:
    """Time the named cases on this GPU, every output checked, against floors and recorded peers."""
    import torch

    from .bench import humming, report, small_batch, warp_decode
    from .bench.suites import all_cases
    from .progress import progress

    if not torch.cuda.is_available():
        raise FormatError("benchmarks need a CUDA GPU and torch sees none; `chord doctor` shows what this machine has")
    if peer and not humming.available():
        raise FormatError("--peer needs humming: pip install humming-kernels")
    cases = all_cases()
    known = [*dict.fromkeys(case.section for case in cases), "small", "warp-decode"]
    wanted = sections or known
    if unknown := [name for name in wanted if name not in known]:
        raise FormatError(f"section {unknown[0]!r} is not known; give one of {', '.join(known)}")
    asked = points.split(",") if points else None
    cases = [case for case in cases if case.section in wanted and (asked is None or str(case.point) in asked)]
    small = list(small_batch.TOKENS) if "small" in wanted else []
    layers = list(warp_decode.cases(asked)) if "warp-decode" in wanted else []
    rows: list[report.Row] = []
    with progress("timing", len(cases) + sum(len(small_batch.TOKENS[name]) for name in small) + len(layers)) as step:

        def keep(row: report.Row) -> None:
            rows.append(row)
            if out:  # as they come: a run that is cut short keeps what it measured
                report.write_json(out, report.result_file(rows, commit_id=commit))
            step()

        report.run_cases(cases, peer=peer, samples=samples, on_row=keep)
        small_batch.run(small, peer=peer, samples=samples, on_row=keep)
        warp_decode.run(layers, peer=peer, samples=samples, on_row=keep)
    _console().print(report.table(rows, str(report.timing.card()["name"])))
    if plot:
        report.plot(rows, plot)


@cache_app.command("show")
def cache_show() -> None:
    """Where compiled kernels are, and how many."""
    from .jit.compiler import cache_entries
    from .settings import cache_dir

    entries = cache_entries()
    print(f"{cache_dir()}: {len(entries)} files, {sum(path.stat().st_size for path in entries) / 2**20:.1f} MiB")


@cache_app.command("clear")
def cache_clear() -> None:
    """Remove every compiled kernel."""
    from .jit.compiler import clear_cache

    print(f"freed {clear_cache() / 2**20:.1f} MiB")


def main() -> None:
    """Errors of this package are one line and exit status 1; anything else is a bug and keeps its traceback."""
    try:
        app()
    except ChordError as error:
        print(f"chord: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
