"""In which order the backward's kv tiles are worked off."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families.attention_backward.layout import attention_backward_layout
from warploom.generator.families.attention_backward.problem import AttentionBackwardProblem, Tiles
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec
from warploom.generator.launches import DeviceLimits

# Of q, do and the sums of dq that blocks in flight work on where rows are bounded, or tiles listed:
# with k and v they stay in 50 MB of L2. Else all tiles take as long, and one head after the other
# is 1.5 to 2 % faster.
SECTION_BYTES = 32 << 20
# Kv tiles of a head that run at a time where they wait for each other's turns: each begins a step
# after the one before. With fewer less of q, do and the sums is found in L2.
TILES_IN_TURN = 4
# Rounds of blocks from which on kv tiles of a bounded mask add leftward. None waits for long then
# (d64 causal 2k: 0.92 of the speed in any order, else 0.85), but the longest end last. Only where
# several heads fit L2, as tiles work on different rows of q then (d256 causal 16k: 0.85, not 0.92).
LEFTWARD_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Order:
    """In which order kv tiles are worked off.

    By sections of `section` kv heads: the first tiles of all its heads, which are the longest of a
    causal mask, then the second, and so on; `leftward` from the last tiles on.
    """

    section: int
    leftward: bool


def order_of(
    spec: AttentionBackwardSpec,
    problem: AttentionBackwardProblem,
    device: DeviceLimits,
    tiles: Tiles,
) -> Order:
    """The order that keeps what is worked on in L2, and writers in turn."""
    operation, schedule = spec.operation, spec.schedule
    layout = attention_backward_layout(spec.architecture, operation, schedule)
    sharing = problem.heads // problem.kv_heads
    kv_head_bytes = sharing * problem.seq_q * problem.dim * (2 + 2 + 4)
    section, leftward = max(1, SECTION_BYTES // kv_head_bytes), False
    if operation.deterministic:
        at_a_time = max(1, device.multiprocessors // (layout.parts * schedule.cluster))
        rounds = tiles.kv_tiles * tiles.all_kv_heads / at_a_time
        bounded = operation.mask != "none"
        leftward = bounded and section > 1 and rounds >= LEFTWARD_ROUNDS
        if not leftward:
            section = max(section, -(-at_a_time // TILES_IN_TURN))
    elif operation.mask == "none" and not operation.blocks:
        section = 1
    return Order(min(section, tiles.all_kv_heads), leftward)
