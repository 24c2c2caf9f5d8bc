"""`warploom.kernel_report`: everything that is known of one kernel, as a page for a browser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from markupsafe import Markup

from warploom.atomic_file import replace_file
from warploom.errors import ConfigurationError
from warploom.generator import gpus, json_file, names, nvrtc, nvrtc_program, rules, toolchain
from warploom.generator.artifact import Resources
from warploom.generator.families import family
from warploom.generator.knob import knobs, types
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.store import Store, source_digest
from warploom.reports import disassembly, instructions, measured, sections, shared_memory
from warploom.reports.cubin import Cubin, Entry
from warploom.reports.disassembly import Instruction
from warploom.reports.instructions import Loop

_NO_TOOL = (
    "nvdisasm was not found in PATH, CUDA_HOME, the wheel or /usr/local/cuda, so the machine code "
    f"is not shown. pip install {disassembly.WHEEL}"
)
LEAST_OF_A_LOOP = 16  # instructions of loops that are shown: shorter ones wait or issue a copy


@dataclass(frozen=True, slots=True)
class Code:
    """The machine code of one entry.

    instructions  none where there is no nvdisasm
    loops         those of LEAST_OF_A_LOOP instructions or more
    same          whether it is byte for byte that of the kernel cache; None: it is not there
    """

    entry: Entry
    resources: Resources
    instructions: Sequence[Instruction] = ()
    loops: Sequence[Loop] = ()
    same: bool | None = None

    @property
    def mixes(self) -> list[tuple[str, dict[str, int]]]:
        """The instruction mix of the whole, then of each loop."""
        every = [("whole kernel", instructions.mix(self.instructions))]
        for one in self.loops:
            first, last = one.lines
            where = f"loop {one.first:04x} to {one.last:04x}, lines {first} to {last}"
            every.append(("  " * one.depth + where, instructions.mix(one.instructions)))
        return every

    @property
    def live(self) -> Markup | None:
        """The figure of live registers."""
        return sections.live_registers(self.instructions, self.loops, self.resources.registers)


@dataclass(frozen=True)
class KernelReport:
    """What is known of one kernel; `html` is the page, and a notebook shows its first part.

    spec      the kernel
    gpu       the GPU kind of the roofline
    source    the emitted CUDA C++
    codes     of each entry
    buffers   of shared memory, by the compiler; `declared` bytes in all
    missing   why there is no machine code to show; empty where there is
    problems  what was measured of the kernel's operation
    """

    spec: KernelSpec
    gpu: gpus.GpuKind
    source: str
    codes: Sequence[Code]
    buffers: Sequence[shared_memory.Buffer]
    declared: int
    missing: str
    problems: Sequence[measured.Problem] = field(repr=False)

    @cached_property
    def html(self) -> str:
        """The whole page: one file, which needs neither a network nor other files."""
        from warploom.reports.page import page

        return page(self)

    def write(self, path: str | Path) -> Path:
        """Write the page to a file, and return its path.

        Raises:
            ConfigurationError: The file cannot be written.
        """
        path = Path(path)
        try:
            replace_file(path, self.html.encode())
        except OSError as error:
            raise ConfigurationError(
                f"The report {path} cannot be written ({json_file.reason(error)})",
                rule="it must be a file in a folder that exists and is writable",
                fix="give another path",
            ) from error
        return path

    def _repr_html_(self) -> str:
        """The facts of the page's first part, for notebooks."""
        from warploom.reports.page import summary

        return summary(self)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch, by the layout."""
        return family(self.spec.operation.family).layout(self.spec).shared_bytes

    @property
    def facts(self) -> dict[str, str]:
        """What is said first."""
        schedule, first = self.spec.schedule, self.codes[0]
        tile = "x".join(map(str, schedule.tile))
        stored = {True: "the same machine code, byte for byte", False: "other machine code"}
        compiled = stored[first.same] if first.same is not None else "not compiled yet"
        most = self.spec.architecture.shared_bytes
        facts = {
            "architecture": f"{self.spec.arch} ({self.spec.architecture.title})",
            "digest": self.spec.digest,
            "tile": f"{tile}, {schedule.threads} threads a CTA",
            "registers": ", ".join(str(one.resources.registers) for one in self.codes)
            + " a thread at launch",
            "spills": f"{sum(one.resources.spill_bytes for one in self.codes)} bytes",
            "shared memory": f"{self.shared_bytes:,} of {most:,} bytes",
            "machine code": f"{sum(len(one.entry.code) for one in self.codes):,} bytes, "
            f"{sum(one.entry.instructions for one in self.codes):,} instructions",
            "kernel cache": compiled,
        }
        if timed := sections.rows(self.spec, self.problems):
            best = min(timed, key=lambda one: one[4])
            facts["measured"] = (
                f"{_shapes(len(timed))}; at best {best[4]:.3f} times the fastest kernel's time"
            )
        return facts

    @property
    def fields(self) -> list[tuple[str, str, str, str, str, bool]]:
        """Each field of operation and schedule: of what, name, value, what it may be, its meaning,
        and whether it is at its default.
        """
        return [
            *_fields("operation", self.spec.operation),
            *_fields("schedule", self.spec.schedule),
        ]

    @property
    def checks(self) -> rules.Checks:
        """The rules of the family, checked once more."""
        with rules.noting() as checks:
            known = family(self.spec.operation.family)
            known.reasons(self.spec.architecture, self.spec.operation, self.spec.schedule)
        return checks

    @property
    def layout(self) -> dict[str, object]:
        """What the family's layout says: bytes, stages, registers."""
        layout = family(self.spec.operation.family).layout(self.spec)
        found: dict[str, object] = {}
        if dataclasses.is_dataclass(layout):
            found = {one.name: getattr(layout, one.name) for one in dataclasses.fields(layout)}
        plain = {
            name: value
            for name, value in found.items()
            if isinstance(value, int | str | tuple) and not isinstance(value, bool)
        }
        return {**plain, "shared_bytes": layout.shared_bytes}


