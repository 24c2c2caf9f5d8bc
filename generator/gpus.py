"""The one table of GPU kinds, and how the files that are kept for each are called.

Every Hopper product has a row. A GPU of one that has none, such as a variant with other memory, is
taken to be like the first row of its product; a MIG slice is a share of the GPU that it is part of.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from warploom.errors import UnknownNameError
from warploom.generator.architectures import titles


@dataclass(frozen=True, slots=True)
class GpuKind:
    """What is known of one GPU kind: what it sustains, measured or derived from its data sheet.

    name              as the driver gives it
    arch              the architecture that its kernels are for
    flops             dense FLOP/s by the operands' bits, under load
    bytes_per_second  of memory, under load
    gigabytes         of memory, as its MIG slices are named after
    also              names that people have for it, beside the driver's
    shared_name       the driver's name is a whole product's: people must write one of `also`
    at_a_time         clusters of one to eight CTAs that run at a time, as the driver counts them
                      (cuOccupancyMaxActiveClusters); empty where it was never asked
    share             of the whole GPU's memory and L2, of a MIG slice
    """

    name: str
    arch: str
    multiprocessors: int
    flops: Mapping[int, float]
    bytes_per_second: float
    gigabytes: int = 0
    also: tuple[str, ...] = ()
    shared_name: bool = False
    at_a_time: Mapping[int, int] = field(default_factory=dict)
    share: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """What people may call it."""
        return self.also if self.shared_name else (self.name, *self.also)

    @property
    def rate(self) -> float:
        """Dense FLOP/s of 16 bits that one SM sustains."""
        return self.flops[16] / self.multiprocessors


# What an H200 sustains of its data sheet: 800 of 989.4 TFLOP/s at its limit of power, 4.35 of
# 4.8 TB/s. Rows that were not measured are derived with the same shares, so that the ratios of two
# rows are those of their data sheets.
_TENSOR_SHARE, _MEMORY_SHARE = 800 / 989.4, 4.35 / 4.8
_CLUSTERS = {1: 132, 2: 66, 3: 39, 4: 30, 5: 22, 6: 17, 7: 15, 8: 15}  # four H200s and one H100


def _hopper(
    name: str,
    multiprocessors: int,
    tera_flops: float,
    tera_bytes: float,
    gigabytes: int,
    *also: str,
    tensor_share: float = _TENSOR_SHARE,
    shared_name: bool = False,
) -> GpuKind:
    """A row from the data sheet's dense TFLOP/s of 16 bits: of 8 bits twice, of TF32 half."""
    flops = tera_flops * 1e12 * tensor_share
    return GpuKind(
        name,
        "sm_90a",
        multiprocessors,
        flops={32: flops / 2, 16: flops, 8: 2 * flops},
        bytes_per_second=tera_bytes * 1e12 * _MEMORY_SHARE,
        gigabytes=gigabytes,
        also=also,
        shared_name=shared_name,
    )


