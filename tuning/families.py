"""What tuning knows of each family: its shapes, its untuned choice, and how it is tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, cast

import yaml

from warploom.errors import ProblemError, SpecificationError, UnknownNameError
from warploom.generator.elements import element
from warploom.generator.families.gemm import GemmOperation, GemmProblem
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.shapes import AttentionShape, GemmShape, Shape
from warploom.generator.restore import LARGEST
from warploom.generator.specification import KernelSpec, Schedule
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.runtime import dispatch
from warploom.runtime.families._attention import dispatch as attention_dispatch
from warploom.runtime.families._attention.dispatch import Operation as AttentionOperation
from warploom.runtime.families._attention.problem import Extents
from warploom.runtime.families.attention_backward.trial import AttentionBackwardTrial
from warploom.runtime.families.attention_forward.trial import AttentionTrial
from warploom.runtime.families.gemm.trial import GemmTrial
from warploom.runtime.trial import Trial
from warploom.suggestions import suggestion

TOKENS, HIDDEN = 16_384, 2048  # of attention's cells: batch = tokens / seq, heads = hidden / dim


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning needs of a family; operations and shapes are its own.

    default   the spec that is run without tuning
    fitting   a schedule's kernel, for an architecture, where a problem can have it, else None
    trial     random operands of a problem, to verify and time kernels on
    parse     a shape as the command line has it; ProblemError for what is none
    cells     the shapes of benchmarks/cells.yaml: of a model, with these numbers of rows
    """

    default: Callable[[Any, Any, DeviceLimits], KernelSpec]
    fitting: Callable[[Any, Any, Schedule, str], KernelSpec | None]
    trial: Callable[[Any, Any, str, int], Trial]
    parse: Callable[[Any, str], Shape]
    cells: Callable[[Any, str | None, Sequence[int]], list[Shape]]


def tuned(family: str) -> Tuned:
    """Return what tuning knows of a family, or raise UnknownNameError."""
    try:
        return FAMILIES[family]
    except KeyError:
        raise UnknownNameError(
            f"family {family!r}", rule=f"tuning knows {', '.join(FAMILIES)}", fix="tune one of them"
        ) from None


@cache
def cells() -> dict[str, Any]:
    """benchmarks/cells.yaml, which the package has among its configurations."""
    content = resources.files("warploom.configs").joinpath("cells.yaml").read_text()
    return cast("dict[str, Any]", yaml.safe_load(content))


def _extents(text: str, names: Sequence[Sequence[str]], what: str) -> dict[str, int]:
    """The numbers of `4096x6144x4096`, named by whichever of `names` has as many."""
    numbers = text.split("x")
    fitting = [listed for listed in names if len(listed) == len(numbers)]
    if not fitting:
        forms = " or ".join("x".join(listed) for listed in names)
        rule = f"a shape of {what} must be {forms}"
        raise ProblemError(f"shape {text!r}", rule=rule, fix="count its extents")
    found = zip(fitting[0], numbers, strict=True)
    return {name: _number(text, name, number) for name, number in found}


def _number(text: str, name: str, number: str) -> int:
    """A number of a shape; ProblemError for one that no extent has."""
    if not re.fullmatch(r"0*[1-9][0-9]*", number):
        raise ProblemError(
            f"shape {text!r}: {name} {number!r}",
            rule="must be an integer greater than 0",
            fix="write positive numbers",
        )
    if len(number) > 10 or int(number) > LARGEST:
        raise ProblemError(
            f"shape {text!r}: {name} {number}",
            rule=f"must be at most {LARGEST}",
            fix="give a smaller one",
        )
    return int(number)


def _named(text: str, given: Sequence[str], wanted: Sequence[str], tokens: str) -> dict[str, int]:
    """The numbers of `window=128` and its like, which are those `wanted` for an operation."""
    found = {}
    for name, _, number in (entry.partition("=") for entry in given):
        if name not in wanted:
            rule = f"must be {' and '.join(wanted)}" if wanted else "must be left out"
            fix = suggestion(name, wanted) or "it is of masks that are windows, or packed lengths"
            raise ProblemError(f"shape {text!r}: {name!r}", rule=f"{rule} for {tokens}", fix=fix)
        found[name] = _number(text, name, number)
    if missing := "".join(f":{name}=NUMBER" for name in wanted if name not in found):
        raise ProblemError(
            f"shape {text!r}",
            rule=f"must end with {missing} for {tokens}",
            fix=f"for instance {text}{missing.replace('NUMBER', '1024')}",
        )
    return found


# ---- GEMM ----------------------------------------------------------------------------------------


def _gemm_store(operation: GemmOperation, shape: GemmShape) -> str:
    return "direct" if shape.n * element(operation.d).bytes % PITCH_BYTES else "tma"


