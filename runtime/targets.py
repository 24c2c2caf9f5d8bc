"""The GPU that a call's kernel is chosen for: the one its tensors are on, or one that is named."""

from __future__ import annotations

from dataclasses import replace

import torch

from warploom import variables
from warploom.errors import DeviceError
from warploom.generator.architectures import serving, titles
from warploom.generator.gpus import DEFAULT
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.targets import names, target
from warploom.runtime import driver, records


def at_hand(device: int) -> DeviceLimits:
    """The GPU `device`; NO_GPU for -1, the CPU. Raises DeviceError as `driver.limits` does.

    Where nothing may be compiled, kernels come out of a store: then the compiler that happens to
    be there has no say in which, and a store built ahead has what is chosen.
    """
    if device < 0:
        return NO_GPU
    compiles = variables.choice("WARPLOOM_COMPILE") == "allow"
    return replace(driver.limits(device), nvrtc=records.nvrtc() if compiles else None)


def ahead_of_time(gpu: str | None) -> DeviceLimits:
    """The GPU of that name, by default the one of this machine, for kernels that go into a store.

    Raises UnknownNameError for a name that nothing is known of, and DeviceError where there is no
    GPU here that kernels are for.
    """
    if gpu is not None:
        return target(gpu)
    if not torch.cuda.is_available() or not serving(torch.cuda.get_device_capability()):
        raise DeviceError(
            f"no {titles()} GPU here",
            rule=f"the GPU that calls will run on must be named: {', '.join(names())}",
            fix=f"for instance --gpu {DEFAULT.name!r}",
        )
    return driver.limits(torch.cuda.current_device())