# Names: the list of NVIDIA/open-gpu-kernel-modules (README.md), and `NVIDIA H100 80GB HBM2e` as
# nvidia-smi prints it. Figures: NVIDIA's data sheets of H100, H200 and GH200 and its Hopper white
# paper; those of H800 and H20 were published by vendors. The 64 GB module's memory is that of
# MareNostrum 5. The first row of a product stands for variants that have none.
KINDS: dict[str, GpuKind] = {
    row.name: row
    for row in (
        GpuKind(
            "NVIDIA H200",
            "sm_90a",
            132,
            flops={32: 400e12, 16: 800e12, 8: 1600e12},  # measured, but for TF32
            bytes_per_second=4.35e12,  # measured
            gigabytes=141,
            also=("H200 SXM",),
            at_a_time=_CLUSTERS,
        ),
        _hopper("NVIDIA H200 NVL", 132, 835.5, 4.8, 141),
        GpuKind(
            "NVIDIA H100 80GB HBM3",
            "sm_90a",
            132,
            flops={32: 395e12, 16: 790e12, 8: 1580e12},  # 16 bits measured, others derived
            bytes_per_second=3.35e12 * _MEMORY_SHARE,  # derived
            gigabytes=80,
            also=("H100 SXM", "H100 SXM5", "H100 SXM 80GB"),
            at_a_time=_CLUSTERS,
        ),
        _hopper("NVIDIA H100 PCIe", 114, 756.5, 2.04, 80),
        _hopper("NVIDIA H100 NVL", 132, 835.5, 3.94, 94),
        _hopper("NVIDIA H100 80GB HBM2e", 114, 756.5, 2.04, 80),
        _hopper(
            *("NVIDIA H100", 132, 989.4, 2.0, 64, "H100 SXM 64GB", "H100 64GB"), shared_name=True
        ),
        _hopper("NVIDIA H800", 132, 989.4, 3.35, 80, "H800 SXM"),
        _hopper("NVIDIA H800 PCIe", 114, 756.5, 2.04, 80),
        _hopper("NVIDIA H800 NVL", 132, 835.5, 3.94, 94),
        # A tensor core that is cut to a quarter of the others' is not at the limit of power.
        _hopper("NVIDIA H20", 78, 148, 4.0, 96, tensor_share=1.0),
        _hopper("NVIDIA H20-3e", 78, 148, 4.8, 141, tensor_share=1.0),
        _hopper("NVIDIA GH200 480GB", 132, 989.4, 4.0, 96),
        _hopper("NVIDIA GH200 120GB", 132, 989.4, 4.0, 96),
        _hopper("NVIDIA GH200 144G HBM3e", 132, 989.4, 4.9, 144, "GH200 144GB", "GH200 144G"),
    )
}
# What there is no GPU for is planned as if for this one; it has every measured figure.
DEFAULT = KINDS["NVIDIA H200"]
# "MIG 3g.40gb", and of a compute instance of it "MIG 1c.3g.40gb", each perhaps with "+me"
_SLICE = re.compile(r"(?P<whole>.+) MIG (\d+c\.)?\d+g\.(?P<gigabytes>\d+)gb\b.*", re.IGNORECASE)
_PART = re.compile(r"(.+?) (MIG\b.*)", re.IGNORECASE)  # of a GPU, whatever the profile's name is
_PROFILE = re.compile(r"MIG ((?:\d+c\.)?[1-7]g\.([1-9]\d*)gb\b\S*)", re.IGNORECASE)
_MEMORY_SLICES = 8  # that a MIG slice has some of


def kind(name: str) -> GpuKind:
    """Return the row of the GPU kind called `name`; the default's where none is like it.

    A MIG slice has as many eighths of the memory, its bandwidth and L2 as its name says; its SMs
    are counted on the device, since slices of one profile differ between products.
    """
    found = KINDS.get(name)
    if found is None and (sliced := _SLICE.fullmatch(name)):
        whole = kind(sliced["whole"])
        if whole.gigabytes:
            eighths = round(_MEMORY_SLICES * int(sliced["gigabytes"]) / whole.gigabytes)
            share = min(_MEMORY_SLICES, max(1, eighths)) / _MEMORY_SLICES
            bytes_per_second = whole.bytes_per_second * share
            return replace(whole, bytes_per_second=bytes_per_second, share=share)
        return whole
    if found is None:
        words = _product(name)
        found = next((row for row in KINDS.values() if _product(row.name) == words), DEFAULT)
    return found


def distance(one: GpuKind, other: GpuKind) -> float:
    """How far two kinds are apart, in octaves: of their SMs, tensor rates and bandwidths."""
    pairs = (
        (one.multiprocessors, other.multiprocessors),
        (one.flops[16], other.flops[16]),
        (one.bytes_per_second, other.bytes_per_second),
    )
    return sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)


