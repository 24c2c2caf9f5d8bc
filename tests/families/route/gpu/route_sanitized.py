"""A few tiny calls, checked on the CPU: what compute-sanitizer watches."""

from __future__ import annotations

import route_cases as cases
import torch
from processes import verify_each

from warploom.generator.families.route import RouteOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.call import RouteCall

KERNELS = [cases.spec(256), cases.spec(1024), cases.spec(512, 2, "int32"), cases.spec(1024, 8)]


def verify(kernel: KernelSpec) -> None:
    """Run one kernel on pairs that no warp's load divides, of which some are skipped."""
    operation: RouteOperation = kernel.operation  # type: ignore[assignment]
    ids = torch.randint(-2, 22, (333, 3)).to(getattr(torch, operation.ids))
    for experts in (20, 1024):
        found = plan.run(RouteCall(ids.cuda(), experts, spec=kernel))
        for one, held in zip(found, reference.route(ids, experts, 0), strict=True):
            assert torch.equal(one.cpu(), held)


if __name__ == "__main__":
    verify_each(verify, KERNELS)
