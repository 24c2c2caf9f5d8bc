"""The constants of a GPU kind: its own, and for families that it has none of another kind's.

These are rescaled by what the two kinds' rows say. The number of SMs is an argument of every
family's model already, and what one SM does in a cycle is the same on all kinds of an architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from warploom.generator.gpus import GpuKind, kind, lenders
from warploom.generator.model.constants import Constants, FamilyConstants, shipped

# The constants, of whichever family, that are in proportion to what kinds differ in.
TENSOR = frozenset({"tensor_clock"})  # the tensor rate of an SM
MEMORY = frozenset({"hbm_bandwidth", "bandwidth", "written"})  # memory's bandwidth
# the share of L2, of which a MIG slice has less
L2 = frozenset({"l2_total", "crossing", "l2_bytes", "reduction_bandwidth"})


def load(gpu: str, *, own: bool = True) -> Constants | None:
    """Return the constants of a GPU kind; None where there are none of any kind.

    Args:
        gpu: The kind.
        own: Whether its own are used, and not only those of others.

    Raises:
        RecordsError: For a file of constants that is damaged.
    """
    families: dict[str, FamilyConstants] = {}
    if own and (found := shipped(gpu)):
        families.update(found.families)
    for lender in lenders(gpu):
        if found := shipped(lender.name):
            families = {**rescaled(found, gpu).families, **families}
    return Constants(gpu, kind(gpu).multiprocessors, families) if families else None


def rescaled(constants: Constants, gpu: str) -> Constants:
    """Return what the constants of one GPU kind should be on the one called `gpu`."""
    there, here = kind(constants.gpu), kind(gpu)
    families = {
        name: replace(one, values=_scaled(one.values, there, here), fitted_on=constants.gpu)
        for name, one in constants.families.items()
    }
    return Constants(gpu, here.multiprocessors, families)


def _scaled(values: Mapping[str, float], there: GpuKind, here: GpuKind) -> dict[str, float]:
    factors = (
        (TENSOR, here.rate / there.rate),
        (MEMORY, here.bytes_per_second / there.bytes_per_second),
        (L2, here.share / there.share),
    )
    of_name = {name: factor for listed, factor in factors for name in listed}
    return {name: value * of_name.get(name, 1.0) for name, value in values.items()}
