"""The shapes of products: kept, written on a command line, listed as cells; what these ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom.generator import configurations
from warploom.generator.elements import element
from warploom.generator.epilogue import Bias, gate_of
from warploom.generator.families._product.cells import ProductShape, layers
from warploom.generator.families.gemm.schedule import GemmOperation
from warploom.generator.shapes import Work


class GemmShape(ProductShape):
    """`batches` products of A [m, k] and B [k, n]. A layer's B is its weight."""

    __slots__ = ()


def parse_shape(operation: GemmOperation, text: str) -> GemmShape:
    """The shape that `4096x6144x4096` is, of batched products `16x4096x6144x4096`."""
    return GemmShape.parse(text, batched=operation.batched)


def cells(operation: GemmOperation, model: str | None, rows: Sequence[int]) -> list[GemmShape]:
    """The weights of a model or of all, at these numbers of rows; no batches are among them.

    Block scales have weights of their own, and where both are of 1x128 listed shapes. Groups have
    experts, at these numbers of rows of one.
    """
    listed = configurations.cells()["gemm"]
    if operation.groups != "none":
        return [] if model else _grouped(operation, rows, listed["grouped_gemm"])
    if operation.block_scales != "none" and not model:
        return _block_scaled(operation, rows, listed["block_scaled"])
    biased = any(isinstance(step, Bias) for step in operation.epilogue)
    weights = layers(model, biased=biased) if model else listed["weights"]
    if operation.batched:
        return []
    return [GemmShape(m, n, k) for n, k in weights for m in rows or listed["tuned_m"]]


def _grouped(
    operation: GemmOperation, rows: Sequence[int], listed: Mapping[str, Any]
) -> list[GemmShape]:
    if operation.groups == "k":
        return [GemmShape(n, k, total // groups, groups) for groups, n, k, total in listed["k"]]
    tuned = listed["tuned"]
    return [
        GemmShape(m, n, k, groups) for groups, n, k in tuned["weights"] for m in rows or tuned["m"]
    ]


def _block_scaled(
    operation: GemmOperation, rows: Sequence[int], listed: Mapping[str, Any]
) -> list[GemmShape]:
    if operation.batched:
        return []
    if operation.block_scales == "row_row":
        return [GemmShape(*one) for one in listed["row_row"] if not rows or one[0] in rows]
    return [GemmShape(m, n, k) for n, k in listed["weights"] for m in rows or listed["tuned_m"]]


def extents_of_cell(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    """The extents of a measured cell; None where it does not say enough."""
    if not {"m", "n", "k"} <= problem.keys():
        return None
    return {**{name: problem[name] for name in ("m", "n", "k")}, "batches": problem.get("batch", 1)}


def work(operation: GemmOperation, shape: GemmShape) -> Work | None:
    """Count a dense GEMM; None of block-sparse ones, whose blocks the shape does not tell."""
    if operation.sparse != "none":
        return None
    m, n, k = shape.m, shape.n, shape.k
    a, b, d = (element(name) for name in (operation.a, operation.b, operation.d))
    stored = n // 2 if gate_of(operation.epilogue) else n
    moved = m * k * a.bytes + n * k * b.bytes + m * stored * d.bytes
    moved += sum(step.moved(m, n, d) for step in operation.epilogue)
    return Work(2.0 * m * n * k * shape.batches, float(moved * shape.batches), a.bits)