def _gemm_default(operation: GemmOperation, shape: GemmShape, device: DeviceLimits) -> KernelSpec:
    problem = GemmProblem(
        *(shape.m, shape.n, shape.k),
        *(shape.k, shape.k, shape.n),
        batches=shape.batches,
    )
    return dispatch.untuned(operation, problem, _gemm_store(operation, shape), device).spec


def _gemm_fitting(
    operation: GemmOperation, shape: GemmShape, schedule: Schedule, arch: str
) -> KernelSpec | None:
    return dispatch.fitting(operation, schedule, _gemm_store(operation, shape), arch)


def _gemm_parse(operation: GemmOperation, text: str) -> GemmShape:
    names = ["batches", "m", "n", "k"] if operation.batched else ["m", "n", "k"]
    return GemmShape(**_extents(text, [names], "this product"))


def _gemm_cells(operation: GemmOperation, model: str | None, rows: Sequence[int]) -> list[Shape]:
    listed = cells()["gemm"]
    models = listed["models"]
    if model is not None and model not in models:
        raise UnknownNameError(
            f"model {model!r}",
            rule=f"benchmarks/cells.yaml has {', '.join(models)}",
            fix="name one of them, or give --shapes",
        )
    if operation.batched:
        return []
    which = models[model] if model else range(len(listed["weights"]))
    weights = [listed["weights"][index] for index in which]
    return [GemmShape(m, n, k) for n, k in weights for m in rows or listed["tuned_m"]]


# ---- Attention -----------------------------------------------------------------------------------


def _attention_default(
    operation: AttentionOperation, shape: AttentionShape, device: DeviceLimits
) -> KernelSpec:
    packed = operation.lengths == "packed"
    sizes = Extents(
        *(shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k, shape.dim),
        total_q=shape.total_q if packed else shape.seq_q,
        total_k=shape.total_k if packed else shape.seq_k,
        packed=packed,
    )
    return attention_dispatch.untuned(operation, sizes, device.arch).spec


def _attention_fitting(
    operation: AttentionOperation, shape: AttentionShape, schedule: Schedule, arch: str
) -> KernelSpec | None:
    return attention_dispatch.fitting(operation, schedule, shape.sharing, arch)


def _attention_parse(operation: AttentionOperation, text: str) -> AttentionShape:
    lead = ["batch", "heads", "kv_heads"]
    extents, *more = text.split(":")
    found = _extents(extents, [[*lead, "seq"], [*lead, "seq_q", "seq_k"]], "attention")
    seq = found.pop("seq", 0)
    found = {"seq_q": seq, "seq_k": seq, **found, "dim": operation.dim}
    packed = operation.lengths == "packed"
    wanted = (["window"] if operation.mask == "window" else []) + (["total"] if packed else [])
    given = _named(text, more, wanted, "_".join(operation.tokens))
    if found["heads"] % found["kv_heads"]:
        raise ProblemError(
            f"shape {text!r}", rule="heads must be a multiple of kv_heads", fix="change one of them"
        )
    if packed:
        total = given["total"]
        if not max(seq, found["batch"]) <= total <= found["batch"] * seq:
            raise ProblemError(
                f"shape {text!r}",
                rule="the total must lie between the longest sequence and all as long as it",
                fix="change total, batch or length",
            )
        found |= {"total_q": total, "total_k": total}
    return AttentionShape(**found, window=given.get("window", 0))


def _attention_cells(
    operation: AttentionOperation, model: str | None, rows: Sequence[int]
) -> list[Shape]:
    if model is not None:
        raise SpecificationError(
            f"--model {model} for attention",
            rule="a model names weights; attention has cells",
            fix="give --cells or --shapes",
        )
    if operation.lengths == "packed" or operation.mask == "window" or operation.softcap:
        return []
    listed = cells()["attention"]
    if operation.family.removeprefix("attention_") not in listed["passes"]:
        return []
    causal, dim = operation.mask == "causal", operation.dim
    found = []
    if dim in listed["dim"] and causal in listed["causal"]:
        for seq in rows or listed["seq"]:
            heads = HIDDEN // dim
            found.append(AttentionShape(max(1, TOKENS // seq), heads, heads, seq, seq, dim))
    found += [
        AttentionShape(batch, heads, kv_heads, seq, seq, dim)
        for batch, heads, kv_heads, seq, of_dim, of_causal in listed["grouped"]
        if (of_dim, of_causal) == (dim, causal) and (not rows or seq in rows)
    ]
    return list(found)


FAMILIES: dict[str, Tuned] = {
    "gemm": Tuned(_gemm_default, _gemm_fitting, GemmTrial, _gemm_parse, _gemm_cells),
    "attention_forward": Tuned(
        _attention_default,
        _attention_fitting,
        AttentionTrial,
        _attention_parse,
        _attention_cells,
    ),
    "attention_backward": Tuned(
        _attention_default,
        _attention_fitting,
        AttentionBackwardTrial,
        _attention_parse,
        _attention_cells,
    ),
}
