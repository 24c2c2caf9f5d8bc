"""Strict YAML: what a file means is what it says, and all that is wrong is said at once."""

from __future__ import annotations

import json
from dataclasses import fields
from itertools import chain
from pathlib import Path

import pytest

from warploom.errors import ConfigurationError
from warploom.generator import epilogue
from warploom.generator.config import Configuration, load, schema
from warploom.generator.document import MAXIMUM_BYTES
from warploom.generator.families import every, names
from warploom.generator.families.gemm import GemmOperation, GemmSchedule

ROOT = Path(__file__).parents[2]
HEAD = "version: 1\narch: sm_90a\n"
OPERATION = "{family: gemm, a: bf16, b: bf16, d: fp32}"
GOOD = f"""{HEAD}kernels:
  - operations: [{OPERATION}]
    schedules: [{{tile: [128, 256, 64]}}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.yaml"


def read(file: Path, text: str) -> Configuration:
    file.write_text(text)
    return load(file)


def problems(file: Path, text: str) -> list[str]:
    """Each problem of a configuration, without the folder of the file."""
    with pytest.raises(ConfigurationError) as caught:
        read(file, text)
    return str(caught.value).replace(f"{file.parent}/", "").splitlines()


def with_step(step: str) -> str:
    return OPERATION.replace("}", f", epilogue: [{step}]}}")


def one_problem(file: Path, *, operation: str = OPERATION, schedule: str) -> str:
    """The one problem of a file whose operation and schedule are in lines 4 and 5."""
    (problem,) = problems(
        file, f"{HEAD}kernels:\n  - operations: [{operation}]\n    schedules: [{schedule}]\n"
    )
    return problem


def test_a_field_takes_one_value_or_a_list_and_the_rest_are_the_dataclass_defaults(
    file: Path,
) -> None:
    text = GOOD.replace("[128, 256, 64]", "[[128, 256, 64], [64, 8, 64]], raster: along_n")
    (space,) = read(file, text).spaces.value
    assert space.operations[0].value == GemmOperation("bf16", "bf16", "fp32")
    assert space.operations[0].place == f"{file}:4: kernels[0].operations[0]"
    assert space.schedules == (
        {
            "tile": ((128, 256, 64), (64, 8, 64)),
            "stages": ("auto",),
            "cluster": ((1, 1),),
            "consumers": (2,),
            "raster": ("along_n",),
            "swizzle_size": (8,),
            "store": ("tma",),
            "kernel_schedule": ("cooperative",),
            "swap_ab": (False,),
            "producer_registers": (40,),
            "l2_promotion": (256,),
            "cluster_split_k": (1,),
            "stream_k": (False,),
            "split_k": (1,),
        },
    )


def test_every_step_of_the_epilogue_can_be_written(file: Path) -> None:
    operations = ", ".join(
        with_step(json.dumps({field.name: getattr(step, field.name) for field in fields(step)}))
        for step in epilogue.STEPS
    )
    (space,) = read(file, GOOD.replace(OPERATION, operations)).spaces.value
    written = [operation.value.epilogue for operation in space.operations]  # type: ignore[attr-defined]
    assert written == [(step,) for step in epilogue.STEPS]


@pytest.mark.parametrize(
    "value", ["128:32", "0o17", "017", "0x10", "0b11", "1_000", "+8", "12345678901234567890"]
)
def test_an_integer_that_yaml_readers_disagree_on_is_refused(file: Path, value: str) -> None:
    problem = one_problem(file, schedule=f"{{tile: [128, 256, 64], swizzle_size: {value}}}")
    assert problem.startswith("some.yaml:5: kernels[0].schedules[0].swizzle_size: ")
    assert value in problem
    assert "write plain decimal digits" in problem or "should be an integer" in problem


@pytest.mark.parametrize("value", ["on", "off", "yes", "NO", "True", "TRUE"])
def test_a_truth_value_that_does_not_look_like_one_is_refused(file: Path, value: str) -> None:
    problem = one_problem(file, schedule=f"{{tile: [128, 256, 64], store: {value}}}")
    assert problem == (
        f"some.yaml:5: kernels[0].schedules[0].store: {value}: YAML 1.1 reads this as a truth "
        "value: write true or false, or quote it"
    )


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ("{}", "tile: missing: is required"),
        ("{tile: [128, 256]}", "tile: [128, 256]: should have more items"),
        ("{tile: [1, 2, 3, 4]}", "tile: [1, 2, 3, 4]: should have at most 3 items, not 4"),
        ("{tile: 128}", "tile: 128: should be a list"),
        ("{tile: []}", "tile: []: should have more items"),
        ('{tile: [128, "256", 64]}', 'tile[1]: "256": should be an integer'),
        ("{tile: [128, 256.0, 64]}", "tile[1]: 256.0: should be an integer"),
        ("{tile: [128, true, 64]}", "tile[1]: true: should be an integer"),
        ("{tile: [[1, 2, 3], [1, 2]]}", "tile[1]: [1, 2]: should have more items"),
        ("{tile: [1, [1, 2, 3]]}", "tile[0]: 1: should be a list"),
        ("{tile: [1, 2, 3], stages: many}", 'stages: "many": should be an integer or \'auto\''),
        ("{tile: [1, 2, 3], stages: }", "stages: null: should be an integer or 'auto'"),
        (
            "{tile: [1, 2, 3], swizzle_size: []}",
            "swizzle_size: []: should have at least 1 item, not 0",
        ),
        ("{tile: [1, 2, 3], swizzle_size: 8.5}", "swizzle_size: 8.5: should be an integer"),
        ("{tile: [1, 2, 3], consumers: true}", "consumers: true: should be an integer"),
        ("{tile: [1, 2, 3], consumers: 3}", "consumers: 3: should be 1 or 2"),
        ("{tile: [1, 2, 3], swap_ab: 1}", "swap_ab: 1: should be a valid boolean"),
        ("{tile: [1, 2, 3], l2_promotion: 32}", "l2_promotion: 32: should be 64, 128 or 256"),
        ("{tile: [1, 2, 3], store: 2021-01-02}", "store: 2021-01-02: YAML 1.1 reads this as a da"),
        ("{tile: [1, 2, 3], store: !x tma}", "store: !x: a configuration has no tags"),
        ("{tile: !x [1, 2, 3]}", "tile: !x: a configuration has no tags"),
        (
            "{tile: [1, 2, 3], swizzle_size: !!binary eA==}",
            "swizzle_size: tag:yaml.org,2002:binary: a config",
        ),
        (
            "{tile: [1, 2, 3], swizzle_size: 190:20:30.15}",
            "swizzle_size: 190:20:30.15: YAML 1.1 reads this as",
        ),
        ("{tile: [1, 2, 3], swizzle_size: .inf}", "swizzle_size: .inf: YAML 1.1 reads this as"),
        ("{tile: [1, 2, 3], rastre: 1}", "rastre: 1: is no field of this: did you mean raster?"),
        ("{tile: [1, 2, 3], raster: m}", "raster: \"m\": should be 'along_m' or 'along_n'"),
        ("{tile: [1, 2, 3], store: direkt}", "should be 'tma' or 'direct': did you mean direct?"),
        ("{tile: [1, 2, 3], <<: {swizzle_size: 4}}", "<<: merge: merge keys hide what a file says"),
        ("{tile: [1, 2, 3], [1, 2]: 3}", "schedules[0]: a key: a key is a plain word"),
        ("{tile: [1, 2, 3], tile: [1, 2, 3]}", "tile: duplicate key: line 5 gives it already"),
        ("3", "schedules[0]: 3: should be a mapping"),
    ],
)  # fmt: skip
def test_a_schedule_of_the_wrong_form_is_refused_with_its_place(
    file: Path, schedule: str, problem: str
) -> None:
    found = one_problem(file, schedule=schedule)
    assert found.startswith("some.yaml:5: kernels[0].schedules[0]")
    assert problem in found


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        ("{a: bf16, b: bf16, d: fp32}", "operations[0].family: missing: is required: add it"),
        (
            OPERATION.replace("gemm", "gem"),
            f"family: \"gem\": should be one of {', '.join(map(repr, names()))}",
        ),
        (OPERATION.replace("fp32", "fp3"), "d: \"fp3\": should be 'fp16', 'bf16', 'fp32'"),
        (OPERATION.replace("}", ", batched: 1}"), "batched: 1: should be a valid boolean"),
        (OPERATION.replace("}", ", accumulation: x}"), "\"x\": should be 'fast' or 'promoted'"),
        (with_step("{step: amax, element: fp32}"), "epilogue[0].element: \"fp32\": is no field"),
        (with_step("{by: host}"), "epilogue[0].step: missing: is required: add it"),
        (with_step("{step: biass}"), "[0].step: \"biass\": should be one of 'scale', 'bias'"),
        (with_step("{step: bias}"), "epilogue[0].element: missing: is required: add it"),
        (with_step("{step: bias, element: fp32, by: row}"), "epilogue[0].by: \"row\": is no field"),
        (with_step("relu"), "epilogue[0]: \"relu\": should be a mapping"),
        (OPERATION.replace("}", ", epilogue: 3}"), "epilogue: 3: should be a list"),
    ],
)  # fmt: skip
def test_an_operation_of_the_wrong_form_is_refused_with_its_place(
    file: Path, operation: str, problem: str
) -> None:
    found = one_problem(file, operation=operation, schedule="{tile: [128, 256, 64]}")
    assert found.startswith("some.yaml:4: kernels[0].operations[0]")
    assert problem in found


def test_all_problems_of_a_file_are_reported_together_in_the_order_of_its_lines(file: Path) -> None:
    text = f"""version: true
