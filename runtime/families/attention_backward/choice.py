"""Which kernel gradients get; forward passes that will be differentiated ask, too."""

from __future__ import annotations

import torch

from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.decision import Choice
from warploom.runtime.families._attention.extents import Extents
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.operation import Fields, backward_operation, shape


def choose(
    element: str,
    sizes: Extents,
    masked: Band,
    *,
    softcap: bool,
    deterministic: bool | None,
    further: Fields,
    spec: KernelSpec | str | None,
    target: DeviceLimits,
) -> Choice:
    """The kernel that gradients get on a GPU.

    Raises ProblemError for a spec that computes something else.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    wanted = backward_operation(
        element, sizes, masked, softcap=softcap, deterministic=deterministic, further=further
    )
    given = dispatch.named(spec)
    return dispatch.choose(wanted, shape(sizes, masked), spec=given, device=target)