def lenders(name: str) -> list[GpuKind]:
    """The other kinds whose records and constants a GPU called `name` may use, the nearest first.

    Its own are more: these fill the gaps, and a kind that nobody tuned on has nothing but gaps.
    """
    here = kind(name)
    others = [one for one in KINDS.values() if one.name != name and one.arch == here.arch]
    return sorted(others, key=lambda one: (distance(one, here), one.name))


@functools.cache
def _product(name: str) -> tuple[str, ...]:
    """The words of a product: `nvidia h100`, whatever its variant."""
    return tuple(name.casefold().split()[:2])


def alike(written: str, name: str) -> bool:
    """Whether a GPU that was `written` is called `name`: in any case, and with its maker or not."""
    words = " ".join(written.split()).casefold()
    return name.casefold() in (words, f"nvidia {words}")


def products() -> dict[tuple[str, ...], str]:
    """Products that kernels are for, by their words in lower case: `NVIDIA GH200`, and so on.

    The driver's names are a maker, a product and the variant, as `NVIDIA H100 80GB HBM3`.
    """
    names = sorted({" ".join(name.split()[:2]) for name in KINDS})
    return {tuple(name.casefold().split()): name for name in names}


def of_product(gpu: str) -> bool:
    """Whether a GPU is a row's, or of a product that kernels are for, whatever its variant."""
    return gpu in KINDS or _product(gpu) in products()


def variant(written: str) -> str | None:
    """Return the name of a GPU of a product that kernels are for, or None of any other.

    None, too, of a product's name alone where it is shared: `H100` says too little.
    """
    words = written.split()
    for given in (words, ["NVIDIA", *words]):
        if product := products().get(tuple(word.casefold() for word in given[:2])):
            name = " ".join([product, *given[2:]])
            return None if name in KINDS and KINDS[name].shared_name else name
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
    if counted and (part := _PART.fullmatch(word)):
        return f"{(whole := resolve(part[1], tuned, counted=True))} {_profile(part[2], whole)}"
    for row in KINDS.values():
        if any(alike(word, name) for name in row.names):
            return row.name
    listed = [*known_names(), *(name for name in sorted(tuned) if name not in KINDS)]
    for name in listed[len(KINDS) :]:
        if alike(word, name):
            return name
    if counted and (found := variant(word)):
        return found
    every = (*listed, *(name for row in KINDS.values() for name in row.names))
    short = {name.casefold().removeprefix("nvidia "): name for name in every}
    word = word.strip().casefold().removeprefix("nvidia ")
    near = [one for one in short if word and one.startswith(word) and short[one] in listed]
    near = near or difflib.get_close_matches(word, short, n=2)
    told = f"did you mean {' or '.join(short[one] for one in near)}? " if near else ""
    raise UnknownNameError(
        f"GPU {written!r}",
        rule=f"must be one that is known or was tuned on, of {titles()}: {', '.join(listed)}",
        fix=f"{told}name one of them, or any variant of a {titles()} GPU "
        f"({', '.join(products().values())}) with its number of SMs, such as 'H100 CNX:114'",
    )


def _profile(written: str, whole: str) -> str:
    """The profile of a MIG slice as the driver writes it: `MIG 3g.40gb`.

    UnknownNameError for what is none, or has more memory than the whole GPU.
    """
    found = _PROFILE.fullmatch(" ".join(written.split()))
    most = KINDS[whole].gigabytes if whole in KINDS else math.inf
    if found is None or int(found[2]) > most:
        raise UnknownNameError(
            f"{written!r} of GPU {whole!r}",
            rule="must be a MIG profile: its slices of compute and its memory"
            + (f", of which the GPU has {most} GB" if found else ""),
            fix="write it as `nvidia-smi mig -lgip` lists it, such as 'MIG 1g.10gb'",
        )
    return f"MIG {found[1].lower()}"


def known_names() -> list[str]:
    """What people call the kinds that have a row."""
    return sorted(row.names[0] for row in KINDS.values())


def file_name(gpu: str) -> str:
    """The name of a GPU kind's files: `NVIDIA H200` has nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") + ".json"
