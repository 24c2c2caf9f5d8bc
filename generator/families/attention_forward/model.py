"""How long an attention takes: rounds of tiles of q, each so many steps over tiles of k and v.

In a step the tensor core computes scores and output while the special function units take the
exponentials of another; the slower decides, softly, and what a schedule does not overlap is added.
Under a causal mask tiles differ in length: the busiest multiprocessor has the mean and a share of
the longest tile, which depends on how tiles are dealt.
"""

from __future__ import annotations

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)
from warploom.generator.model.arithmetic import Value, slowest

# Where a fit begins, and what it is drawn to where measurements do not tell.
START = {
    "launch": 3e-6,  # seconds of a launch in a graph
    "tensor_clock": 1.45e9,  # of the tensor core under load, in Hz
    "exponential_clock": 1.45e9,  # of the special function units: 16 exponentials a cycle
    "softmax": 4e-10,  # seconds of one row's other work in a step, of 64 rows of a warpgroup
    "rescaling": 5e-12,  # seconds of one element of the output, where every step rescales it
    "overlapped": 0.3,  # of the shorter of products and softmax that is not hidden
    "serial": 0.8,  # the same without overlap
    "free": 0.05,  # more of it where warpgroups do not take turns
    "step": 1e-7,  # seconds of a step that nothing hides: barriers, first wait
    "tile": 1.5e-6,  # seconds of a tile beside its steps: q's load, the last division, o's store
    "store_bandwidth": 8e10,  # bytes a second at which one multiprocessor finishes o
    "single": 0.5,  # of the longest tile, that the last multiprocessor takes longer
    "static": 0.4,
    "dynamic": 0.3,
    "softcap": 0.5,  # more exponentials' time where scores are capped
    "hbm_bandwidth": 4.2e12,  # bytes a second of memory
}


def seconds(
    constants: Value,
    operation: AttentionOperation,
    schedule: AttentionSchedule,
    shape: AttentionShape,
    multiprocessors: int,
) -> float:
    """Predict the time of one launch; shapes without scores take the launch alone."""
    if not (shape.batch and shape.heads and shape.seq_q and shape.seq_k):
        return constants["launch"]
    rows = shape.total_q or shape.batch * shape.seq_q
    padded = shape.batch * schedule.q_tile / 2 if shape.total_q else 0  # of each sequence's end
    tiles = shape.heads * (rows + padded) / schedule.q_tile
    if not shape.total_q:
        tiles = shape.heads * shape.batch * -(-shape.seq_q // schedule.q_tile)
    columns = shape.total_k / shape.batch if shape.total_k else shape.seq_k
    longest = _steps(operation, schedule, shape, shape.seq_k, last=True)
    mean = _steps(operation, schedule, shape, columns, last=False)
    step = _step(constants, operation, schedule)
    finish = constants["tile"] + schedule.q_tile * operation.dim * 2 / constants["store_bandwidth"]
    rounds = tiles / multiprocessors
    uneven = operation.mask != "none" or operation.lengths == "packed"
    if not uneven and schedule.scheduler != "single":
        rounds = -(-tiles // multiprocessors)
    work = rounds * (mean * step + finish)
    if uneven or schedule.scheduler == "single":
        work += constants[schedule.scheduler] * (longest * step + finish)
    read = 2 * shape.kv_heads * (shape.total_k or shape.batch * shape.seq_k)
    moved = 2 * operation.dim * (2 * shape.heads * rows + read)
    return constants["launch"] + slowest(work, moved / constants["hbm_bandwidth"])


def _steps(
    operation: AttentionOperation,
    schedule: AttentionSchedule,
    shape: AttentionShape,
    columns: float,
    *,
    last: bool,
) -> float:
    """Tiles of k and v that a tile of q goes through: the longest, or the mean of all."""
    seen = columns
    if operation.mask != "none":
        ramp = 0 if last else min(columns, shape.seq_q) / 2
        seen = max(1.0, columns - ramp + schedule.q_tile / 2)
    if shape.window:
        seen = min(seen, shape.window + schedule.q_tile)
    seen = min(seen, columns)
    return max(1.0, seen / schedule.kv_tile + (0.5 if operation.mask != "none" else 0.0))


def _step(constants: Value, operation: AttentionOperation, schedule: AttentionSchedule) -> float:
    """Seconds of one step of all warpgroups of a block."""
    q, kv, dim = schedule.q_tile, schedule.kv_tile, operation.dim
    # Two products of q kv dim; the tensor core does 2048 multiplications of 16 bits a cycle.
    tensor = 2 * q * kv * dim / 2048 / constants["tensor_clock"]
    cap = 1 + constants["softcap"] if operation.softcap else 1.0
    soft = cap * q * kv / 16 / constants["exponential_clock"] + constants["softmax"] * q
    if schedule.rescale == "always":
        soft += constants["rescaling"] * q * dim
    exposed = constants["overlapped" if schedule.overlap else "serial"]
    if not schedule.pingpong:
        exposed += constants["free"]
    if schedule.warpgroups == 1:  # nobody else's softmax runs under its products
        exposed += constants["free"]
    return max(tensor, soft) + exposed * min(tensor, soft) + constants["step"]
