"""Whatever JSON a configuration holds, a weight is imported right or refused by a short error.

A config.json comes with a checkpoint, from whoever made it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import written_layers as written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from importer_cases import FIXTURES, NAME, SOURCES, Case, load

from warploom.errors import ProblemError
from warploom.printable import brief, cut
from warploom.quantization.importers import import_weight
from warploom.quantization.importers.patterns import LONGEST, first_match

CASES = [(source, case) for source in SOURCES for case in load(FIXTURES / f"{source}.safetensors")]
# The fields that an importer looks at, of whatever depth.
GPTQ = [
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "meta",
    "is_marlin_format", "pack_dtype", "dynamic", "quantization_config",
]  # fmt: skip
FIELDS = {
    "gptq": GPTQ,
    "awq": ["version", "w_bit", "q_group_size", "bits", "group_size", "dynamic", "zero_point"],
    "fp8": ["weight_block_size", "modules_to_not_convert", "ignored_layers", "compression_config"],
    "mxfp4": ["modules_to_not_convert"],
    "bitnet": ["linear_class", "quantization_mode", "use_rms_norm", "modules_to_not_convert"],
    "torchao": ["quant_method"],
    "compressed-tensors": [
        "ignore", "config_groups", "transform_config", "sparsity_config", "format", "targets",
        "weights", "num_bits", "type", "symmetric", "strategy", "block_structure", "actorder",
        "group_size",
    ],
    "auto-round": ["extra_config", "packing_format", "data_type", "act_bits", "rotation_config"],
}  # fmt: skip
NAMES = sorted({field for fields in FIELDS.values() for field in fields})
Json = Any


def nested(depth: int, kind: type) -> Json:
    found: Json = kind()
    for _ in range(depth):
        found = [found] if kind is list else {"a": found}
    return found


# What files have had, or could: values that are near right ones, and ones that end in a crash.
STRANGE: list[Json] = [
    None, True, False, 0, -1, 1, 2, 3, 4, 8, 16, 64, 128, 10**400, -(10**4000), 1 << 31, 1.5,
    float("nan"), float("inf"), "", "4", "128", "int", "float", "group", "channel", "tensor",
    "gptq", "gptq_v2", "gemm", "auto-round", "pack-quantized", "x" * 100_000, "\x1b[2J\n",
    "../../etc/passwd", "re:(", "re:(a+)+$", "re:.*", "\ud800", [], {}, [128, 128], [0, 0],
    [1, "64"], ["re:("],
    {"+:.*": {"bits": 8}}, {"-:.*": {}}, {"(a+)+$": {"bits": 8}}, {".*": 4}, {"bits": 16},
    {NAME: {"bits": 16}}, {NAME: None}, nested(900, list), nested(900, dict),
    {str(i): i for i in range(3000)}, list(range(3000)),
]  # fmt: skip
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(NAMES)
)  # fmt: skip
VALUES = st.sampled_from(STRANGE) | st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Json, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield before
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, one in inner:
        yield from places(one, (*before, key))


def replaced(value: Json, place: tuple[Any, ...], other: Json) -> Json:
    if not place:
        return other
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[place[0]] = replaced(value[place[0]], place[1:], other)
    return copy


@st.composite
def configurations(draw: st.DrawFn) -> tuple[str, Case, Any]:
    """A case and its configuration with one or two values in the place of others, or added."""
    source, case = draw(st.sampled_from(CASES))
    config: Any = json.loads(json.dumps(case.config))
    for _ in range(draw(st.integers(1, 2))):
        options = list(places(config))
        place, other = draw(st.sampled_from(options)), draw(VALUES)
        at = config
        for key in place:
            at = at[key]
        if isinstance(at, dict) and draw(st.booleans()):
            other = {**at, draw(st.sampled_from(NAMES)): other}
        config = replaced(config, place, other)
    return source, case, config


def imported(source: str, case: Case, config: Json) -> None:
    """Import, or raise a ProblemError that a terminal can show; the weight is the case's."""
    made = {"expert": 0, "activations": "e4m3"} if source == "mxfp4" else {}
    try:
        packed = import_weight(case.tensors, config, name=NAME, metadata=case.metadata, **made)
    except ProblemError as error:
        assert len(str(error)) < 1500
        assert str(error).isprintable()
        return
    weight = case.weight[0] if source == "mxfp4" else case.weight
    found = packed.dequantize(weight.dtype).view(torch.uint8)
    if not torch.equal(found, weight.contiguous().view(torch.uint8)):
        # Zero points that may be any are read as the file says, v1 or v2.
        any_zeros = source == "gptq" and ("zeros" in case.label or "short last" in case.label)
        # Without a class of layers BitNet's scales divide, as transformers has it.
        assert any_zeros or (source == "bitnet" and not config.get("linear_class"))
        assert config != case.config


@given(configurations())
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_configuration_is_read_right_or_refused(drawn: tuple[str, Case, Any]) -> None:
    imported(*drawn)


@pytest.mark.parametrize("source", FIELDS)
def test_any_strange_value_of_a_field_is_read_right_or_refused(source: str) -> None:
    """Every field, with every value that has been a crash somewhere."""
    case = next(case for other, case in CASES if other == source.replace("auto-round", "gptq"))
    config = {**case.config, "quant_method": source}
    groups = config.get("config_groups", {})
    for field in FIELDS[source]:
        for value in STRANGE:
            imported(source, case, {**config, field: value})
            for scheme in groups.values():
                weights = {**scheme["weights"], field: value}
                for one in ({**scheme, field: value}, {**scheme, "weights": weights}):
                    imported(source, case, {**config, "config_groups": {"group_0": one}})


