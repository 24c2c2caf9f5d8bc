"""Attention forward: o = softmax(scale q k^T) v, exact, on Hopper's TMA and wgmma."""

from __future__ import annotations

from warploom.generator.families.attention_forward.launch import (
    UNBOUNDED,
    AttentionProblem,
    launches,
    q_tiles,
    workspaces,
)
from warploom.generator.families.attention_forward.layout import AttentionLayout, attention_layout
from warploom.generator.families.attention_forward.names import parse_name
from warploom.generator.families.attention_forward.parameters import parameters
from warploom.generator.families.attention_forward.rules import (
    complete,
    operation_reasons,
    schedule_reasons,
)
from warploom.generator.families.attention_forward.schedule import (
    DIMS,
    AttentionOperation,
    AttentionSchedule,
)
from warploom.generator.families.attention_forward.template import context
from warploom.generator.families.family import Family

__all__ = [
    "DIMS",
    "FAMILY",
    "UNBOUNDED",
    "AttentionLayout",
    "AttentionOperation",
    "AttentionProblem",
    "AttentionSchedule",
    "attention_layout",
    "complete",
    "q_tiles",
]

FAMILY = Family(
    name="attention_forward",
    template="attention_forward.cu.jinja",
    operation=AttentionOperation,
    schedule=AttentionSchedule,
    automatic=(),
    operation_reasons=operation_reasons,
    schedule_reasons=schedule_reasons,
    complete=complete,
    parse_name=parse_name,
    parameters=parameters,
    context=context,
    launches=launches,
    workspaces=workspaces,
    revision=2,  # since outputs are rescaled less often where that is `needed`
)
