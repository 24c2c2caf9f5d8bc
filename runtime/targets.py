"""The GPU that a call's kernel is chosen for: the one its tensors are on, or one that is named."""

from __future__ import annotations

import os
from dataclasses import replace

from warploom.generator.launches import DeviceLimits
from warploom.runtime import driver, records
from warploom.runtime.dispatch import NO_GPU


def at_hand(device: int) -> DeviceLimits:
    """The GPU `device`; NO_GPU for -1, the CPU. Raises DeviceError as `driver.limits` does.

    Where nothing may be compiled, kernels come out of a store: then the compiler that happens to
    be there has no say in which, and a store built ahead has what is chosen.
    """
    if device < 0:
        return NO_GPU
    forbidden = os.environ.get("WARPLOOM_COMPILE") == "forbid"
    return replace(driver.limits(device), nvrtc=None if forbidden else records.nvrtc())