def test_any_strange_metadata_of_torchao_is_read_right_or_refused() -> None:
    source, case = next((source, case) for source, case in CASES if source == "torchao")
    key = f"{NAME}.weight"
    told = json.loads(case.metadata[key])
    for place in places(told):
        for value in STRANGE:
            text = json.dumps(replaced(told, place, value), default=str)
            other = Case(case.label, case.config, case.tensors, case.weight, {key: text})
            imported(source, other, case.config)
    for text in ("", "{", "[" * 100_000, "9" * 5000, "\ud800"):
        other = Case(case.label, case.config, case.tensors, case.weight, {key: text})
        imported(source, other, case.config)


@pytest.mark.parametrize("argument", ["name", "metadata", "expert", "requantize", "activations"])
def test_strange_arguments_are_refused(argument: str) -> None:
    for source, case in CASES[::5]:
        for value in (*STRANGE, object(), b"x", [None], {1: 2}):
            given: dict[str, Any] = {"name": NAME, "metadata": case.metadata}
            if source == "mxfp4":
                given |= {"expert": 0, "activations": "e4m3"}
            try:
                import_weight(case.tensors, case.config, **{**given, argument: value})
            except ProblemError as error:
                assert len(str(error)) < 1500
                assert str(error).isprintable()


@pytest.mark.parametrize("value", [None, 3, "x", [1], torch.empty(4, 4, device="meta")])
def test_tensors_that_are_none_are_named(value: object) -> None:
    for source, case in CASES[::3]:
        for key in case.tensors:
            tensors: Any = {**case.tensors, key: value}
            expert = 0 if source == "mxfp4" else None
            with pytest.raises(ProblemError, match="must be a tensor with contents"):
                import_weight(
                    tensors, case.config, name=NAME, metadata=case.metadata, expert=expert
                )


# ---- Patterns ------------------------------------------------------------------------------------

LONG = "model.layers.0.mlp." + "a" * 60 + "!"
# Each would run for longer than anyone waits, or is no pattern.
HOSTILE = {
    "nested repeats": r"model\.layers\.0\.mlp\.(a+)+$",
    "overlapping branches": r".*(a|a|aa)+$",
    "three repeats of repeats": "((a{1,1000}){1,1000}){1,1000}b",
    "repeats of nothing": r".*(a?){60}a{60}b",
    "a recursion": "(?R)",
    "a reference": r".*(a+)\1+$b",
    "a parenthesis": "(",
    "an unfinished name": "(?P<a>",
    "many parentheses": "(" * 5000 + ")" * 5000,
    "fewer parentheses": "(" * 900 + ")" * 900,
    "a repeat without end": "a{99999999999}",
    "a bad range": "[z-a]",
    "a name that is not there": r"\L<x>",
    "too long a one": "a" * (LONGEST + 1),
}


@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
def test_patterns_end_or_are_refused(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's re takes hours for some of them: the suite's time limit would tell."""
    monkeypatch.setattr("warploom.quantization.importers.patterns.SECONDS", 0.05)
    tensors, _ = written.pack_quantized(9, 192, 64, symmetric=True)
    scheme = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 64}}
    of_group = {**scheme, "targets": [f"re:{pattern}"]}
    base = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    for config in (
        {**base, "config_groups": {"a": of_group, "b": scheme}},
        {**base, "config_groups": {"b": scheme}, "ignore": [f"re:{pattern}"]},
    ):
        refused_or(lambda config=config: import_weight(tensors, config, name=LONG))
    tensors, _ = written.gptq(16, 192, 64, symmetric=True, version=1)
    plain = {"bits": 4, "group_size": 64, "sym": True}
    for config in (
        {**plain, "quant_method": "gptq", "dynamic": {f"+:{pattern}": {"bits": 4}}},
        {**plain, "quant_method": "gptq", "dynamic": {f"-:{pattern}": {}}},
        {**plain, "quant_method": "auto-round", "extra_config": {pattern: {"bits": 4}}},
        {**plain, "quant_method": "gptq", "modules_to_not_convert": [f"re:{pattern}"]},
    ):
        refused_or(lambda config=config: import_weight(tensors, config, name=LONG))


def refused_or(run: Callable[[], object]) -> None:
    try:
        run()
    except ProblemError as error:
        assert "the pattern" in str(error)
        assert len(str(error)) < 1000


def test_the_time_of_all_patterns_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of a thousand patterns of a second each took a quarter of an hour."""
    monkeypatch.setattr("warploom.quantization.importers.patterns.SECONDS", 0.05)
    slow = [f"{'(?:)' * i}((a{{1,1000}}){{1,1000}}){{1,1000}}b" for i in range(900)]
    with pytest.raises(ProblemError, match="patterns must be decided within"):
        first_match("x", slow, "a" * 200)


@pytest.mark.parametrize(
    ("pattern", "name", "how", "fits"),
    [
        ("up", "up_proj", "match", True),
        ("proj", "up_proj", "match", False),
        ("proj", "up_proj", "search", True),
        (r".*layers\.(1|2)\.", "model.layers.2.x", "match", True),
        (r"(?!.*lm_head).*", "model.lm_head", "match", False),  # with lookahead, as some have
        (r"^a$", "a", "match", True),
        (".*", "", "match", False),
    ],
)
def test_patterns_mean_what_pythons_do(pattern: str, name: str, how: str, fits: bool) -> None:
    assert (first_match("x", ["zzz", pattern], name, how) == pattern) == fits


# ---- Messages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [*STRANGE, object(), torch.ones(300, 300)])
def test_values_in_messages_are_short_and_printable(value: object) -> None:
    assert len(brief(value)) <= 120
    assert brief(value).isprintable()


def test_text_that_is_cut_says_so() -> None:
    assert (cut("abcdef", 6), cut("abcdefg", 6)) == ("abcdef", "abc...")
