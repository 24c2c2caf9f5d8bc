"""The text of every kernel of smoke.yaml is kept, or its digest: no change of a template hides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from goldens import (
    COUNT,
    FEATURES_SHARE,
    GOLDEN,
    MECHANISMS,
    SHARE,
    SPECS,
    digest,
    features,
    recorded,
    renew,
    share,
    texts,
)

from warploom.generator.epilogue import STEPS
from warploom.generator.families import every, family

GEMM = family("gemm")
RENEW = "`python -m pytest tests/golden --update-golden` renews what is kept"


@pytest.fixture(autouse=True, scope="module")
def renewed(request: pytest.FixtureRequest) -> None:
    """Write what is kept first, where it is to be renewed."""
    if request.config.getoption("--update-golden"):
        renew()


def test_a_template_change_is_seen() -> None:
    shown = {name: GOLDEN / f"{name}.cu" for name in SPECS if (GOLDEN / f"{name}.cu").is_file()}
    for name, file in shown.items():
        assert file.read_text() == texts()[name], RENEW
    others = SPECS.keys() - shown.keys()
    changed = sorted(name for name in others if recorded().get(name) != digest(name))
    assert changed == [], f"`python tools/golden_diff.py HEAD` shows what has changed; {RENEW}"


def test_every_sample_is_kept_once_and_none_that_is_gone() -> None:
    kept = [file.stem for file in GOLDEN.iterdir()] + list(recorded())
    assert sorted(kept) == sorted(SPECS), RENEW


def test_few_kernels_show_almost_every_line_and_every_mechanism() -> None:
    """Where they do not, a change of templates is read as digests, which say nothing."""
    kept = {file.stem for file in GOLDEN.iterdir()}
    assert len(kept) <= COUNT
    assert share(kept) >= SHARE, RENEW
    shown = {feature for name in kept for feature in features(SPECS[name])}
    assert {word for _, word in shown} >= MECHANISMS, RENEW
    assert {name for name, _ in shown} == {known.name for known in every()}, RENEW
    all_features = {feature for spec in SPECS.values() for feature in features(spec)}
    assert len(shown) >= FEATURES_SHARE * len(all_features), RENEW


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
