"""What a GEMM with quantized weights asks of any kernel, for a roofline."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families.mixed_gemm.launch import MixedGemmShape
from warploom.generator.families.mixed_gemm.schedule import MixedGemmOperation
from warploom.generator.formats import SCALE_TYPES
from warploom.generator.shapes import Work


def work(operation: MixedGemmOperation, shape: MixedGemmShape) -> Work:
    """Count operands once: codes and scales of W, A, and D."""
    m, n, k = shape.m, shape.n, shape.k
    a, d = element(operation.a), element(operation.d)
    scales = n * (k // operation.group if operation.group else 1)
    stored = n // 2 if gate_of(operation.epilogue) else n
    moved = n * k * operation.weight.bits / 8 + scales * SCALE_TYPES[operation.scale].bytes
    moved += m * k * a.bytes + m * stored * d.bytes
    moved += sum(step.moved(m, n, d) for step in operation.epilogue)
    return Work(2.0 * m * n * k * shape.batches, moved * shape.batches, a.bits)
