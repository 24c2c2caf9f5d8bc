"""How commands are told shapes, and the operations of the package that have a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from warploom.errors import ConfigurationError
from warploom.generator.configurations import spaces
from warploom.generator.shapes import LARGEST
from warploom.suggestions import suggestion


def _words(value: str) -> list[str]:
    """The words of an option, which have commas between them."""
    return [word.strip() for word in value.split(",") if word.strip()]


def written_shapes(_context: object, _option: object, value: str | None) -> list[str]:
    """The shapes of an option that may be left out, but not be empty."""
    words = _words(value or "")
    if value is not None and not words:
        raise click.BadParameter(f"{value!r}: must have a shape, such as 4096x6144x4096")
    return words


def written_numbers(_context: object, _option: object, value: str) -> list[int]:
    """The positive numbers of an option, which kernels can count to."""
    words = _words(value)
    short = all(word.isascii() and word.isdecimal() and len(word) <= 10 for word in words)
    if not short or not all(0 < int(word) <= LARGEST for word in words):
        raise click.BadParameter(
            f"{value!r}: must be positive numbers, separated by commas, of at most {LARGEST}"
        )
    return list(map(int, words))


_OPTIONS = (
    click.option(
        "--shapes",
        callback=written_shapes,
        help="Shapes as the page of their family writes them, such as 4096x6144x4096,..., or as "
        "tables print them.",
    ),
    click.option(
        "--model",
        help="A model, such as llama3-8b (benchmarks/cells.yaml), or the path of its config.json.",
    ),
    click.option("--cells", is_flag=True, help="Every case of benchmarks/cells.yaml."),
    click.option(
        "--m",
        "rows",
        default="",
        callback=written_numbers,
        help="Cases of these M or lengths only.",
    ),
)


def told_spaces() -> str:
    """Which spaces of the package FILE may name, for the end of a command's help."""
    return f"Search spaces of the package: {', '.join(spaces())}."


def shape_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --shapes, --model, --cells and --m, as `shapes`, `model`, `cells` and `rows`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_one(
    what: str, shapes: Sequence[str], model: str | None, rows: Sequence[int], *, cells: bool
) -> None:
    """Raise ConfigurationError unless shapes are given in just one of the ways there are."""
    if [bool(shapes), model is not None, cells].count(True) != 1:
        raise ConfigurationError(
            f"what to {what}",
            rule="must be given by one of --shapes, --model and --cells",
            fix="for instance --shapes 4096x6144x4096",
        )
    if model is not None and not model.strip():
        raise ConfigurationError(
            f"--model {model!r}",
            rule="must be a model of benchmarks/cells.yaml, or the path of its config.json",
            fix="for instance --model llama3-8b; --cells has every model",
        )
    if shapes and rows:
        raise ConfigurationError(
            "--m with --shapes",
            rule="chooses among the shapes of --model or --cells; shapes have their own M",
            fix="leave one of them out",
        )


def shipped(path: Path) -> list[Path]:
    """The spaces of the package that `path` names, or `path`; ConfigurationError for neither."""
    if path.exists():
        return [path]
    known = spaces()
    if str(path) not in known:
        raise ConfigurationError(
            f"{path}: no such file",
            rule=f"must be a configuration, or one of the package's spaces: {', '.join(known)}",
            fix=suggestion(str(path), known),
        )
    return list(known[str(path)])
