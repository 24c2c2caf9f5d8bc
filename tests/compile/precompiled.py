"""Kernels compiled as the generator compiles them, in this process, which reads headers once, and
compiles no text twice. What the compiler reported on a text stays in a file beside the test, so
that only texts that changed since are compiled.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from pathlib import Path

from warploom.generator import nvrtc, nvrtc_headers
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.render import render as render_anew
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import Toolchain, find

render = functools.cache(render_anew)
TOGETHER = 8  # kernels of a program: of more, each takes longer again


def headers(spec: KernelSpec) -> str:
    """What a kernel's text has up to its last `#include`."""
    return nvrtc_headers._parted(render(spec))[0]


def together(*specs: KernelSpec) -> str:
    """One text of several kernels, each in a namespace, after the headers that all have."""
    first = headers(specs[0])
    kernels = [render(spec).partition(first)[2] for spec in specs]
    return first + "".join(
        f"namespace kernel{i} {{\n{kernel}}}\n" for i, kernel in enumerate(kernels)
    )


def compiled_together(specs: Sequence[KernelSpec]) -> dict[str, Artifact]:
    """Compile kernels, some of a family to a program: NVRTC takes 0.15 s for any.

    Each has its own entries; the machine code and the warnings are those of its program.
    """
    found: dict[str, Artifact] = {}
    own = [[*some] for _, some in groupby(specs, lambda spec: spec.operation.family)]
    for some in (
        every[at : at + TOGETHER] for every in own for at in range(0, len(every), TOGETHER)
    ):
        program = compiled_text(None, together(*some), name=some[0].name, arch=some[0].arch)
        entries = dict(program.resources)
        for spec in some:
            mine = {
                entry: entries.pop(entry) for entry in [*entries] if entry.startswith(spec.name)
            }
            found[spec.name] = replace(program, name=spec.name, resources=mine)
        assert not entries, "of no kernel's name"
    return found


@dataclass(frozen=True)
class Report:
    """What the compiler says of a kernel's entries; `warnings` and `serialised` as in Artifact."""

    resources: dict[str, Resources]
    warnings: tuple[str, ...]

    @property
    def serialised(self) -> tuple[str, ...]:
        """The warnings that wgmma is serialised."""
        return tuple(line for line in self.warnings if "C75" in line)


def reports(specs: Sequence[KernelSpec], path: Path, *, renew: bool) -> Mapping[str, Report]:
    """Return the report of each kernel, by its name: the one at `path`, where it is of this text.

    Kernels whose text, options or toolchain is another than that of the report are compiled. Of
    more than a few, the file has to be renewed: to compile them all takes longer than a quarter of
    the other tests. With `renew`, the file then has the reports of these kernels.
    """
    keys = {spec.name: _report_key(spec) for spec in specs}
    recorded = json.loads(path.read_text()) if path.is_file() else {}
    known = {name: one for name, one in recorded.items() if one["key"] == keys.get(name)}
    entries = {
        name: Report(
            {entry: Resources(*numbers) for entry, numbers in one["entries"].items()},
            tuple(one["warnings"]),
        )
        for name, one in known.items()
    }
    unknown = [spec for spec in specs if spec.name not in known]
    assert renew or len(unknown) <= TOGETHER, (
        f"{len(unknown)} kernels are not those of {path}: `python -m pytest tests/compile "
        "tests/property/test_compiled.py tests/families/*/test_family.py --update-golden` renews "
        "what the compiler says of them"
    )
    for name, artifact in compiled_together(unknown).items():
        entries[name] = Report(artifact.resources, artifact.warnings)
    if renew:
        content = {
            name: {
                "key": keys[name],
                "warnings": report.warnings,
                "entries": {entry: astuple(one) for entry, one in report.resources.items()},
            }
            for name, report in sorted(entries.items())
        }
        rows = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in content.items())
        path.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return entries


def _report_key(spec: KernelSpec) -> str:
    """The SHA-256 of all that decides a report, in hex."""
    state = (find().identity, find().options(spec.arch), render(spec))
    return hashlib.sha256(repr(state).encode()).hexdigest()


def compiled(spec: KernelSpec) -> Artifact:
    """Compile a kernel in this process, and store it nowhere."""
    return compiled_text(None, render(spec), name=spec.name, arch=spec.arch)


def compiled_text(_worker: object, source: str, *, name: str, arch: str) -> Artifact:
    """In place of the method `compile` of a generator's worker: no process."""
    return _compiled(source, name, arch)


@functools.cache
def _compiled(source: str, name: str, arch: str) -> Artifact:
    return nvrtc.compile(source, name=name, arch=arch, toolchain=_toolchain(), more=True)


class _Unwatched(Toolchain):
    """Whose files nobody changes meanwhile: to look at all of them takes 0.05 s each time."""

    def require_unchanged(self) -> None:
        """Tests of the toolchain say what happens where they are changed."""


@functools.cache
def _toolchain() -> Toolchain:
    found = find()
    return _Unwatched(found.components, found.identity, found.stamps)


def build_many(specs: Sequence[KernelSpec], *_others: object, **_named: object) -> list[Artifact]:
    """In place of the generator's: no process and no store."""
    return [compiled(spec) for spec in specs]
