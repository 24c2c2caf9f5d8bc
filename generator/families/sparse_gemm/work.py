"""What a GEMM with 2:4 sparse weights asks of any kernel, for a roofline."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm.schedule import SparseGemmOperation
from warploom.generator.families.sparse_gemm.shape import SparseGemmShape
from warploom.generator.shapes import Work


def work(operation: SparseGemmOperation, shape: SparseGemmShape) -> Work:
    """Count the multiplications by values that are stored: half of those of a dense weight."""
    m, n, k = shape.m, shape.n, shape.k
    kind = element(operation.element)
    weight = n * k // 2 * kind.bytes + n * k // 8  # values, and two bits of metadata each
    return Work(1.0 * m * n * k, float(weight + (m * k + m * n) * kind.bytes), kind.bits)
