"""Attention backward: dq, dk and dv by recomputation, on Hopper's TMA and wgmma."""

from __future__ import annotations

from warploom.generator.families.attention_backward.launch import (
    AttentionBackwardProblem,
    launches,
    workspaces,
)
from warploom.generator.families.attention_backward.layout import (
    AttentionBackwardLayout,
    attention_backward_layout,
)
from warploom.generator.families.attention_backward.names import parse_name
from warploom.generator.families.attention_backward.parameters import parameters
from warploom.generator.families.attention_backward.rules import (
    complete,
    operation_reasons,
    schedule_reasons,
    suits,
)
from warploom.generator.families.attention_backward.schedule import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_backward.template import context
from warploom.generator.families.family import Family

__all__ = [
    "FAMILY",
    "AttentionBackwardLayout",
    "AttentionBackwardOperation",
    "AttentionBackwardProblem",
    "AttentionBackwardSchedule",
    "attention_backward_layout",
    "complete",
    "suits",
]

FAMILY = Family(
    name="attention_backward",
    template="attention_backward.cu.jinja",
    operation=AttentionBackwardOperation,
    schedule=AttentionBackwardSchedule,
    automatic=(),
    operation_reasons=operation_reasons,
    schedule_reasons=schedule_reasons,
    complete=complete,
    parse_name=parse_name,
    parameters=parameters,
    context=context,
    launches=launches,
    workspaces=workspaces,
)
