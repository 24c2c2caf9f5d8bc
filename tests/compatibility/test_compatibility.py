"""Names, YAML, records and calls of version 0.1.0 mean what they meant.

The files beside this one were written by it: names of every kernel that it emitted as a sample or
recorded as measured, its sample configuration, and every 18th of its records.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import warploom
from warploom import quantization, variables
from warploom.errors import ConfigurationError, SpecificationError
from warploom.generator import records_file
from warploom.generator.config import load
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, complete
from warploom.generator.knob import frozen, knob, stored_names, types
from warploom.generator.names import short
from warploom.generator.restore import restore
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, counted, parse_name
from warploom.renamed import KEYWORDS as OLD_KEYWORDS

HERE = Path(__file__).parent
NAMES = (HERE / "names.txt").read_text().split()
KEYWORDS = {
    "gemm": "a b out bias residual beta activation scale_a scale_b scale_d amax out_dtype "
    "accumulation epilogue spec",
    "plan": "a b out out_dtype accumulation spec keywords",
    "attention": "q k v causal window softcap scale cu_seqlens_q cu_seqlens_k max_seqlen_q "
    "max_seqlen_k return_lse out spec deterministic backward_spec",
    "plan_attention": "q k v keywords",
    "load": "spec",
    "warmup": "path jobs",
}
RENAMED = {  # fields of schedules that have a new name, by their old ones
    "gemm": "group roles swap split",
    "mixed_gemm": "shares blocks group split ahead",
    "attention_decode": "blocks",
    "attention_backward": "share held",
    "activation_backward": "blocks",
}
CONFIGS = Path(warploom.__file__).parent / "configs"
VARIABLES = (
    "WARPLOOM_CACHE_DIR WARPLOOM_CACHE_PATH WARPLOOM_COMPILE WARPLOOM_RECORDS WARPLOOM_RECORDS_DIR"
)


@functools.cache
def kernels() -> set[str]:
    """Digests of the kernels that are named: half a second of each process that collects tests."""
    return {parse_name(name).digest for name in NAMES}


def test_every_name_still_names_its_kernel_though_it_has_another_now() -> None:
    """A name holds the digest of all fields: it would parse to another kernel's, and be refused."""
    assert len(kernels()) == len(NAMES) > 900
    for name in NAMES:
        spec = parse_name(name)
        assert spec.digest[:8] == name[-8:]
        assert parse_name(spec.name) == spec
        assert len(spec.name) <= len(name)


def test_its_configuration_expands_to_the_same_kernels() -> None:
    assert {spec.digest for spec in expand_file(HERE / "smoke.yaml").specs} < kernels()


def test_its_records_are_read_and_name_the_same_kernels() -> None:
    records = records_file.read(HERE / "nvidia_h200.json").records
    assert len(records) == 24
    for record in records:
        for timed in record.contenders:
            assert KernelSpec("sm_90a", record.operation, timed.schedule).digest in kernels()


@pytest.mark.parametrize("name", KEYWORDS)
def test_functions_take_what_they_took(name: str) -> None:
    """Old keywords of theirs are called in test_renamed.py."""
    parameters = inspect.signature(getattr(warploom, name)).parameters
    assert {*KEYWORDS[name].split()} <= {*parameters, *OLD_KEYWORDS.get(name, ())}


def test_variables_are_still_read() -> None:
    assert set(VARIABLES.split()) <= set(variables.VARIABLES)


@dataclass(frozen=True)
class Grown(GemmSchedule):
    """A schedule with a field that joined after its kernels had been named."""

    warps: int = knob(default=4, doc="of nothing", later=True)


def test_a_field_that_joins_later_changes_no_kernel_that_does_without_it() -> None:
    operation = GemmOperation("bf16", "bf16", "bf16")
    before = complete("sm_90a", operation, {"tile": (128, 128, 64)})
    spec = KernelSpec("sm_90a", operation, before)
    assert (
        KernelSpec("sm_90a", operation, Grown(**asdict(before))).canonical_json
        == spec.canonical_json
    )
    other = KernelSpec("sm_90a", operation, Grown(**asdict(before), warps=8))
    assert other.digest != spec.digest
    assert other.fields["schedule"]["warps"] == 8


