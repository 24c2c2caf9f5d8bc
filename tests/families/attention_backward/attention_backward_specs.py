"""The operation and the schedules that tests of the attention backward change."""

from __future__ import annotations

from warploom.generator.architectures import architecture
from warploom.generator.families import family
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)

FAMILY = family("attention_backward")
ARCH = architecture("sm_90a")
OPERATION = AttentionBackwardOperation("bf16", 128)
SCHEDULE = AttentionBackwardSchedule(64, 128, overlap=False)
SMALL = AttentionBackwardSchedule(64, 64, 1, overlap=False)  # legal for every operation
