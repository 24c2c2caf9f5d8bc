"""Which operations a command is about: those of a configuration or a family, changed by options."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import click

from warploom.cli.shapes import shipped
from warploom.errors import ConfigurationError, SpecificationError
from warploom.suggestions import suggestion

if TYPE_CHECKING:
    from warploom.generator.specification import Operation

Fields = Sequence[tuple[str, str]]


def _fields(_context: object, _option: object, values: Sequence[str]) -> Fields:
    """FIELD=VALUE as pairs, of which one option may have several, with commas between them."""
    found: list[tuple[str, str]] = []
    for word in ",".join(values).split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if word and not (name and equals and value):
            raise click.BadParameter(f"{word!r}: must be FIELD=VALUE, such as dim=128")
        if any(name == other for other, _ in found):
            raise click.BadParameter(f"{word!r}: {name} must be given once")
        if word:
            found.append((name, value))
    return found


_OPTIONS = (
    click.option(
        "--set",
        "fields",
        multiple=True,
        callback=_fields,
        metavar="FIELD=VALUE,...",
        help="Fields of the operation, as a configuration names them, such as dim=128,mask=causal.",
    ),
    click.option(
        "--epilogue",
        default="",
        metavar="STEP,...",
        help="Steps of an epilogue, in order, such as bias,gelu_tanh,residual; with a value "
        "after a colon: scale:row, bias:fp32.",
    ),
)


def operation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --set and --epilogue, as `fields` and `epilogue`, for `operations_of`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def operations_of(path: Path, fields: Fields, epilogue: str) -> list[Operation]:
    """The operations of a configuration or of a family's space, with these fields instead.

    Raises:
        ConfigurationError: `path` is neither, or a field or value is none that its operations have.
    """
    from warploom.generator.space import operations

    listed = [one for space in shipped(path) for one in operations(space)]
    found: dict[Operation, None] = {}
    refused: list[str] = []
    for operation in listed:
        changed = _changed(operation, fields, epilogue)
        if reasons := _reasons(changed):
            refused += reasons
        else:
            found[changed] = None
    if not found:  # else those that cannot have these fields are left out
        raise ConfigurationError(
            f"{path} with {_told(fields, epilogue)}",
            rule="; ".join(dict.fromkeys(refused)),
            fix="change these fields, or write a configuration",
        )
    return list(found)


def _told(fields: Fields, epilogue: str) -> str:
    words = [f"{name}={value}" for name, value in fields]
    return ", ".join([*words, f"epilogue {epilogue}"] if epilogue else words)


def _reasons(operation: Operation) -> list[str]:
    from warploom.generator import rules
    from warploom.generator.families import family

    described = family(operation.family)
    return rules.fields(operation) or described.operation_reasons(operation)


def _changed(operation: Operation, fields: Fields, epilogue: str) -> Operation:
    import yaml

    from warploom.generator.restore import restore

    plain = dataclasses.asdict(operation)
    known = [name for name in plain if name not in ("family", "epilogue")]
    for name, value in fields:
        if name not in known:
            raise ConfigurationError(
                f"--set {name}={value}",
                rule=f"{operation.family} has the fields {', '.join(known)}",
                fix=suggestion(name, known) or "name one of them",
            )
        try:
            plain[name] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as no date
            raise ConfigurationError(
                f"--set {name}={value}", rule="must be a plain value", fix="for example dim=128"
            ) from error
    if epilogue:
        if "epilogue" not in plain:
            raise ConfigurationError(
                f"--epilogue {epilogue}",
                rule=f"{operation.family} has no epilogue",
                fix="leave it out; --set has its fields",
            )
        plain["epilogue"] = [*_steps(epilogue, plain)]
    try:
        found: Operation = restore(type(operation), plain)
    except SpecificationError as error:
        option = "--epilogue" if ".epilogue" in error.value else "--set"
        raise ConfigurationError(error.value, rule=error.rule, fix=f"change {option}") from error
    return found


def _steps(epilogue: str, operation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of an epilogue as plain values: by their own names, or those of functions."""
    from warploom.generator.epilogue import STEPS

    kinds = {one.step: type(one) for one in STEPS}
    functions = {
        value: (name, field)
        for name, kind in kinds.items()
        for field, hint in _choices(kind).items()
        if field == "function" and name == "activation"
        for value in hint
    }
    words = [*kinds, *functions]
    for written in epilogue.split(","):
        word, _, value = (part.strip() for part in written.partition(":"))
        if word in functions:
            if value:
                raise _valued(written)
            name, field = functions[word]
            yield {"step": name, field: word}
            continue
        if word not in kinds:
            raise ConfigurationError(
                f"--epilogue {written.strip()!r}",
                rule=f"must be one of {', '.join(words)}",
                fix=suggestion(word, words) or "name one of them",
            )
        step: dict[str, Any] = {"step": word}
        for field, choices in _choices(kinds[word]).items():  # the first one has the value
            like_a = operation["a"] if operation["a"] in ("fp16", "bf16") else "bf16"
            usual = next((one for one in (like_a, "device") if one in choices), choices[0])
            step[field], value = value or usual, ""
        if value:
            raise _valued(written)
        yield step


def _valued(written: str) -> ConfigurationError:
    """The error of a step with a value that it does not take."""
    word = written.partition(":")[0].strip()
    return ConfigurationError(
        f"--epilogue {written.strip()!r}",
        rule=f"{word} takes no value after a colon",
        fix=f"write {word} alone",
    )


def _choices(kind: type) -> dict[str, tuple[Any, ...]]:
    """The values that each field of a step may have, but for its own name."""
    hints = get_type_hints(kind)
    own = {one.name for one in dataclasses.fields(kind)} - {"step"}
    return {name: get_args(hint) for name, hint in hints.items() if name in own}
