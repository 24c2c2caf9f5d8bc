"""`python -m benchmarks.gemm --json FILE`: GEMM beside cuBLAS, as torch calls it, in one loop.

The cells are those of cells.yaml, by default its squares; --fused, --host, --compile, --training
and --operations measure something else instead. The exit code is 3 if a result of Warploom's is
wrong, 4 if one is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Literal

import click
import torch

import warploom
from benchmarks import machine
from benchmarks.cells import Shape, cells, problem, text, trained
from benchmarks.operations import operations
from benchmarks.peers import KINDS, operand_sets, operands, ours, peer
from benchmarks.protocol import (
    Cell,
    Contender,
    Entry,
    Record,
    compete,
    exit_code,
    gemm_floor,
)
from warploom.errors import CompilationError
from warploom.generator.configurations import smoke
from warploom.generator.families.gemm import GemmProblem, Layout
from warploom.generator.launches import NO_GPU
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.generator.workers import Worker
from warploom.runtime.dispatch import choose
from warploom.runtime.measure import Call, Sampler, graph_sampler, interleave

ROOT = Path(__file__).parents[1]
_CALLS = 400  # of one sample of host time


# ---- Products ------------------------------------------------------------------------------------


def compare(
    kind_name: str,
    shape: Shape,
    specs: Sequence[KernelSpec] = (),
    layout_a: Layout = "row",
    layout_b: Layout = "col",
    label: str = "",
) -> Cell:
    """Warploom as dispatched, its peer, and each of `specs` that computes the same."""
    kind = KINDS[kind_name]
    sets = operand_sets(kind, shape, "cuda", layout_a, layout_b)
    operation = kind.operation(layout_a, layout_b)
    fitting = [spec for spec in specs if spec.operation == operation]
    contenders = [
        ours(kind, sets),
        peer(kind, sets),
        *(ours(kind, sets, spec, spec.name) for spec in fitting),
    ]
    about = problem(shape, type=kind_name, layout_a=layout_a, layout_b=layout_b)
    name = label or f"{kind_name} {text(shape)}"
    return compete(name, about, contenders, gemm_floor(*shape, *kind.bits))


def training() -> Iterator[Cell]:
    """Every pair of layouts at 4096 cubed, and the three products of training a linear layer."""
    words: dict[str, Layout] = {"N": "row", "T": "col"}
    for a, b in product(words, words):
        yield compare("bf16", (4096,) * 3, (), words[a], words[b], f"{a}{b} 4096x4096x4096")
    m, n, k = trained()
    # y = x w^T; dx = dy w; dw = dy^T x, with x [m, k], w [n, k] and dy [m, n], all row-major.
    yield compare("bf16", (m, n, k), (), "row", "col", "forward")
    yield compare("bf16", (m, k, n), (), "row", "row", "gradient of the input")
    yield compare("bf16", (n, k, m), (), "col", "row", "gradient of the weight")


def fused(
    shape: Shape,
    device: str = "cuda",
    sampler: Callable[[Sequence[Call]], Sampler] = graph_sampler,
) -> Cell:
    """What scale, bias, gelu and residual cost: fused over plain, and torch.mm beside them."""
    kind, (m, n, _) = KINDS["bf16"], shape
    one = operands(kind, *shape, device)
    listed = (
        ("scale", torch.tensor([0.02], device=device)),
        ("bias", torch.randn(n, device=device).bfloat16()),
        ("activation", "gelu_tanh"),
        ("residual", torch.randn(m, n, device=device).bfloat16(), 1.0),
    )
    contenders = [
        ours(kind, [one], name="fused", listed=listed),
        ours(kind, [one], name="plain"),
        peer(kind, [one]),
    ]
    about = problem(shape, type="bf16", epilogue="scale, bias, gelu_tanh, residual")
    floor = gemm_floor(*shape, *kind.bits)
    return compete("fused epilogue", about, contenders, floor, sampler=sampler)


# ---- Host and compiler ---------------------------------------------------------------------------


def host() -> Cell:
    """Host time of a warm call that is too small to keep the GPU busy."""
    shape = (256, 256, 256)
    one = operands(KINDS["bf16"], *shape, "cuda")
    out = torch.empty(256, 256, dtype=one.a.dtype, device="cuda")
    plan = warploom.plan(one.a, one.b, out=out)
    calls: dict[str, Call] = {
        "warploom.gemm": lambda: warploom.gemm(one.a, one.b),
        "torch.mm": lambda: torch.mm(one.a, one.b),
        "warploom.gemm, out given": lambda: warploom.gemm(one.a, one.b, out=out),
        "torch.mm, out given": lambda: torch.mm(one.a, one.b, out=out),
        "plan, out given": lambda: plan(one.a, one.b, out),
    }
    contenders = [Contender(name, [call]) for name, call in calls.items()]
    return compete(
        "host time of a call", problem(shape), contenders, sampler=host_sampler, rounds=27
    )


def host_sampler(calls: Sequence[Call]) -> Sampler:
    """Return what times the host over many calls, and only then waits for the GPU."""
    (call,) = calls
    call()
    torch.cuda.synchronize()

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        seconds = (time.perf_counter() - begin) / _CALLS
        torch.cuda.synchronize()
        return seconds

    return sample


def compiling(specs: Sequence[KernelSpec], baseline: Path | None) -> list[Cell]:
    """NVRTC's time for each kernel, each time in a fresh process; the baseline is some .cu file."""
    samplers = {spec.name: _compilation(spec.name, render(spec)) for spec in specs}
    if baseline:
        samplers[baseline.name] = _compilation(baseline.stem, baseline.read_text())
    timings = interleave(samplers, rounds=3, discarded=0)

    def entry(contender: str, name: str, kernel: str | None = None) -> Entry:
        return Entry(contender, timings[name].median, timings[name].spread, kernel)

    beside = (entry(baseline.name, baseline.name),) if baseline else ()
    return [
        Cell(
            f"NVRTC {spec.digest[:8]}",
            {"kernel": spec.name},
            (entry("warploom", spec.name, spec.name), *beside),
        )
        for spec in specs
    ]


