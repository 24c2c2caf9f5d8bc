"""How long decoding takes: the launch, the cache through memory or its tiles through blocks, parts.

Blocks share all tiles of keys equally, and so have parts of two items at most; where an item's
chunks are its own, of as many as they have. A part waits for a round through memory, which nothing
hides; the end of a whole item is hidden by loads.
"""

from __future__ import annotations

from warploom.generator.families.attention_decode import work
from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeShape
from warploom.generator.families.attention_decode.schedule import DecodeSchedule
from warploom.generator.model.arithmetic import Value, slowest

START = {
    "launch": 4.2e-6,  # seconds, up to the first keys and from the last
    "bandwidth": 4.5e12,  # bytes a second of memory
    "step": 7e-7,  # seconds of a tile of keys beside its products
    "slice": 3e-8,  # seconds of a warp for 16 keys of 64 columns
    "decoded": 0.3,  # more of memory's time and of this where 8 bits become 16
    "shared": 9e-7,  # seconds of a part of an item that blocks share,
    "part": 1e-7,  # and of each part that the last of them adds up
}


def seconds(
    constants: Value,
    operation: DecodeOperation,
    schedule: DecodeSchedule,
    shape: DecodeShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call whose sequences all have seq_k keys, by these constants."""
    items, tiles = work.items(schedule, shape), work.tiles(schedule, shape)
    if not items:
        return constants["launch"]
    blocks = work.blocks(schedule, shape, multiprocessors)
    decoding = 1 if operation.cache == "same" else 1 + constants["decoded"]
    row_bytes = 2 * operation.dim * operation.kv.bytes  # of k and v
    memory = tiles * schedule.keys * row_bytes * decoding / constants["bandwidth"]
    slices = schedule.keys / (16 * schedule.key_warps) * operation.dim / 64
    step = constants["step"] + slices * constants["slice"] * decoding
    if schedule.cluster > 1:
        each = -(-tiles // items // schedule.cluster)  # of an item's tiles, a block's
        inside = -(-items * schedule.cluster // blocks) * each * step
        sent = constants["part"] * schedule.cluster
        return constants["launch"] + slowest(memory, inside) + sent
    inside = -(-tiles // blocks) * step
    chunks = work.chunks(operation, schedule, shape) if operation.batch_invariant else 1
    shared, parts = _shared(items, blocks, chunks)
    sharing = shared * constants["shared"] + parts * constants["part"]
    return constants["launch"] + slowest(memory, inside) + sharing


def _shared(items: int, blocks: int, chunks: int) -> tuple[int, float]:
    """How many parts of shared items a block has, and of how many parts such an item is."""
    if chunks > 1:
        return -(-items * chunks // blocks), chunks
    if items % blocks == 0:
        return 0, 0  # each has whole ones
    return min(2, -(-items // blocks)), blocks / items
