"""How many heads are worked off together, so that their keys and values stay in L2."""

from __future__ import annotations

# Of k and v that the tiles in flight are kept within: with q and o they then stay in 50 MB of L2.
BYTES = 32 << 20
# Where tiles are dealt in advance, each section is by itself, and what its last round leaves idle
# is lost: sections of fewer rounds grow until that is at most this share of all. (Four heads of 256
# rows over 12,506 columns, which BYTES allow, are 8 tiles, which leave most of an H200 idle:
# 688 us, and 185 with a counter.)
IDLE, ROUNDS = 0.1, 2


def section_of(
    kv_head_bytes: int, sharing: int, q_tiles: int, all_heads: int, blocks: int, *, dealt: bool
) -> int:
    """Return the query heads of a section: whole groups of `sharing`, of `q_tiles` each.

    dealt   to `blocks` in advance: then as many more as leave few of these idle
    """
    least = min(max(1, BYTES // kv_head_bytes) * sharing, all_heads)
    # Of several rounds the last has the shortest tiles, and every second section idles elsewhere.
    if not dealt or least * q_tiles >= ROUNDS * blocks:
        return least

    def idle(heads: int) -> float:
        whole, rest = divmod(all_heads, heads)
        rounds = whole * -(-heads * q_tiles // blocks) - (-rest * q_tiles // blocks)
        return rounds * blocks / (all_heads * q_tiles) - 1

    most = min(all_heads, least + int(blocks / IDLE / q_tiles) + 2 * sharing)
    tried: list[int] = [*range(least, most, sharing), all_heads]
    for heads in tried:
        if idle(heads) <= IDLE:
            return heads
    return min(tried, key=idle)
