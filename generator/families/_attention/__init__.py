"""What both passes of attention share: problem, parameters, tensor maps."""

from __future__ import annotations

from warploom.generator.families._attention.operation import DIMS, Dim
from warploom.generator.families._attention.problem import UNBOUNDED, AttentionProblem, Strides

__all__ = ["DIMS", "UNBOUNDED", "AttentionProblem", "Dim", "Strides"]
