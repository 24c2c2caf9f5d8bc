"""What the first lines of a kernel say of its roles, registers, shared memory and barriers."""

from __future__ import annotations

from typing import Any

from warploom.generator.families._attention.header import memory, registers, table
from warploom.generator.families.attention_backward.layout import WARPS, AttentionBackwardLayout
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec
from warploom.generator.wgmma import TemplateText

WRITERS = 2  # warps that add dQ, where it leaves by TMA

# Each line is what the tensor cores do, and what runs under it.
STEPS = {
    "serial": (
        ("S^T = K Q^T", ""),
        ("dP^T = V dO^T", "P = exp(S - LSE), as far as ptxas leaves it there"),
        ("dV += P^T dO", "dS = P (dP - delta), to shared memory"),
        ("dQ = dS K", ""),
        ("dK += dS^T Q", "dQ leaves"),
    ),
    "overlapped": (
        ("dP^T = V dO^T", "P = exp(S - LSE), as far as ptxas leaves it there"),
        ("dV += P^T dO", "dS = P (dP - delta), to shared memory"),
        ("dK += dS^T Q, dQ = dS K", "the consumers meet"),
        ("S^T = K Q^T of the next step", "dQ leaves"),
    ),
    "pair_serial": (
        ("S^T = K Q^T", ""),
        ("dP^T = V dO^T", "P = exp(S - LSE), to shared memory"),
        ("dV += P^T dO", "dS = P (dP - delta), to shared memory, and to the peer"),
        ("dQ = dS K, with dS of both CTAs", ""),
        ("dK += dS^T Q", "dQ leaves"),
    ),
    "pair_overlapped": (
        ("dP^T = V dO^T", "P = exp(S - LSE), to shared memory"),
        ("dV += P^T dO", "dS = P (dP - delta), to shared memory, and to the peer"),
        ("dK += dS^T Q, dQ = dS K, with dS of both CTAs", "dS of the peer arrives"),
        ("S^T = K Q^T of the next step", "dQ leaves"),
    ),
}


def first_lines(
    spec: AttentionBackwardSpec, layout: AttentionBackwardLayout, steps: str, makers: int
) -> dict[str, Any]:
    """What the first lines are rendered with."""
    schedule = spec.schedule
    consumers = schedule.warpgroups
    held = [f"dK {layout.columns // 2}", f"dV {layout.value_columns // 2}"]
    held += [f"S {layout.q_rows // 2}", f"dP {layout.q_rows // 2}", f"dQ {layout.query_n // 2}"]
    held += [f"P and dS {layout.q_rows // 4} each"]
    held += [f"V {4 * layout.held_steps}"] if layout.held_steps else []
    return {
        "registers": registers(consumers, layout.producer_registers, layout.register_budget),
        "held": f"{', '.join(held)}, not all at a time; about {layout.registers} of "
        f"{layout.register_budget}",
        "memory": _memory(spec, layout),
        "barriers": _barriers(spec, layout, makers),
        "timeline": table(STEPS[steps]),
    }


def _memory(spec: AttentionBackwardSpec, layout: AttentionBackwardLayout) -> TemplateText:
    stages = f"{layout.stages} stage{'s' if layout.stages > 1 else ''} x"
    do_stages = f"{layout.do_stages} stage{'s' if layout.do_stages > 1 else ''} x"
    ds_stages = f"{layout.ds_stages} stage{'s' if layout.ds_stages > 1 else ''} x"
    buffers = [
        ("k", layout.kv_bytes, f"{layout.kv_rows} rows"),
        ("v", layout.v_bytes, f"{layout.kv_rows} rows"),
        ("q", layout.stages * layout.q_bytes, f"{stages} {layout.q_bytes:,}"),
        ("d_o", layout.do_stages * layout.do_bytes, f"{do_stages} {layout.do_bytes:,}"),
        ("ds", layout.ds_stages * layout.ds_bytes, f"{ds_stages} {layout.ds_bytes:,}"),
        ("p", layout.p_bytes, "2 stages of the CTA's own rows"),
        ("peer_k", layout.peer_bytes, "rows of K that the peer has, for dQ"),
        ("sums", layout.sums_bytes, "dQ on its way out"),
        ("staging", layout.staging_bytes, "a warp's part of a bias or a mask"),
    ]
    rest = layout.shared_bytes - sum(size for _, size, _ in buffers)
    words = "words of dropout, " if spec.operation.dropout else ""
    buffers.append(("statistics", rest, f"LSE and delta of Q's rows, {words}barriers"))
    return memory(buffers, layout.shared_bytes)


def _barriers(
    spec: AttentionBackwardSpec, layout: AttentionBackwardLayout, makers: int
) -> TemplateText:
    operation, schedule = spec.operation, spec.schedule
    consumers, pair = schedule.warpgroups, schedule.cluster_split == "rows"
    warps = f"{WARPS * consumers} consumer warps"
    rows = [
        ("barrier", "arrivals", "who waits", "guards"),
        ("k_full, v_full", "producer + bytes", "consumers", "K and V, loaded once"),
        ("q_full, do_full", "producer + bytes", "consumers", "a stage of Q, LSE, delta; of dO"),
        ("q_empty, do_empty", warps, "producer", "the same"),
    ]
    if pair:
        rows += [
            ("peer_full", "bytes of the peer", "consumers", "the peer's part of dS"),
            ("peer_empty", f"{warps} of the peer", "consumers", "dS that was sent to the peer"),
        ]
    elif layout.ds_stages == 1:
        rows.append(("ds_empty", warps, "consumers", "the only stage of dS"))
    if schedule.accumulate == "bulk":
        rows += [
            ("sums_full", warps, "a writer", "dQ of every second step"),
            ("sums_empty", "a writer", "consumers", "the same"),
        ]
    if operation.dropout:
        rows += [
            ("words_full", f"{makers} maker{'s' if makers > 1 else ''}", "consumers", "dropout"),
            ("words_empty", warps, "makers", "the same"),
        ]
    if operation.deterministic and schedule.cluster_size > 1:
        rows.append(("ticket_full", "bytes of CTA 0", "all CTAs but 0", "the cluster's ticket"))
    rows.append(("named 1", "all consumers", "all consumers", "dS is written: meet()"))
    if schedule.cluster == 1:
        rows.append(("named 2 + w", "warpgroup w", "warpgroup w", "dK is staged"))
    return table(rows)
