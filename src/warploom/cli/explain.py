"""`warploom explain FAMILY|FILE --shapes ...`: which kernel calls run on a GPU, and why.

It says what `warploom.explain` says of a call on dense tensors, without making the tensors. The GPU
need not be here. Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from warploom.cli.arguments import ConfigurationFile
from warploom.cli.operations import operation_options, operations_of
from warploom.cli.output import Output, reporting
from warploom.cli.shapes import check_one, shape_options, told_spaces
from warploom.errors import ConfigurationError
from warploom.generator.configurations import spaces
from warploom.generator.gpus import DEFAULT

if TYPE_CHECKING:
    from warploom.runtime.dispatch import Alternative, Choice
    from warploom.runtime.explanation import Explanation


@click.command("explain", epilog=told_spaces())
@click.argument("path", metavar="FAMILY|FILE", type=ConfigurationFile(tuple(spaces())))
@operation_options
@shape_options
@click.option("--gpu", help=f"The GPU that calls run on, such as {DEFAULT.name!r} (default: here).")
@reporting
def command(
    output: Output,
    path: Path,
    fields: Sequence[tuple[str, str]],
    epilogue: str,
    shapes: Sequence[str],
    model: str | None,
    cells: bool,
    rows: Sequence[int],
    gpu: str | None,
) -> None:
    """Say which kernel calls run at given shapes, and why.

    FAMILY alone is its operation in bf16; --set and --epilogue say which other one. FILE is a
    configuration, whose operations are explained, whatever its schedules. An attention is explained
    with the kernel of its gradients.

    \b
    Examples:
      warploom explain gemm --shapes 4096x6144x4096 --gpu h200
      warploom explain gemm --shapes 4096x6144x4096 --gpu h200 --epilogue bias,gelu_tanh,residual
      warploom explain gemm --set a=e4m3,b=e4m3 --shapes 16x6144x4096 --gpu h200 --json
      warploom explain attention_forward --set dim=128,mask=causal --shapes 1x32x8x4096 --gpu h200
    """
    check_one("explain", shapes, model, rows, cells=cells)
    from warploom.generator.records import problem_text
    from warploom.runtime.explanation import Explanation
    from warploom.runtime.families import family
    from warploom.runtime.targets import ahead_of_time
    from warploom.tuning.problems import shapes_of

    wanted = operations_of(path, fields, epilogue)
    target = ahead_of_time(gpu)
    told = []
    for operation in wanted:
        known = family(operation.family)
        for shape in shapes_of(operation, shapes, model, rows):
            for call in known.dense(operation, shape):
                drafted = call.draft(target)
                found = Explanation.on(target, drafted, known.gradients(drafted, target))
                told.append((problem_text(operation, shape), found))
    if not told:
        raise ConfigurationError(
            f"{path}: no shapes",
            rule="an operation must have shapes that are given, or that --model or --cells names",
            fix="give --shapes",
        )
    for number, (problem, found) in enumerate(told):
        output.line(f"{'' if number == 0 else chr(10)}problem  {problem}\n{found}")
    output.document(
        "explanations", [{"problem": problem, **_plain(found)} for problem, found in told]
    )


def _plain(found: Explanation) -> dict[str, Any]:
    """An explanation as JSON values; what other calls of this process did is no part of it."""
    told = {one.name: getattr(found, one.name) for one in dataclasses.fields(found)}
    del told["counters"], told["operations"]
    told["runners_up"] = [_kernel(one) for one in found.runners_up]
    told["gradients"] = found.gradients and {
        **_kernel(found.gradients),
        "reason": found.gradients.reason,
    }
    return told


def _kernel(one: Alternative | Choice) -> dict[str, Any]:
    source = {"source": one.source} if hasattr(one, "source") else {}
    return {"kernel": one.spec.name, "seconds": one.seconds, **source}
