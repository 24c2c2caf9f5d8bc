"""The figures of a report that show measurements and registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields

from markupsafe import Markup

from warploom.generator.families import family
from warploom.generator.gpus import GpuKind
from warploom.generator.shapes import Work
from warploom.generator.specification import KernelSpec
from warploom.reports.disassembly import Instruction
from warploom.reports.figures import Axis, Figure, Mark, nice, powers
from warploom.reports.instructions import Loop, class_of
from warploom.reports.measured import Problem, Timing

_PIXELS = 1080  # steps of the line of live registers that can be told apart
_LETTERS = 175  # of the texts below a figure, side by side


def live_registers(
    instructions: Sequence[Instruction], loops: Sequence[Loop], launched: int
) -> Markup | None:
    """Draw how many registers are live along the code; None where nvdisasm did not tell.

    Args:
        instructions: Of one function.
        loops: Its loops, which are shaded.
        launched: Registers that a thread is launched with, by ptxas.
    """
    known = [(one.address, one.live) for one in instructions if one.live is not None]
    if not known:
        return None
    most = max(live for _, live in known)
    top = max(most, launched) * 1.1 + 1
    end = max(instructions[-1].address, 1)
    x = Axis("address in the code", 0, end, _addresses(end))
    y = Axis("live registers", 0, top, [(at, f"{at:.0f}") for at in nice(0, top, 4)])
    figure = Figure(f"Live registers along the code: at most {most}", x, y, height=220)
    for loop in loops:
        if loop.depth == 0:
            figure.band(loop.first, loop.last, f"loop {loop.first:#x} to {loop.last:#x}")
    step = max(1, len(known) // _PIXELS)
    points = [
        (known[i][0], float(max(live for _, live in known[i : i + step])))
        for i in range(0, len(known), step)
    ]
    figure.line(points, "live")
    if launched:
        figure.line([(0, launched), (end, launched)], "limit")
        figure.label(end, launched, f"{launched} registers at launch", "end")
    tensor = [one for one in instructions if class_of(one.opcode) == "tensor core"]
    figure.marks([Mark(one.address, 0, "tensor", one.text) for one in tensor], 2.5)
    return figure.svg()


def roofline(spec: KernelSpec, problems: Sequence[Problem], gpu: GpuKind) -> Markup | None:
    """Draw what a GPU kind sustains, and what was measured on it; None of a family without work.

    A filled point is this kernel's, a ring the fastest other schedule of the same operation.
    """
    placed = [(one, _work(spec, one)) for one in problems if one.gpu == gpu.name]
    known = [(problem, work) for problem, work in placed if work is not None]
    smallest = _smallest(spec)
    if smallest is None:
        return None
    if not smallest.flops:
        return _bandwidth(spec, known, gpu)
    bits = smallest.bits
    peak, bandwidth = gpu.flops.get(bits, gpu.flops[16]), gpu.bytes_per_second
    ridge = peak / bandwidth
    intensities = [work.flops / work.bytes for _, work in known]
    low = min([1.0, *intensities])
    x_ticks, x_high = powers(low, max([1e4, *intensities])), max([1e4, *intensities])
    y_low = min([peak / 1e3, *(_rate(work, problem.timings[0]) for problem, work in known)]) * 0.8
    y_ticks = [one for one in powers(y_low, peak) if y_low <= one <= peak * 1.6]
    x = Axis(
        "FLOP per byte of memory (operands read once, results written once)",
        x_ticks[0], x_high, [(one, f"{one:g}") for one in x_ticks if one <= x_high], log=True,
    )  # fmt: skip
    y = Axis("TFLOP/s", y_low, peak * 1.6, [(one, f"{one / 1e12:g}") for one in y_ticks], log=True)
    figure = Figure(f"Roofline of {gpu.name}", x, y, height=320)
    left = max(x_ticks[0], y_low / bandwidth)
    figure.line([(left, left * bandwidth), (ridge, peak), (x_high, peak)], "roof")
    figure.label(ridge, peak, f"{peak / 1e12:.0f} TFLOP/s, operands of {bits} bits", "end")
    figure.label(left * 1.1, left * bandwidth * 1.6, f"{bandwidth / 1e12:.2f} TB/s")
    others, own = [], []
    for problem, work in known:
        at = work.flops / work.bytes
        mine, best = problem.of(spec.schedule), problem.timings[0]
        if mine:
            own.append(Mark(at, _rate(work, mine), "mark0", _says(problem, mine, work)))
        if best is not mine:
            others.append(Mark(at, _rate(work, best), "ring", _says(problem, best, work)))
    figure.marks(others)
    figure.marks(own, 5)
    return figure.svg()


def _bandwidth(
    spec: KernelSpec, known: Sequence[tuple[Problem, Work]], gpu: GpuKind
) -> Markup | None:
    """Of a kernel without tensor core: bytes moved a second, by bytes moved."""
    sizes = [work.bytes for _, work in known] or [1e6, 1e9]
    ticks = powers(min(sizes), max(sizes) * 1.01)
    top = gpu.bytes_per_second * 1.15
    x = Axis("bytes moved", ticks[0], ticks[-1], [(one, f"{one:.0e}") for one in ticks], log=True)
    y = Axis("TB/s", 0, top, [(one, f"{one / 1e12:g}") for one in nice(0, top, 5)])
    figure = Figure(f"Memory bandwidth of {gpu.name}", x, y, height=260)
    figure.line([(ticks[0], gpu.bytes_per_second), (ticks[-1], gpu.bytes_per_second)], "roof")
    figure.label(
        ticks[-1], gpu.bytes_per_second, f"{gpu.bytes_per_second / 1e12:.2f} TB/s sustained", "end"
    )
    for problem, work in known:
        for one in problem.timings[:1] + ((found,) if (found := problem.of(spec.schedule)) else ()):
            mine = one.schedule == spec.schedule
            says = f"{problem.shape}: {one.seconds * 1e6:.1f} us"
            mark = Mark(work.bytes, work.bytes / one.seconds, "mark0" if mine else "ring", says)
            figure.marks([mark], 5 if mine else 4)
    return figure.svg()


def scatter(spec: KernelSpec, problems: Sequence[Problem], gpu: GpuKind) -> Markup | None:
    """Draw all that was timed of the operation, relative to the fastest schedule of each shape.

    None where nothing was timed on this GPU kind.
    """
    shown = [one for one in problems if one.gpu == gpu.name]
    if not shown:
        return None
    worst = max(one.timings[-1].seconds / one.timings[0].seconds for one in shown)
    high = min(4.0, max(1.2, worst * 1.05))
    texts = max(1, _LETTERS // (max(len(str(one.shape)) for one in shown) + 3))
    every = -(-len(shown) // texts)
    x = Axis(
        "shapes that were tuned, in the order of their sizes", -0.5, len(shown) - 0.5,
        [(i, str(one.shape)) for i, one in enumerate(shown) if i % every == 0],
    )  # fmt: skip
    y = Axis("time / fastest", 0.97, high, [(one, f"{one:g}") for one in nice(1, high, 5)])
    figure = Figure("Times of schedules, relative to the fastest of each shape", x, y, height=260)
    own: list[Mark] = []
    others: list[Mark] = []
    for i, problem in enumerate(shown):
        best = problem.timings[0].seconds
        for one in problem.timings:
            mine, ratio = one.schedule == spec.schedule, one.seconds / best
            name = KernelSpec(spec.arch, spec.operation, one.schedule).name
            says = (
                f"{problem.shape}: {one.seconds * 1e6:.1f} us, {ratio:.3f} of the fastest\n{name}"
            )
            mark = Mark(i, min(ratio, high), "mark0" if mine else "ring", says)
            (own if mine else others).append(mark)
    figure.marks(others, 3)
    figure.marks(own, 4.5)
    return figure.svg()


def rows(
    spec: KernelSpec, problems: Sequence[Problem]
) -> list[tuple[str, str, float, float | None, float, str]]:
    """Return what was measured of this kernel, the shapes with most to do first.

    GPU, shape, microseconds, TFLOP/s (None without tensor core), time over the fastest, date.
    """
    found = []
    for problem in problems:
        mine, work = problem.of(spec.schedule), _work(spec, problem)
        if mine:
            rate = _rate(work, mine) / 1e12 if work and work.flops else None
            ratio = mine.seconds / problem.timings[0].seconds
            told = (problem.gpu, str(problem.shape), mine.seconds * 1e6, rate, ratio)
            found.append((*told, mine.measured[:10]))
    return sorted(found, key=lambda one: -one[2])


def _work(spec: KernelSpec, problem: Problem) -> Work | None:
    return family(spec.operation.family).work(spec.operation, problem.shape)


def _addresses(end: int) -> list[tuple[float, str]]:
    """Ticks of addresses: multiples of a power of two, in hexadecimal."""
    step = 1 << max(4, (end // 8).bit_length())
    return [(at, f"{at:x}") for at in range(0, end + 1, step)]


def _smallest(spec: KernelSpec) -> Work | None:
    """The work of a shape whose every size is 1, which says what there is to count."""
    described = family(spec.operation.family)
    sizes = [one for one in fields(described.shape) if one.default is MISSING]
    return described.work(spec.operation, described.shape(*[1] * len(sizes)))


def _rate(work: Work, timing: Timing) -> float:
    return work.flops / timing.seconds


def _says(problem: Problem, timing: Timing, work: Work) -> str:
    rate = _rate(work, timing) / 1e12
    return f"{problem.shape}: {timing.seconds * 1e6:.1f} us, {rate:.0f} TFLOP/s"
