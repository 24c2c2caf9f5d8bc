"""Random legal kernels and problems for them: the rules must agree with what the GPU takes.

`WARPLOOM_SAMPLES_SEED` draws others; a case that was ever found wrong goes into ledger.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, get_args, get_type_hints

import gemm_cases as cases
import gemm_wider as wider

from warploom.errors import SpecificationError
from warploom.generator.elements import element
from warploom.generator.epilogue import STEPS
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, complete
from warploom.generator.families.gemm.rules import CLUSTERS
from warploom.generator.specification import KernelSpec

COUNT = 300
KINDS = list(dict.fromkeys(map(type, STEPS)))
SEED = int(os.environ.get("WARPLOOM_SAMPLES_SEED", "1"))


@dataclass(frozen=True)
class Sample:
    """A kernel, and a problem that it can store."""

    kernel: KernelSpec
    shape: tuple[int, int, int]
    batches: tuple[tuple[int, ...], tuple[int, ...]]

    def __str__(self) -> str:
        """Everything that it takes to make the sample again."""
        return f"{'x'.join(map(str, self.shape))} {self.batches} {self.kernel.name}"


def draw(count: int, seed: int) -> list[Sample]:
    """Return `count` samples, whatever their kernels' types, layouts and schedules."""
    random = Random(seed)
    found: dict[KernelSpec, Sample] = {}
    while len(found) < count:
        kernel = _kernel(random)
        if kernel is not None and kernel not in found:
            found[kernel] = _sample(random, kernel)
    return list(found.values())


def _choice(random: Random, source: type, field: str) -> Any:  # noqa: ANN401 (of any type)
    return random.choice(_values(source, field))


@cache  # hints are texts, which are evaluated each time
def _values(source: type, field: str) -> tuple[Any, ...]:
    return get_args(get_type_hints(source)[field])


def _kernel(random: Random) -> KernelSpec | None:
    a = _choice(random, GemmOperation, "a")
    b = random.choice(("e4m3", "e5m2")) if element(a).is_fp8 else a
    layouts = ("row", "col") if element(a).bits == 8 else random.choices(("row", "col"), k=2)
    drawn = random.sample(KINDS, random.choice((0, 0, 1, 2, 3)))
    steps = tuple(random.choice([one for one in STEPS if type(one) is kind]) for kind in drawn)
    swap = random.random() < 0.4
    rows, columns = random.choice((64, 128, 256)), 8 * random.randint(1, 32)
    fields: dict[str, Any] = {
        "tile": (*((columns, rows) if swap else (rows, columns)), 1024 // element(a).bits),
        "cluster": random.choice(CLUSTERS),
        "swizzle_size": random.choice((1, 3, 8, 64)),
        "swap_ab": swap,
        **{
            field: _choice(random, GemmSchedule, field)
            for field in (
                *(
                    "kernel_schedule",
                    "consumers",
                    "raster",
                    "store",
                    "producer_registers",
                    "l2_promotion",
                ),
            )
        },
    }
    if random.random() < 0.3:
        alone = {"cluster": (1, 1), "kernel_schedule": "cooperative", "producer_registers": 40}
        fields |= {"cluster_split_k": random.randint(2, 8), **alone}
    try:
        operation = GemmOperation(
            *(a, b, _choice(random, GemmOperation, "d"), *layouts, steps),
            accumulation="promoted" if element(a).is_fp8 and random.random() < 0.4 else "fast",
            batched=random.random() < 0.3,
        )
        schedule = complete("sm_90a", operation, fields)
        stages = random.randint(2, schedule.stages)
        return KernelSpec(
            "sm_90a", operation, complete("sm_90a", operation, {**fields, "stages": stages})
        )
    except SpecificationError:
        return None


def _sample(random: Random, kernel: KernelSpec) -> Sample:
    m, n, k = (random.choice((1, 8, 63, 129, 257, 700, 1531)) for _ in range(3))
    batches = random.choice(list(wider.BATCHES.values()))
    batched = kernel.operation.batched  # type: ignore[attr-defined]
    return Sample(kernel, cases.fitting((m, n, k), kernel), batches if batched else ((), ()))


SAMPLES = draw(COUNT, SEED)
