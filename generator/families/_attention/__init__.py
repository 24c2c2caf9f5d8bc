"""What both passes of attention share: shapes, problem, parameters, tensor maps."""

from __future__ import annotations

from warploom.generator.families._attention.operation import DIMS, GRADIENT_DIMS, UNLIKE_DIMS
from warploom.generator.families._attention.problem import UNBOUNDED, AttentionProblem
from warploom.generator.families._attention.shape import AttentionShape

__all__ = [
    "DIMS",
    "GRADIENT_DIMS",
    "UNBOUNDED",
    "UNLIKE_DIMS",
    "AttentionProblem",
    "AttentionShape",
]
