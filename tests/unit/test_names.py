"""Whatever of the package has a name has one of its own, which is not long."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from warploom.generator import configurations, gpus, records_file
from warploom.generator.knob import knob
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec, parse_name


@functools.cache
def kernels() -> frozenset[KernelSpec]:
    """Those of small sets, some of each space, and what records have: tables' choices, too."""
    return frozenset(_kernels())


def _kernels() -> Iterator[KernelSpec]:
    for path in configurations.every():
        specs = expand_file(path).specs
        yield from specs[:: 1 + len(specs) // 200]
    for path in records_file.every():
        records = records_file.read(path)
        for record in records.records:
            for timed in record.contenders:
                yield KernelSpec(gpus.kind(records.gpu).arch, record.operation, timed.schedule)


def test_no_two_kernels_share_a_name_and_each_is_found_by_it() -> None:
    found = kernels()
    assert len(found) > 500
    by_name = {spec.name: spec for spec in found}
    assert len(by_name) == len(found)
    assert {name: parse_name(name) for name in by_name} == by_name


def test_names_are_not_long() -> None:
    """They head columns, files and lines of a profile."""
    assert max(len(spec.name) for spec in kernels()) < 140


def test_a_later_field_means_in_older_names_what_it_is_without_a_token() -> None:
    """Else every name of a version before it would be another kernel's."""
    for default in ({}, {"default": True}):
        with pytest.raises(TypeError, match="of a later field: must be what older names mean"):
            knob(**default, doc="", later=True)
    assert knob(default=False, doc="", later=True).default is False
