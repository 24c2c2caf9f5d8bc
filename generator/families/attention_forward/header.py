"""What the first lines of a kernel say of its roles, registers, shared memory and barriers."""

from __future__ import annotations

from typing import Any

from warploom.generator.families._attention.header import memory, registers, table
from warploom.generator.families.attention_forward.layout import WARPS, AttentionLayout
from warploom.generator.families.attention_forward.schedule import AttentionSpec

STEPS = {
    "overlapped": (
        ("wgmma", "S(n) = Q K(n)^T", "O += P(n+1) V(n+1)", "S(n-1) ..."),
        ("ALU", "", "softmax of S(n)", ""),
    ),
    "serial": (
        ("wgmma", "S(n) = Q K(n)^T", "", "O += P(n) V(n)", "S(n-1) ..."),
        ("ALU", "", "softmax of S(n)", "", ""),
    ),
    "eight": (
        ("wgmma", "", "O += P(n) V(n)", "S(n-1) = Q K(n-1)^T", ""),
        ("ALU", "softmax of S(n)", "", "", "softmax of S(n-1) ..."),
    ),
}


def first_lines(
    spec: AttentionSpec, layout: AttentionLayout, steps: str, makers: int
) -> dict[str, Any]:
    """What the first lines are rendered with."""
    operation, schedule = spec.operation, spec.schedule
    consumers, dropout = schedule.warpgroups, operation.dropout
    warps = f"{WARPS * consumers} consumer warps" if consumers > 1 else f"{WARPS} consumer warps"
    q = layout.q_stages * consumers * layout.q_bytes
    k, v = layout.stages * layout.kv_bytes, layout.stages * layout.v_bytes
    rest = layout.shared_bytes - q - k - v - layout.staging_bytes
    buffers = (
        ("q", q, f"{layout.q_stages} x {consumers} warpgroups x {layout.q_bytes:,}"),
        ("k", k, f"{layout.stages} stages x {layout.kv_bytes:,}"),
        ("v", v, f"{layout.stages} stages x {layout.v_bytes:,}"),
        ("staging", layout.staging_bytes, "a warp's part of a bias or a mask"),
        ("work", rest, f"work,{' words of dropout,' if dropout else ''} barriers"),
    )
    barriers = [
        ("barrier", "arrivals", "who waits", "guards"),
        (
            "q_full",
            "producer + bytes",
            "a consumer, makers" if dropout else "a consumer",
            "its Q, and its Work",
        ),
        (
            "q_empty",
            f"{WARPS} consumer warps{f', {makers} makers' if dropout else ''}",
            "producer",
            "the same",
        ),
        ("k_full, v_full", "producer + bytes", "consumers", "a stage of K, of V"),
        ("k_empty, v_empty", warps, "producer", "the same"),
    ]
    if dropout:
        barriers += [
            ("words_full", f"{makers} makers", "consumers", "which weights a tile drops"),
            ("words_empty", warps, "makers", "the same"),
        ]
    if schedule.pingpong:
        turn = ("named 4 + w", "warpgroup before", "warpgroup w", "its turn to issue wgmma")
        barriers.append(turn)
    bits = operation.element_of("v").bits
    held = [f"S {schedule.kv_tile // 2}", f"O {operation.value_dim // 2}"]
    held += [f"P V {operation.value_dim // 2}"] if operation.promoted else []
    held += [f"P {schedule.kv_tile * bits // 64}"]
    return {
        "registers": registers(consumers, layout.producer_registers, layout.register_budget),
        "held": f"{', '.join(held)}; about {layout.registers} of {layout.register_budget}",
        "memory": memory(buffers, layout.shared_bytes),
        "barriers": table(barriers),
        "timeline": table(STEPS[steps]),
    }
