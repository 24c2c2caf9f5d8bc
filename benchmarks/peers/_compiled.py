"""NVRTC's time for kernels, each time in a fresh process; it needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.families import Case
from benchmarks.samplers import said
from warploom.generator.configurations import smoke
from warploom.generator.launches import NO_GPU
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.generator.workers import Worker
from warploom.runtime.contest import Contender


def compiling(specs: Sequence[KernelSpec], baseline: Path | None) -> Iterator[Case]:
    """Each of these and of every smoke.yaml's kernels, beside the baseline: some .cu file."""
    beside = []
    if baseline:
        source = baseline.read_text()
        beside = [Contender(baseline.name, [partial(_seconds, baseline.stem, source)])]
    small = (spec for path in smoke() for spec in expand_file(path).specs)
    for spec in dict.fromkeys((*small, *specs)):
        calls = [partial(_seconds, spec.name, render(spec))]
        ours = Contender("warploom", calls, told=partial(_told, spec))
        yield Case(
            f"NVRTC {spec.digest[:8]}",
            {"kernel": spec.name},
            None,
            partial(_contenders, [ours, *beside]),
            said,
            rounds=3,
            discarded=0,
            gpu=False,
        )


def _contenders(made: list[Contender], _asked: object) -> list[Contender]:
    return made


def _told(spec: KernelSpec) -> tuple[str, str]:
    return spec.name, ""


def _seconds(name: str, source: str) -> float:
    worker = Worker()
    try:
        return worker.compile(source, name=name, arch=NO_GPU.arch).compile_seconds
    finally:
        worker.stop()
