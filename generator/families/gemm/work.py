"""What a GEMM asks of any kernel, for a roofline."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families.gemm.schedule import GemmOperation
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.shapes import Work


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
