"""All that the generator does of any family it does of one that it has never heard of."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from precompiled import compiled
from stand_ins import no_compiler

from warploom.errors import ConfigurationError, ProblemError, SpecificationError, UnknownNameError
from warploom.generator import build, configurations, records_file
from warploom.generator.artifact import Artifact
from warploom.generator.config import schema
from warploom.generator.config_reference import reference
from warploom.generator.families.base import Family
from warploom.generator.launches import NO_GPU, Address, Argument
from warploom.generator.model import proposals, rank
from warploom.generator.records import Environment, Record, Timed
from warploom.generator.render import render
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.store import Store

Make = Callable[..., KernelSpec]
HERE = Environment("NVIDIA H200", 132, "13.0", 1)


def written(folder: Path, operation: str, schedule: str = "threads: 128") -> Path:
    path = folder / "axpy.yaml"
    kernels = f"  - operations: [{{{operation}}}]\n    schedules: [{{{schedule}}}]\n"
    path.write_text(f"version: 1\narch: sm_90a\nkernels:\n{kernels}")
    return path


# ---- Names and configurations --------------------------------------------------------------------


def test_a_name_shows_what_is_not_usual_and_is_read_with_what_is(make: Make) -> None:
    spec = make(relu=True, turns=4, streaming=True)
    assert spec.name.startswith("axpy_sm90a_bf16_relu_128x8_turns4_streaming_")
    assert parse_name(spec.name) == spec
    plain = make()
    assert plain.name == f"axpy_sm90a_bf16_128x8_{plain.digest[:8]}"
    assert parse_name(f"axpy_sm90a_bf16_128x8_turns1_{plain.digest[:8]}") == plain
    with pytest.raises(UnknownNameError, match="its digest is"):
        parse_name(plain.name.replace("128x8", "256x8"))


def test_what_cannot_be_loaded_at_once_is_refused_with_the_reason(make: Make) -> None:
    with pytest.raises(SpecificationError, match="values 8 of fp32: a load has 16 bytes"):
        make("fp32", values=8)
    with pytest.raises(SpecificationError, match="turns 9: must be 1 to 8"):
        make(turns=9)


def test_a_configuration_is_loaded_and_every_point_is_a_kernel_or_rejected(tmp_path: Path) -> None:
    every = "threads: [128, 512], values: [auto, 8], turns: [1, 2]"
    path = written(tmp_path, "family: axpy, element: fp32", every)
    expansion = expand_file(path)
    assert [(s.schedule.threads, s.schedule.values) for s in expansion.specs] == [
        *((128, 4), (128, 4), (512, 4), (512, 4))
    ]
    assert len(expansion.rejected) == 4
    with pytest.raises(ConfigurationError, match=r"axpy\.yaml:4.*bias"):
        expand_file(written(tmp_path, "family: axpy, element: fp32, bias: true"))


def test_the_schema_and_the_reference_have_its_fields() -> None:
    assert "AxpyOperation" in json.loads(schema())["$defs"]
    assert "| `turns` | an integer 1 to 8 | `1` | how often a thread does so |" in reference()


def test_its_spaces_are_found_beside_those_of_the_package() -> None:
    names = configurations.spaces()
    assert {"axpy", "gemm", "attention"} <= names.keys()
    assert len(configurations.every()) > len(configurations.smoke()) > 3
    assert set(names["axpy"]) <= set(configurations.every())
    assert len(expand_file(names["axpy"][0]).specs) == 2 * 3 * 4 * 2 * 4 - 24


# ---- Text, parameters and launches ---------------------------------------------------------------


def test_parameters_are_declared_once_for_the_text_and_the_bytes(axpy: Family, make: Make) -> None:
    spec = make(relu=True)
    block = axpy.parameters(spec)
    packed = block.pack({"x": 1 << 40, "y": 2, "d": 3, "n": 1 << 33, "alpha": 0.5})
    assert packed == struct.pack("<QQQqf92x", 1 << 40, 2, 3, 1 << 33, 0.5)
    text = render(spec)
    assert "static_assert(OFFSET(Parameters, alpha) == 32);" in text
    assert "if (sum < 0.f)" in text and "__ldcs" not in text
    assert "__ldcs" in render(make(streaming=True))
    assert len(text.splitlines()) < 80


def test_launches_are_data(axpy: Family, make: Make) -> None:
    spec = make(turns=2)
    (launch,) = axpy.launches(spec, axpy.shape(2049), NO_GPU)
    assert (launch.grid, launch.block, launch.cluster, launch.shared_bytes) == (2, 128, 1, 0)
    assert launch.parameters["x"] == Address("x") and launch.parameters["n"] == 2049
    assert launch.parameters["alpha"] == Argument("alpha")
    assert axpy.workspaces(spec, axpy.shape(2049)) == []
    with pytest.raises(ProblemError, match="must be smaller"):
        axpy.launches(make(values=1), axpy.shape(1 << 40), NO_GPU)


# ---- Compiling and keeping -----------------------------------------------------------------------


def test_its_kernels_compile_without_spills_and_come_back_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (smoke,) = (path for path in configurations.smoke() if path.parent.name == "axpy")
    specs = expand_file(smoke).specs
    cubins = []
    for spec in specs:
        one = compiled(spec)
        assert one.resources[spec.name].clean and one.cubin[:4] == b"\x7fELF"
        cubins.append(one.cubin)
    two = build.build_many(specs[:2], Store(tmp_path), jobs=1)
    assert [(one.name, one.cubin) for one in two if isinstance(one, Artifact)] == [
        (spec.name, cubin) for spec, cubin in zip(specs[:2], cubins[:2], strict=True)
    ]
    monkeypatch.setattr(build, "find", no_compiler)
    assert [build.build(spec, Store(tmp_path)).cubin for spec in specs[:2]] == cubins[:2]


# ---- Records and the model -----------------------------------------------------------------------


def test_records_are_written_read_and_found_near(axpy: Family, make: Make, tmp_path: Path) -> None:
    best, default = make(turns=4), make()
    record = Record(
        best.operation,
        axpy.shape(1 << 20),
        HERE,
        Timed(best.schedule, 3e-6, 0.01),
        Timed(default.schedule, 4e-6, 0.01),
        measured="2026-11-21T10:00:00+00:00",
    )
    path = tmp_path / "records.json"
    records_file.update(path, HERE.gpu, [record])
    read = records_file.read(path)
    assert list(read) == [record]
    assert read.exact(best.operation, axpy.shape(1 << 20), HERE) == record
    assert read.exact(best.operation, axpy.shape(1 << 21), HERE) is None
    assert read.nearest(best.operation, axpy.shape(1 << 21), HERE) == record
    assert read.nearest(best.operation, axpy.shape(1 << 23), HERE) is None
    other = replace(best.operation, relu=True)
    assert read.nearest(other, axpy.shape(1 << 20), HERE) is None


def test_the_model_ranks_and_details_are_proposed_once(axpy: Family, make: Make) -> None:
    wide, detail, narrow = make(threads=512), make(threads=512, streaming=True), make(values=1)
    ranked = rank(None, [narrow, detail, wide], axpy.shape(1 << 24), 132)
    assert [one.spec for one in ranked] == [wide, detail, narrow]
    assert 3e-5 < ranked[0].seconds < ranked[2].seconds
    assert proposals(ranked, 3) == [wide, narrow]