kernels:
  - operations: [{OPERATION.replace("bf16", "bf17", 1)}]
    schedules:
      - tile: [128:32, 2, 3]
        stages: auto
        stages: 4
  - operations: []
  - 3
more: 1
"""
    assert [problem.split(": ")[:3] for problem in problems(file, text)] == [
        ["some.yaml:1", "version", "true"],
        ["some.yaml:1", "arch", "missing"],
        ["some.yaml:3", "kernels[0].operations[0].a", '"bf17"'],
        ["some.yaml:5", "kernels[0].schedules[0].tile[0]", "128:32"],
        ["some.yaml:7", "kernels[0].schedules[0].stages", "duplicate key"],
        ["some.yaml:8", "kernels[1].operations", "[]"],
        ["some.yaml:8", "kernels[1].schedules", "missing"],
        ["some.yaml:9", "kernels[2]", "3"],
        ["some.yaml:10", "more", "1"],
    ]


def test_a_lone_problem_is_an_error_with_its_parts_apart(file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(file, GOOD.replace("sm_90a", "sm_90"))
    error = caught.value
    assert error.value == f'{file}:2: arch: "sm_90"'
    assert (error.rule, error.fix) == ("should be 'sm_90a'", "did you mean sm_90a?")


def test_plain_aliases_mean_what_they_point_to(file: Path) -> None:
    text = GOOD.replace("[{tile", "[&one {tile").replace("64]}]", "64]}, *one]")
    (space,) = read(file, text).spaces.value
    assert len(space.schedules) == 2
    assert space.schedules[0] == space.schedules[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "some.yaml:1: file: empty: a configuration has fields"),
        ("[1]", "some.yaml:1: file: [1]: should be a mapping"),
        ("a: [1\nb: 2", "some.yaml:2: file: YAML: did not find expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "some.yaml:2: file: YAML: but found another document"),
        ("a: \x07", "file: YAML: control characters are not allowed"),
        ("a: *b", "some.yaml:1: file: YAML: found undefined alias"),
        ("[" * 50_000, "some.yaml:1: file: a list or mapping: nesting goes at most 8 deep"),
        ("a: &a [*a]", "some.yaml:1: file: a list or mapping: nesting goes at most 8 deep"),
        (f"a: {'x' * MAXIMUM_BYTES}", "some.yaml:1: file: over 1000000 bytes"),
    ],
)
def test_a_text_that_is_no_configuration_is_refused_with_its_line(
    file: Path, text: str, problem: str
) -> None:
    (found,) = problems(file, text)
    assert problem in found


def test_aliases_cannot_multiply_without_end(file: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 6)]
    (found,) = problems(file, "\n".join(lines))
    assert "an alias: aliases included, a configuration has at most 100000 values" in found


def test_a_file_that_cannot_be_read_is_the_users_error(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"some.yaml: cannot be read: No such file"):
        load(file)
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory"):
        load(tmp_path)
    file.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigurationError, match=r"some.yaml:2: file: byte 0xff.*UTF-8"):
        load(file)


def test_the_schema_for_editors_is_what_the_models_say() -> None:
    assert (ROOT / "configs" / "schema.json").read_text() == schema()


def test_the_schema_has_every_field_of_the_dataclasses() -> None:
    definitions = json.loads(schema())["$defs"]
    for source in (GemmOperation, GemmSchedule, *map(type, epilogue.STEPS)):
        properties = definitions[source.__name__]["properties"]
        assert list(properties) == [field.name for field in fields(source)]
    assert "family" in definitions["GemmOperation"]["required"]
    assert definitions["GemmSchedule"]["required"] == ["tile"]


def test_every_field_has_a_meaning_in_the_schema() -> None:
    definitions = json.loads(schema())["$defs"]
    families = [(one.operation, one.schedule) for one in every()]
    for source in (*chain(*families), *map(type, epilogue.STEPS)):
        definition = definitions[source.__name__]
        assert definition["description"].endswith(".")
        silent = [
            name
            for name, field in definition["properties"].items()
            if name != "step" and not field.get("description")
        ]
        assert silent == [], source


def test_the_schema_tells_editors_the_range_of_a_number() -> None:
    stages = json.loads(schema())["$defs"]["GemmSchedule"]["properties"]["stages"]
    told = [one for one in stages["oneOf"][0]["anyOf"] if one.get("type") == "integer"]
    assert told == [{"type": "integer", "minimum": 2, "maximum": 32}]
