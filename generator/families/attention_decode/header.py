"""What the first lines of a kernel say of its roles, registers, shared memory and barriers."""

from __future__ import annotations

from typing import Any

from warploom.generator.families._attention.header import memory, table
from warploom.generator.families.attention_decode.layout import DecodeLayout
from warploom.generator.families.attention_decode.schedule import DecodeSpec


def first_lines(spec: DecodeSpec, layout: DecodeLayout) -> dict[str, Any]:
    """What the first lines are rendered with."""
    operation, schedule = spec.operation, spec.schedule
    stages, warps, ctas = layout.stages, schedule.warps, schedule.ctas_per_sm
    token = operation.scales == "token"
    stage = f"{stages} stages x {layout.stage_bytes:,}"
    shared = stages * layout.stage_bytes
    buffers = [
        ("k", shared, stage),
        ("v", shared, stage),
        ("merged", layout.merged_bytes, f"O of {warps} warps, {layout.merged_columns} columns"),
        ("sums", layout.sums_bytes, "row max and row sum of each warp"),
    ]
    rest = layout.shared_bytes - sum(size for _, size, _ in buffers)
    others = "parts of the cluster's CTAs, " if schedule.cluster > 1 else ""
    others += "scales of K and V, " if token else ""
    buffers.append(("rest", rest, f"{others}barriers"))
    every = f"{warps} warp{'s' if warps > 1 else ''}"
    full = "loader, its lanes' copies, bytes" if token else "loader + bytes"
    barriers = [
        ("barrier", "arrivals", "who waits", "guards"),
        ("k_full, v_full", full, every, "a stage of K, of V"),
        ("k_empty, v_empty", every, "loader", "the same"),
    ]
    if schedule.cluster > 1:
        barriers.append(("parts_full", "bytes of all CTAs", every, "what the CTAs have of an item"))
        barriers.append(("cluster", "all warps of all CTAs", every, "parts, to be overwritten"))
    barriers.append(("named 1", every, every, "merged and sums"))
    share = f"{ctas} CTA{'s' if ctas > 1 else ''} of {schedule.threads} threads on an SM"
    return {
        "registers": f"{share} may have {layout.register_budget} each (launch bounds); about "
        f"{layout.registers} are expected: O {operation.dim // 2}, Q {operation.dim // 4}",
        "memory": memory(buffers, layout.shared_bytes),
        "barriers": table(barriers),
    }
