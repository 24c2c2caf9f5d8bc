"""The rendered text of every smoke.yaml is tracked, so that a template change shows as a diff."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from warploom.generator.configurations import smoke
from warploom.generator.epilogue import STEPS
from warploom.generator.families import every, family
from warploom.generator.render import render
from warploom.generator.space import expand_file

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "emitted" / "golden"
GEMM = family("gemm")
SPECS = {spec.name: spec for path in smoke() for spec in expand_file(path).specs}


@pytest.mark.parametrize("name", SPECS)
def test_a_template_change_is_seen(name: str, update_golden: bool) -> None:
    file = GOLDEN / f"{name}.cu"
    if update_golden:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render(SPECS[name]))
    assert file.is_file(), "missing: pytest tests/golden --update-golden writes it"
    assert file.read_text() == render(SPECS[name])


def test_no_kernel_that_is_gone_stays_behind(update_golden: bool) -> None:
    extra = [file for file in sorted(GOLDEN.iterdir()) if file.stem not in SPECS]
    if update_golden:
        for file in extra:
            file.unlink()
    else:
        assert extra == []


def choices(source: type) -> Iterator[tuple[str, object]]:
    """Every value of every field of a dataclass that is declared a Literal or a bool."""
    for field, hint in get_type_hints(source).items():
        if get_origin(hint) is Literal:
            yield from ((field, value) for value in get_args(hint))
        if hint is bool:
            yield from ((field, value) for value in (False, True))


def reached(source: type, values: list[Any]) -> set[tuple[str, object]]:
    """The values of those fields that come up."""
    fields = {field for field, _ in choices(source)}
    return {(field, getattr(value, field)) for value in values for field in fields}


def test_the_smoke_set_reaches_every_choice_of_an_operation_and_a_schedule() -> None:
    used: dict[type, list[Any]] = {}
    for known in every():
        specs = [spec for spec in SPECS.values() if spec.operation.family == known.name]
        used[known.operation] = [spec.operation for spec in specs]
        used[known.schedule] = [spec.schedule for spec in specs]
    operations, schedules = (used[source] for source in (GEMM.operation, GEMM.schedule))
    steps = [step for operation in operations for step in operation.epilogue]
    used |= {kind: [step for step in steps if type(step) is kind] for kind in map(type, STEPS)}
    for source, values in used.items():
        assert set(choices(source)) - reached(source, values) == set()
    for name in ("attention_forward", "attention_backward"):
        scored = [x for x in used[family(name).operation] if x.scored]
        assert {(x.staged, x.hides) for x in scored} >= {(False, False), (True, True)}
    assert {step.token for step in STEPS} <= {step.token for step in steps}
    layouts = {(operation.layout_a, operation.layout_b) for operation in operations}
    assert layouts == {("row", "col"), ("row", "row"), ("col", "col"), ("col", "row")}
    assert {schedule.rows for schedule in schedules} == {64, 128, 256}
    clusters = {schedule.cluster for schedule in schedules}
    assert clusters == {(1, 1), (2, 1), (1, 2), (4, 1), (4, 2)}
