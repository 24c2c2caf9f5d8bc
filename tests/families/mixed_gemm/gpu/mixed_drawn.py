"""Random legal kernels and problems for them: the rules must agree with what the GPU takes.

`WARPLOOM_SAMPLES_SEED` draws others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import Any, get_args, get_type_hints

import mixed_cases as cases

from warploom.errors import SpecificationError
from warploom.generator.elements import element
from warploom.generator.epilogue import STEPS
from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmSchedule
from warploom.generator.formats import weight_format
from warploom.generator.specification import KernelSpec

COUNT = 60
SEED = int(os.environ.get("WARPLOOM_SAMPLES_SEED", "1"))
SOURCES = {
    field: get_args(get_type_hints(MixedGemmSchedule)[field])
    for field in (
        "multiply",
        "scaled",
        "consumers",
        "warp_split_k",
        "ctas_per_sm",
        "raster",
        "store",
        "cluster_split_k",
    )
}
OUTPUTS = get_args(get_type_hints(MixedGemmOperation)["d"])


@dataclass(frozen=True)
class Drawn:
    """A kernel, and a problem that it can store."""

    kernel: KernelSpec
    shape: tuple[int, int, int]

    def __str__(self) -> str:
        """Everything that it takes to make the sample again."""
        return f"{'x'.join(map(str, self.shape))} {self.kernel.name}"


def draw(count: int, seed: int) -> list[Drawn]:
    """Return `count` samples, whatever their kernels' operations and schedules."""
    random = Random(seed)
    found: dict[KernelSpec, Drawn] = {}
    while len(found) < count:
        kernel = _kernel(random)
        if kernel is not None and kernel not in found:
            m, n, k = (random.choice((1, 8, 63, 129, 257, 700, 1531)) for _ in range(3))
            found[kernel] = Drawn(kernel, cases.fitting((m, n, k), kernel))
    return list(found.values())


def _kernel(random: Random) -> KernelSpec | None:
    a, b = random.choice(cases.PAIRS)
    row = weight_format(b)
    rows = (*range(8, 72, 8), 96, 128, 256) if element(a).bits == 16 else (8, 16, 32, 64, 96, 128)
    fields: dict[str, Any] = {
        "tile": (random.choice(rows), 64 * random.choice((1, 2, 4)), random.choice((128, 256))),
        "swizzle_size": random.choice((1, 3, 8, 64)),
        "stream_k": random.random() < 0.4,
        "lookahead": random.choice((0, 1, 2)) if a == "e4m3" else 0,
        **{field: random.choice(values) for field, values in SOURCES.items()},
    }
    try:
        of = MixedGemmOperation(
            a,  # type: ignore[arg-type]
            b,  # type: ignore[arg-type]
            random.choice(OUTPUTS),
            random.choice(row.groups) or 0,  # type: ignore[arg-type]
            random.choice(row.scales),  # type: ignore[arg-type]
            tuple(random.sample(STEPS, random.choice((0, 0, 1, 2, 3)))),
        )
        most = cases.schedule(cases.spec(fields["tile"], of=of, **_but(fields, "tile"))).stages
        return cases.spec(
            fields["tile"], of=of, stages=random.randint(2, most), **_but(fields, "tile")
        )
    except SpecificationError:
        return None


def _but(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {field: value for field, value in fields.items() if field != name}


DRAWN = draw(COUNT, SEED)