def _compilation(name: str, source: str) -> Sampler:
    def sample() -> float:
        worker = Worker()
        try:
            return worker.compile(source, name=name, arch=NO_GPU.arch).compile_seconds
        finally:
            worker.stop()

    return sample


def shipped() -> list[KernelSpec]:
    """Every kernel of configs/*/smoke.yaml, and every one that a cell of cells.yaml is given."""
    dispatched = (
        choose(kind.operation(), GemmProblem(m, n, k, k, k, n), "tma", None, NO_GPU).spec
        for kind in KINDS.values()
        for m, n, k in [*cells("squares"), *cells("llm")]
    )
    listed = (spec for path in smoke() for spec in expand_file(path).specs)
    return list(dict.fromkeys((*listed, *dispatched)))


# ---- Command line --------------------------------------------------------------------------------


def _numbers(_context: object, _option: object, value: str) -> list[int]:
    return [int(word) for word in value.split(",") if word]


def _types(_context: object, _option: object, value: str) -> list[str]:
    unknown = [word for word in value.split(",") if word not in KINDS]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: types are {', '.join(KINDS)}")
    return value.split(",")


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--cells", "which", type=click.Choice(["squares", "llm"]), default="squares")
@click.option("--types", default=",".join(KINDS), callback=_types, help="Separated by commas.")
@click.option("--m", default="", callback=_numbers, help="Only these numbers of rows.")
@click.option("--specs", type=_FILE, help="A configuration, whose kernels compete as well.")
@click.option("--fused", "mode", flag_value="fused", help="The cost of an epilogue.")
@click.option("--host", "mode", flag_value="host", help="Host time of a call.")
@click.option("--compile", "mode", flag_value="compile", help="NVRTC's time; needs no GPU.")
@click.option("--training", "mode", flag_value="training", help="All layouts; a layer's training.")
@click.option("--operations", "mode", flag_value="operations", help="Promoted, 8-bit, batched.")
@click.option("--baseline", type=_FILE, help="A .cu file to compile beside the kernels.")
@click.option("--json", "path", type=_FILE, required=True, help="Where the result goes.")
def main(
    which: Literal["squares", "llm"],
    types: list[str],
    m: list[int],
    specs: Path | None,
    mode: str | None,
    baseline: Path | None,
    path: Path,
) -> None:
    """Measure GEMMs beside their peers and record the result as JSON."""
    record = Record(path, f"gemm_{mode or which}", machine.machine())
    if mode != "compile":
        machine.warm()
        record.state(machine.state())
    measured = []
    with torch.no_grad():
        for cell in _measured(mode, which, types, m, specs, baseline):
            record.add(cell)
            measured.append(cell)
            click.echo(str(cell))
    if mode != "compile":
        record.state(machine.state())
    raise SystemExit(exit_code(measured))


def _measured(
    mode: str | None,
    which: Literal["squares", "llm"],
    types: list[str],
    m: list[int],
    specs: Path | None,
    baseline: Path | None,
) -> Iterator[Cell]:
    match mode:
        case "fused":
            yield fused(trained())
        case "host":
            yield host()
        case "training":
            yield from training()
        case "operations":
            yield from operations()
        case "compile":
            yield from compiling(shipped(), baseline)
        case _:
            if specs:
                with suppress(CompilationError):  # where it competes, it is absent
                    warploom.warmup(specs)
            given = expand_file(specs).specs if specs else []
            for kind in types:
                for shape in cells(which, m):
                    yield compare(kind, shape, given)


if __name__ == "__main__":
    main()