@frozen
class Renamed:
    """A schedule whose fields had other names."""

    swap_ab: bool = knob(stored_as="swap", default=False, doc="of nothing")
    swizzle_size: int = knob(stored_as="group", default=8, name="group{}", doc="of nothing")


def test_a_field_with_a_new_name_keeps_its_old_one_in_what_is_stored() -> None:
    """Digests, names and records would be other kernels'."""
    schedule = Renamed(swap_ab=True, swizzle_size=4)
    assert counted(schedule) == {"swap": True, "group": 4}
    assert short(schedule) == "swap_group4"


def test_a_field_is_read_by_its_old_name_and_its_new_one_but_not_by_both() -> None:
    schedule = Renamed(swap_ab=True, swizzle_size=4)
    assert restore(Renamed, {"swap": True, "group": 4}) == schedule
    assert restore(Renamed, {"swap_ab": True, "swizzle_size": 4}) == schedule
    with pytest.raises(SpecificationError, match="the same field as group"):
        restore(Renamed, {"group": 4, "swizzle_size": 4})


def older(name: str) -> Mapping[str, str]:
    """The old name of each field of a family's schedules that has a new one."""
    stored = stored_names(family(name).schedule)
    return {field: before for field, before in stored.items() if field != before}


@pytest.mark.parametrize("name", RENAMED)
def test_a_configuration_with_old_keys_has_the_same_kernels(name: str, tmp_path: Path) -> None:
    text = (CONFIGS / name / "smoke.yaml").read_text()
    before = "\n".join(
        line if "operations:" in line else renamed(line, older(name)) for line in text.splitlines()
    )
    (path := tmp_path / "old.yaml").write_text(before)
    assert before != text
    expected = {spec.digest for spec in expand_file(CONFIGS / name / "smoke.yaml").specs}
    assert {spec.digest for spec in expand_file(path).specs} == expected


def renamed(line: str, older: Mapping[str, str]) -> str:
    return re.sub(r"\b\w+(?=: )", lambda key: older.get(key[0], key[0]), line)


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name, keys in RENAMED.items() for key in keys.split()]
)
def test_each_old_key_gives_the_field_that_has_a_new_name(
    name: str, key: str, tmp_path: Path
) -> None:
    """A key that were ignored would leave the field at its default."""
    assert set(older(name).values()) == set(RENAMED[name].split())
    (field,) = (field for field, before in older(name).items() if before == key)
    value = another(family(name).schedule, field)
    spec = expand_file(CONFIGS / name / "smoke.yaml").specs[0]
    schedule: dict[str, Any] = asdict(spec.schedule)  # type: ignore[call-overload]
    schedule.pop(field)

    def read(keys: Mapping[str, object]) -> Mapping[str, object]:
        entry = {"operations": [asdict(spec.operation)], "schedules": [{**schedule, **keys}]}  # type: ignore[call-overload]
        (path := tmp_path / "one.yaml").write_text(
            json.dumps({"version": 1, "arch": spec.arch, "kernels": [entry]})
        )
        (space,) = load(path).spaces.value
        return space.schedules[0]

    assert read({key: value}) == read({field: value}) != read({})
    assert read({key: value})[field] == (value,)
    with pytest.raises(ConfigurationError):
        read({key: value, field: value})


def another(schedule: type, name: str) -> object:
    """A value of a field that is not its default."""
    hint = types(schedule)[name]
    (default,) = (field.default for field in fields(schedule) if field.name == name)
    choices = get_args(hint) or ((False, True) if hint is bool else (default + 1,))
    return next(choice for choice in choices if choice != default)


def test_files_of_weights_without_checksums_of_their_metadata_still_load() -> None:
    """Checksums were of the bytes alone; the files that have such ones are not lost."""
    found = quantization.load(HERE / "packed_weights.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name, format, group in (("layers.0.int4", "int4", 128), ("b", "uint4", None)):
        kind = found[name].metadata
        assert (kind.format, kind.group, kind.n, kind.k) == (format, group, 3, 128)
        assert found[name].error(torch.randn(3, 128, generator=draw)).relative < 0.15
