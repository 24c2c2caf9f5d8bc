"""Every kernel of configs/*/smoke.yaml compiles for real, without a spill or a serialised wgmma.

What the compiler said of them is in test_smoke.json: kernels whose text is another are compiled.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
from goldens import SPECS
from precompiled import (
    Report,
    compiled,
    compiled_text,
    headers,
    render,
    reports,
    together,
)

from warploom.cli.show import nvcc_command
from warploom.generator import nvrtc, nvrtc_headers, nvrtc_program
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import find

REPORTS = Path(__file__).with_suffix(".json")
FUSED = {name: spec for name, spec in SPECS.items() if getattr(spec.operation, "epilogue", ())}
LONGEST = max(FUSED.values(), key=lambda spec: len(spec.name))
FAMILIES = sorted({spec.operation.family for spec in SPECS.values()})


def of_family(family: str) -> KernelSpec:
    return next(spec for spec in SPECS.values() if spec.operation.family == family)


@cache
def shortest(family: str) -> KernelSpec:
    """The kernel of a family whose text takes least time."""
    own = [spec for spec in SPECS.values() if spec.operation.family == family]
    return min(own, key=lambda spec: len(render(spec)))


@pytest.fixture(scope="module")
def reported(request: pytest.FixtureRequest) -> Mapping[str, Report]:
    """What the compiler says of each kernel, by its name."""
    return reports([*SPECS.values()], REPORTS, renew=request.config.getoption("--update-golden"))


def test_kernels_have_their_entries_and_neither_spill_nor_serialise_nor_warn(
    reported: Mapping[str, Report],
) -> None:
    for name, spec in SPECS.items():
        report, schedule = reported[name], cast("Any", spec.schedule)
        assert name in report.resources
        spills = {(one.spill_bytes, one.local_bytes) for one in report.resources.values()}
        assert (spills, report.serialised, report.warnings) == ({(0, 0)}, (), ()), name
        # What a thread may have, and what setmaxnreg shares out: in eights, of 65,536 by threads.
        assert report.resources[name].registers <= min(255, 65_536 // schedule.threads // 8 * 8)


def test_the_head_of_a_kernel_gives_the_registers_that_a_thread_has(
    reported: Mapping[str, Report],
) -> None:
    pattern = re.compile(r"^// Registers per thread: (at most )?(\d+)", re.M)
    told = {name: pattern.search(render(spec)) for name, spec in SPECS.items()}
    for name, found in told.items():
        registers = reported[name].resources[name].registers
        if found:
            assert registers <= int(found[2]) if found[1] else registers == int(found[2]), name
    assert sum(map(bool, told.values())) > len(SPECS) // 2


def test_every_kernel_has_the_same_headers_and_defines_no_macro() -> None:
    """So that a process reads them once, and a program of several has each as it is by itself."""
    first = headers(next(iter(SPECS.values())))
    for spec in SPECS.values():
        before, same, kernel = render(spec).partition(first)
        assert same and "#" not in before
        marked = [line for line in kernel.splitlines() if line.lstrip().startswith("#")]
        assert all(line.lstrip().startswith("#pragma unroll") for line in marked)


def test_headers_that_were_read_before_make_no_other_kernel(
    reported: Mapping[str, Report],
) -> None:
    """Of some families: what takes least time of each is compiled with the others."""
    first, *_ = each = [shortest(family) for family in FAMILIES[::4]]
    compiled(first)  # which is where they are read
    text, name = together(*each), "kernels"
    found = compiled_text(None, text, name=name, arch=first.arch)
    assert None not in nvrtc_headers._files.values(), "NVRTC takes these headers"
    for spec in each:  # what is reported is what the compiler says here and now
        own = {entry: one for entry, one in found.resources.items() if entry.startswith(spec.name)}
        assert reported[spec.name].resources == own
        assert reported[spec.name].serialised == found.serialised
    options = (*find().options(first.arch), *find().include_options)
    log, cubin = nvrtc_program.compiled(text, name, options, {})
    assert found.cubin == cubin
    assert (found.resources, found.warnings) == nvrtc.report(log)


def test_an_emitted_kernel_is_of_a_length_that_a_person_reads() -> None:
    for name, spec in SPECS.items():
        _, _, body = render(spec).partition("#if defined")  # behind the head, which explains it
        assert len(body.splitlines()) < most_lines(spec), name


def most_lines(spec: KernelSpec) -> int:
    operation: Any = spec.operation
    plain = operation.family == "gemm" and not operation.epilogue
    plain = plain and operation.block_scales == "none"
    plain = plain and not spec.schedule.stream_k  # type: ignore[union-attr]
    # Three kernels; one that reads pages, decodes keys, divides its work and adds up parts of it.
    several = operation.family in ("attention_backward", "attention_decode")
    # By a part more, and its parameters; one that is staged has a part for that. Dropout has two.
    changed = 130 * getattr(operation, "scored", False) + 60 * getattr(operation, "hides", False)
    changed += 180 * getattr(operation, "dropout", False)
    changed += 70 * getattr(operation, "trims", False)  # what a row of a mask of keys shows
    # Scales, how v of 8 bits lies, weights of 8 bits, and sums that are promoted.
    changed += 110 * getattr(operation, "eight", False)
    changed += 30 * (getattr(operation, "dim_v", 0) > 0)  # tiles of another dimension than k's
    changed += 70 * (getattr(operation, "groups", "none") != "none")  # where groups end
    if operation.family == "attention_backward":
        # What leaves fully masked rows out; the scores of some rows once more.
        changed += 50 * operation.masks_rows + 130 * (operation.bias != "none")
    return (440 if plain else 1060 if several else 755) + changed


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")
def test_nvcc_compiles_emitted_kernels_too(tmp_path: Path) -> None:
    """The longest epilogue and each attention as one file, whose headers take most of the time."""
    attentions = map(of_family, ("attention_decode", "attention_forward", "attention_backward"))
    text = together(LONGEST, *attentions)
    (tmp_path / f"{LONGEST.name}.cu").write_text(text)
    (cutlass,) = (part.folder for part in find().components if part.name == "CUTLASS")
    command = nvcc_command(LONGEST, str(cutlass))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{LONGEST.name}.cubin").read_bytes()[:4] == b"\x7fELF"