def kernel_report(
    kernel: KernelSpec | str,
    path: str | Path | None = None,
    *,
    gpu: str | None = None,
    journal: str | Path | None = None,
) -> KernelReport:
    """Report one kernel: source next to machine code, registers, shared memory, measured times.

    It compiles the kernel once more, with line information; the kernel cache is not changed. That
    needs no GPU. Machine code needs nvdisasm, of a CUDA toolkit or `pip install
    nvidia-cuda-nvdisasm`; without it the report says so.

    Args:
        kernel: A KernelSpec, or the name that `warploom.explain` and `warploom list` print.
        path: The file of HTML to write; None writes none.
        gpu: The GPU kind of the roofline, such as "H100 SXM"; by default the one of most timings.
        journal: Of `warploom tune`, in place of the tuned configs.

    Returns:
        The report: `html` is the page, `write(path)` a file of it, and a notebook shows its facts.

    Raises:
        UnknownNameError: There is no such kernel or GPU kind.
        ToolchainError, CompilationError: It cannot be compiled here.
        RecordsError: The journal cannot be read.
        ConfigurationError: The file cannot be written.

    Example:
        >>> name = warploom.explain(a, b, gpu="H200").kernel
        >>> warploom.kernel_report(name, "kernel.html")
    """
    spec = parse_name(kernel) if isinstance(kernel, str) else kernel
    problems = measured.problems(spec, Path(journal) if journal else None)
    source = render(spec)
    cubin, resources = _compiled(spec, source)
    codes, missing = _codes(spec, source, cubin, resources)
    read = Cubin(cubin)
    declared, buffers = shared_memory.read(source, read)
    report = KernelReport(
        spec, _kind(spec, gpu, problems), source, codes, buffers, declared, missing, problems
    )
    if path is not None:
        report.write(path)
    return report


def _compiled(spec: KernelSpec, source: str) -> tuple[bytes, Mapping[str, Resources]]:
    """The cubin with line information and the table of shared memory, and what ptxas reported."""
    tools = toolchain.find()
    options = (*tools.options(spec.arch), "-lineinfo", *tools.include_options)
    text = source + shared_memory.probe(source)
    log, cubin = nvrtc_program.compiled(text, _file(spec), options, {})
    return cubin, nvrtc.report(log)[0]


def _file(spec: KernelSpec) -> str:
    """What the source is called in the line information, without `.cu`."""
    return names.file(spec.name, "cu").removesuffix(".cu")


def _codes(
    spec: KernelSpec, source: str, cubin: bytes, resources: Mapping[str, Resources]
) -> tuple[list[Code], str]:
    tool, missing = disassembly.find(), ""
    functions: dict[str, list[Instruction]] = {}
    if tool is None:
        missing = _NO_TOOL
    else:
        try:
            functions = disassembly.disassemble(tool, cubin, f"{_file(spec)}.cu")
        except OSError as error:
            missing = (
                f"nvdisasm could not disassemble the kernel, so its code is not shown: {error}"
            )
    stored = Store.default().find(source_digest(source), spec.arch)
    before = {one.name: one.code for one in Cubin(stored.cubin).entries} if stored else {}
    unknown = Resources(0, 0, 0)
    codes = []
    for entry in Cubin(cubin).entries:
        found = functions.get(entry.name, [])
        same = before[entry.name] == entry.code if entry.name in before else None
        loops = instructions.loops(found, LEAST_OF_A_LOOP)
        codes.append(Code(entry, resources.get(entry.name, unknown), found, loops, same))
    return sorted(codes, key=lambda one: one.entry.name != spec.name), missing


def _kind(spec: KernelSpec, gpu: str | None, problems: Sequence[measured.Problem]) -> gpus.GpuKind:
    """The GPU kind that was named, or the one with most timings of the kernel, or of others."""
    if gpu is not None:
        return gpus.kind(gpus.resolve(gpu, {one.gpu for one in problems}))
    counts = {gpus.DEFAULT.name: (0, 0)}
    for one in problems:
        own, every = counts.get(one.gpu, (0, 0))
        counts[one.gpu] = own + (one.of(spec.schedule) is not None), every + 1
    return gpus.kind(max(counts, key=lambda name: counts[name]))


def _fields(of: str, record: Any) -> list[tuple[str, str, str, str, str, bool]]:  # noqa: ANN401
    said, hints = knobs(type(record)), types(type(record))
    rows = []
    for one in dataclasses.fields(record):
        value, hint = getattr(record, one.name), hints[one.name]
        choices = "yes, no" if hint is bool else ", ".join(map(str, _choices(hint)))
        text = ", ".join(map(_word, value)) if isinstance(value, tuple) else _word(value)
        may = said[one.name].span or choices
        rows.append((of, one.name, text or "none", may, said[one.name].doc, value == one.default))
    return rows


def _shapes(count: int) -> str:
    return f"{count} shape{'s' * (count != 1)}"


def _choices(hint: object) -> tuple[object, ...]:
    """What a Literal may be; nothing of other types."""
    return tuple(one for one in get_args(hint) if isinstance(one, int | str))


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(getattr(value, "token", value))
