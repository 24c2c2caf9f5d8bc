"""How long an attention takes: rounds of tiles of q, each so many steps over tiles of k and v.

In a step the tensor core computes scores and output while the special function units take the
exponentials of another; the slower decides, softly, and what a schedule does not overlap is added.
Under a causal mask tiles differ in length: the busiest multiprocessor has the mean and a share of
the longest tile, which depends on how tiles are dealt.
"""

from __future__ import annotations

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families._attention.modifiers import COSTS, exponentials
from warploom.generator.families.attention_forward.launch import section_of
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)
from warploom.generator.families.attention_forward.work import Work, work_of
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
    "free": 0.05,  # more of it where warpgroups do not take turns,
    "alone": 0.05,  # and where one has nobody else's products beside it
    "third": 0.7,  # of it where three warpgroups take turns, or do not
    "step": 1e-7,  # seconds of a step that nothing hides: barriers, first wait
    "l2_bandwidth": 4e10,  # bytes a second of k and v that one multiprocessor gets of L2
    "misaligned": 0.5,  # more of that time where rows of a head begin within its sectors
    "tile": 1.5e-6,  # seconds of a tile beside its steps: q's load, the last division, o's store
    "store_bandwidth": 8e10,  # bytes a second at which one multiprocessor finishes o
    "single": 0.5,  # of the longest tile, that the last multiprocessor takes longer
    "static": 0.4,
    "dynamic": 0.3,
    "dealt": 0.1,  # more of all time where tiles that differ are dealt in advance
    "bounded": 0.3,  # of the exponentials' time, more in a step that a mask's bound goes through
    **COSTS,
    "hbm_bandwidth": 4.2e12,  # bytes a second of memory
}

SECTOR = 32  # bytes that L2 reads at least


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
    work = work_of(operation, schedule, shape)
    step, bounded = _step(constants, operation, schedule, shape)
    stored = schedule.q_tile * (operation.dim_v or operation.dim) * 2
    finish = constants["tile"] + stored / constants["store_bandwidth"]
    finish += work.bounded * bounded

    def tile(steps: float) -> float:
        return steps * step + finish

    times = tile(work.longest), tile(work.mean), tile(work.shortest)
    if operation.mask == "none" and operation.lengths == "fixed":
        busiest = -(-work.tiles // multiprocessors) * times[1]
        if schedule.scheduler == "single":
            busiest = work.tiles / multiprocessors * times[1] + constants["single"] * times[0]
    elif operation.mask == "causal" and operation.lengths == "fixed":
        busiest = _dealt(constants, schedule, shape, work, times, multiprocessors)
    else:
        dealt = constants["dealt"] if schedule.scheduler == "static" else 0.0
        rounds = work.tiles / multiprocessors
        busiest = rounds * times[1] * (1 + dealt) + constants[schedule.scheduler] * times[0]
        if operation.lengths == "packed" and schedule.scheduler == "static":
            # Who gets a longest tile gets as many others as all, and does not wait for them.
            others = -(-work.dealt // multiprocessors) - 1
            busiest = max(busiest, times[0] + others * times[1] * work.tiles / work.dealt)
    rows = shape.heads * (shape.total_q or shape.batch * shape.seq_q)
    keys = shape.kv_heads * (shape.total_k or shape.batch * shape.seq_k)
    dim, dim_v = operation.dim, operation.dim_v or operation.dim
    q, k, v = (operation.element_of(name).bytes for name in "qkv")
    moved = rows * (q * dim + 2 * dim_v) + keys * (k * dim + v * dim_v)
    memory = moved / constants["hbm_bandwidth"]
    return constants["launch"] + slowest(max(busiest, times[0]), memory)


def _dealt(
    constants: Value,
    schedule: AttentionSchedule,
    shape: AttentionShape,
    work: Work,
    times: tuple[float, float, float],
    multiprocessors: int,
) -> float:
    """The busiest multiprocessor's seconds of a causal mask, whose tiles shorten evenly.

    There and back, an even number of rounds has the same sum for all, an odd one a longest tile of
    the round more; what is left over comes on top. Taken from a counter, each tile one ahead of
    need, the second round is dealt as blocks begin: the longest may get its longest.
    """
    first, mean, last = times
    rounds = work.tiles / multiprocessors
    if schedule.scheduler != "static":
        second = first - (first - last) / rounds if rounds > 1 else 0.0
        balanced = rounds * mean + constants[schedule.scheduler] * last
        return max(first + second, balanced) if rounds <= 2 else balanced
    blocks = int(min(work.tiles, multiprocessors))
    kv_head_bytes = 4 * shape.seq_k * shape.dim
    whole = section_of(
        kv_head_bytes, shape.sharing, int(work.q_tiles), work.heads, blocks, dealt=True
    )
    sections, rounds = work.heads / whole, whole * work.q_tiles / blocks
    full = int(rounds + 1e-9)
    drop = (first - last) / rounds
    if full % 2 == 0:
        each = full * (first - drop * full / 2) + (first - drop * full if rounds > full else 0.0)
    else:
        each = (full - 1) * (first - drop * (full - 1) / 2) + first - drop * (full - 1)
        if rounds > full:
            each += first - drop * full - drop
    even = rounds * mean
    return (sections - 1) * (even + each) / 2 + each + constants["static"] * last


def _step(
    constants: Value,
    operation: AttentionOperation,
    schedule: AttentionSchedule,
    shape: AttentionShape,
) -> tuple[float, float]:
    """Seconds of one step of all warpgroups of a block, and what a bound adds to it."""
    q, kv = schedule.q_tile, schedule.kv_tile
    dim, dim_v = operation.dim, operation.dim_v or operation.dim
    # Products of q kv dim and q kv dim_v; the tensor core multiplies 4096 bytes a cycle.
    of_k, of_v = (operation.element_of(name).bytes for name in "kv")
    tensor = (of_k * dim + of_v * dim_v) * q * kv / 4096 / constants["tensor_clock"]
    cap = exponentials(constants, operation.modifiers)
    soft = cap * q * kv / 16 / constants["exponential_clock"] + constants["softmax"] * q
    if schedule.rescale == "always":  # or where a step's products are added in fp32
        soft += constants["rescaling"] * q * dim_v
    exposed = constants["overlapped" if schedule.overlap else "serial"]
    if not schedule.pingpong:
        exposed += constants["free"]
    if schedule.warpgroups == 1:  # nobody else's softmax runs under its products
        exposed += constants["alone"]
    if schedule.warpgroups == 3:
        exposed *= constants["third"]
    load = kv * (of_k + of_v) * shape.dim / constants["l2_bandwidth"]
    if of_k * shape.dim % SECTOR:
        load *= 1 + constants["misaligned"]
    bounded = constants["bounded"] * q * kv / 16 / constants["exponential_clock"]
    computed = max(tensor, soft) + exposed * min(tensor, soft) + constants["step"]
    return slowest(computed, load), bounded
