"""The decode kernels that the gpu tests run, and the shapes; all are built beforehand, in parallel.

Options and schedules are in pairwise.yaml: every two values that are legal together are in one
kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, cast

import yaml

from warploom.generator.families import family
from warploom.generator.families.attention_decode import (
    DecodeOperation,
    DecodeSchedule,
    DecodeShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose
from warploom.runtime.families.attention_decode.call import INVARIANT

ARCH = "sm_90a"
PAIRWISE = Path(__file__).with_name("pairwise.yaml")


@dataclass(frozen=True)
class Shape:
    """Extents of a call: heads of one kv head, and bounds of what a sequence has."""

    batch: int
    kv_heads: int
    group: int
    seq_q: int
    seq_k: int

    @property
    def heads(self) -> int:
        """Of q."""
        return self.kv_heads * self.group


SHAPES: dict[str, Shape] = {
    "one key": Shape(3, 1, 1, 2, 1),
    "ragged": Shape(7, 3, 5, 3, 709),
    "more items than blocks": Shape(97, 3, 4, 2, 333),
    "long": Shape(2, 1, 8, 2, 20_011),
    "more rows than a tile": Shape(5, 2, 16, 9, 613),
    "every row": Shape(3, 1, 32, 8, 1031),
    "few keys": Shape(1, 2, 4, 1, 300),
    "many keys": Shape(30, 4, 4, 1, 1200),
    "rows of two warps": Shape(6, 3, 8, 3, 500),
}


def operation(**fields: Any) -> DecodeOperation:
    """Return an operation on caches whose lengths the device knows, of dim 128 in bf16."""
    return DecodeOperation(**{"element": "bf16", "dim": 128, "lengths": True, **fields})


def spec(of: DecodeOperation, **fields: Any) -> KernelSpec:
    """Return a kernel of a schedule; SpecificationError for one that is not legal."""
    return KernelSpec(ARCH, of, family(of.family).complete(ARCH, of, fields))


def chosen(of: DecodeOperation, shape: Shape) -> KernelSpec:
    """Return the kernel that the table has for a shape."""
    batch, seq_k = shape.batch, -(-shape.seq_k // (of.page or 1)) * (of.page or 1)
    if of.batch_invariant:  # for which the batch has no say
        batch, seq_k = INVARIANT
    return choose(of, DecodeShape(batch, shape.heads, shape.kv_heads, shape.seq_q, seq_k)).spec


def of(kernel: KernelSpec) -> DecodeOperation:
    """What a kernel computes."""
    return cast("DecodeOperation", kernel.operation)


def by(kernel: KernelSpec) -> DecodeSchedule:
    """How a kernel computes it."""
    return cast("DecodeSchedule", kernel.schedule)


def short(kernel: KernelSpec) -> str:
    """The kernel's name without what all names share."""
    return kernel.name.removeprefix("attention_decode_sm90a_")[:-9]


def fitting(kernel: KernelSpec, shape: Shape) -> Shape:
    """The shape, where a mask leaves something out: else a call takes a kernel without."""
    mask = of(kernel).mask
    rows, keys = max(shape.seq_q, 2 if mask == "causal" else 1), max(shape.seq_k, 3)
    return replace(shape, seq_q=rows, seq_k=keys if mask == "window" else shape.seq_k)


def lengths(shape: Shape, seed: int = 0) -> list[int]:
    """Keys of each sequence: none and one, all, what ends a tile or not, and any others."""
    random = Random(f"{shape} {seed}")
    known = [shape.seq_k, 1, 0, 64, 65, 127, 128, 129, shape.seq_k - 1]
    random.shuffle(known)
    drawn = [random.randint(0, shape.seq_k) for _ in range(shape.batch)]
    some = [length for length in known if 0 <= length <= shape.seq_k]
    count = min(len(some), -(-shape.batch // 2))
    return random.sample([*some[:count], *drawn[count:]], shape.batch)


# ---- Tables --------------------------------------------------------------------------------------

OPTIONS = [
    spec(operation(**one["of"]), **one["by"]) for one in yaml.safe_load(PAIRWISE.read_text())
]
# One option each, by the table: what fails here fails for that option.
SINGLE: dict[str, DecodeOperation] = {
    "plain": operation(),
    "all keys": operation(lengths=False),
    "fp16": operation(element="fp16"),
    **{f"dim {dim}": operation(dim=dim) for dim in (64, 96, 256)},
    **{f"page {page}": operation(page=page) for page in (16, 32, 64, 128, 256)},
    "causal": operation(mask="causal"),
    "starts": operation(starts=True),
    "starts, causal, pages": operation(starts=True, mask="causal", page=16),
    "window": operation(mask="window"),
    "softcap": operation(softcap=True),
    "sinks": operation(sinks="same"),
    "sinks in fp32": operation(sinks="fp32"),
    "packed keys": operation(keys="packed", lengths=False),
    "packed queries": operation(queries="packed", mask="causal"),
    "e4m3": operation(cache="e4m3"),
    "e4m3, scales of heads": operation(cache="e4m3", scales="head"),
    "e4m3, scales of tokens": operation(cache="e4m3", scales="token", page=16),
    "e4m3, fp16": operation(element="fp16", cache="e4m3", scales="head", dim=64),
    "int8, scales of heads": operation(cache="int8", scales="head", page=64),
    "int8, scales of tokens": operation(cache="int8", scales="token"),
    "batch_invariant": operation(batch_invariant=True),
    "batch_invariant, page 16": operation(batch_invariant=True, page=16),
}
_OFTEN = ("plain", "page 16", "causal", "dim 256", "e4m3, scales of heads", "batch_invariant")
TABLE = {
    (name, shape): chosen(one, SHAPES[shape])
    for name, one in SINGLE.items()
    for shape in (
        *("ragged", "long", "more rows than a tile"),
        *(("few keys", "many keys", "rows of two warps") if name in _OFTEN else ()),
    )
    if name != "causal" or SHAPES[shape].seq_q > 1  # a last row alone needs no mask
}
SIMPLE = {  # for tests of something else than the kernel itself
    "plain": spec(operation(), rows=16, keys=128),
    "small": spec(operation(dim=64), rows=16, keys=64, warps=4, ctas_per_sm=2),
    "pages": spec(operation(page=16), rows=16, keys=64, warps=4),
    "causal": spec(operation(mask="causal", page=64), rows=32, keys=64, warps=4),
    "e4m3": spec(operation(cache="e4m3", scales="head", page=16), rows=16, keys=128),
    "tokens": spec(operation(cache="e4m3", scales="token", page=64), rows=16, keys=64, warps=4),
    "packed": spec(
        operation(keys="packed", queries="packed", lengths=False, mask="causal"),
        rows=16,
        keys=64,
        warps=4,
    ),
    "invariant": spec(operation(batch_invariant=True, page=16), rows=16, keys=64, warps=4),
    "clusters": spec(operation(page=16), rows=16, keys=64, warps=4, cluster=4),
}
USUAL = list(dict.fromkeys((*TABLE.values(), *SIMPLE.values())))
ALL = list(dict.fromkeys((*USUAL, *OPTIONS)))
