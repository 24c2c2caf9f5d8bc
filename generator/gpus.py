"""The one table of GPU kinds, and how the files that are kept for each are called.

A kind that has no row is taken to be like the default, scaled to its multiprocessors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from warploom.errors import UnknownNameError
from warploom.generator.architectures import titles


@dataclass(frozen=True, slots=True)
class GpuKind:
    """What is known of one GPU kind, from NVIDIA's data sheet or measured.

    name              as the driver gives it
    arch              the architecture that its kernels are for
    flops             dense products and sums a second by the operands' bits, for floors: what its
                      power sustains where that was measured, else the data sheet's peak
    bytes_per_second  of memory, likewise
    at_a_time         clusters of one to eight blocks that it holds at a time, as its driver counts
                      them (cuOccupancyMaxActiveClusters); empty where nobody asked it
    """

    name: str
    arch: str
    multiprocessors: int
    flops: Mapping[int, float]
    bytes_per_second: float
    at_a_time: Mapping[int, int] = field(default_factory=dict)


KINDS: dict[str, GpuKind] = {
    row.name: row
    for row in (
        GpuKind(
            "NVIDIA H200",
            "sm_90a",
            132,
            flops={16: 800e12, 8: 1600e12},  # measured
            bytes_per_second=4.35e12,  # measured
            at_a_time={1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},  # alike on four
        ),
        GpuKind(
            "NVIDIA H100 80GB HBM3",
            "sm_90a",
            132,
            flops={16: 989.4e12, 8: 1978.9e12},  # data sheet, SXM
            bytes_per_second=3.35e12,  # data sheet, SXM
            at_a_time={1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15},  # of one
        ),
    )
}
# Products that kernels are for and that have no row, as the driver names them: their number of SMs
# must be given with the name. A row makes its name's entry here superfluous.
PRODUCTS = (
    "NVIDIA H100 PCIe",
    "NVIDIA H100 NVL",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H200 NVL",
    "NVIDIA H800",
    "NVIDIA H800 PCIe",
    "NVIDIA H800 NVL",
    "NVIDIA H20",
    "NVIDIA H20-3e",
    "NVIDIA GH200 120GB",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA GH200 480GB",
)
# What there is no GPU for is planned as if for this one; it has every measured figure.
DEFAULT = KINDS["NVIDIA H200"]


def kind(name: str) -> GpuKind:
    """Return the row of the GPU kind called `name`, or the default's where it has none."""
    return KINDS.get(name, DEFAULT)


def alike(written: str, name: str) -> bool:
    """Whether a GPU that was `written` is called `name`: in any case, and with its maker or not."""
    words = " ".join(written.split()).casefold()
    return name.casefold() in (words, f"nvidia {words}")


def products() -> dict[tuple[str, ...], str]:
    """Products that kernels are for, by their words in lower case: `NVIDIA GH200`, and so on.

    The driver's names are a maker, a product and the variant, as `NVIDIA H100 80GB HBM3`.
    """
    names = sorted({" ".join(name.split()[:2]) for name in (*KINDS, *PRODUCTS)})
    return {tuple(name.casefold().split()): name for name in names}


def of_product(gpu: str) -> bool:
    """Whether a GPU is a row's, or of a product that kernels are for, whatever its variant."""
    return gpu in KINDS or tuple(gpu.casefold().split()[:2]) in products()


def variant(written: str) -> str | None:
    """Return the name of a GPU of a product that kernels are for, or None of any other."""
    words = written.split()
    for given in (words, ["NVIDIA", *words]):
        if product := products().get(tuple(word.casefold() for word in given[:2])):
            return " ".join([product, *given[2:]])
    return None


def resolve(written: object, tuned: Iterable[str] = (), *, counted: bool = False) -> str:
    """Return the driver's name of a GPU that kernels are for: every name of one passes here.

    Args:
        written: Its name as the driver gives it, in any case, with or without `NVIDIA`.
        tuned: The GPUs that there are files of; they are asked for where no row is meant.
        counted: Its SMs are given too, so that it may be any variant or part of a product, such as
            `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.

    Raises:
        UnknownNameError: For any other name; it tells those that are near, and those there are.
    """
    word = written if isinstance(written, str) else ""
    for name in KINDS:
        if alike(word, name):
            return name
    known = sorted({*KINDS, *tuned})
    for name in (*known, *PRODUCTS):
        if alike(word, name):
            return name
    if counted and (found := variant(word)):
        return found
    short = {name.casefold().removeprefix("nvidia "): name for name in (*known, *PRODUCTS)}
    word = word.strip().casefold().removeprefix("nvidia ")
    near = [one for one in short if word and one.startswith(word)]
    near = near or difflib.get_close_matches(word, short, n=2)
    told = f"did you mean {' or '.join(short[one] for one in near)}? " if near else ""
    raise UnknownNameError(
        f"GPU {written!r}",
        rule=f"must be one that is known or was tuned on: {', '.join(known)}",
        fix=f"{told}name one of them, or any variant of a {titles()} product "
        f"({', '.join(products().values())}) with its number of SMs, such as '{PRODUCTS[0]}:114'",
    )


def file_name(gpu: str) -> str:
    """The name of a GPU kind's files: `NVIDIA H200` has nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"
