"""Every element of dz and of its sums against float64, over extents that no block divides."""

from __future__ import annotations

import activation_backward_cases as cases
import pytest
import torch
from activation_backward_cases import short

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.activation_backward.api import activation_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
# One row, one column; a strip less 1 and more; one part and several, of which the last is short.
EXTENTS = [(1, 1), (1, 4096), (3, 63), (65, 72), (100, 257), (257, 1000), (1031, 520), (5000, 8)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_element_is_within_its_bound(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("m,n", [(8192, 4096), (2048, 14336), (100_000, 64), (200_003, 24)])
@pytest.mark.parametrize("function", ["gelu", "none"])
def test_large_extents(function: str, m: int, n: int) -> None:
    """Parts of the rows whose sums many blocks add: one that is lost is far out of its bound."""
    for schedule in (cases.NARROW, cases.WIDE):
        cases.made(cases.spec(function, schedule), m, n).verify()


@pytest.mark.parametrize("function", ["relu", "gelu", "gelu_tanh", "silu"])
def test_every_16_bit_number_has_its_slope(function: str) -> None:
    """All of bf16 and of fp16: near 0, where slopes turn, in the tails, subnormal."""
    bits = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        z = bits.view(dtype).view(256, 256)
        dy = torch.ones(256, 256, device="cuda")
        dz, _ = activation_backward(dy, z, function)
        expected, _ = activation_backward(dy.cpu(), z.cpu(), function)
        assert dz is not None and expected is not None
        finite = ~z.isnan().cpu()
        assert torch.equal(dz.isnan().cpu(), ~finite)
        off = (dz.cpu().double() - expected.double()).abs()[finite]
        assert off.max() <= 2.0**-20
        infinite = z.isinf()
        assert torch.equal(dz[infinite], (z[infinite] > 0).float())


@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "silu"])
def test_slopes_of_single_precision_are_right_at_every_place(function: str) -> None:
    """Against float64, closer together than a table's steps would be."""
    z = torch.linspace(-40, 40, 1 << 22, device="cuda").view(1 << 10, 1 << 12)
    dz, _ = activation_backward(torch.ones_like(z), z, function)
    wide = z.double().requires_grad_()
    forward = {
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": torch.nn.functional.silu,
    }
    (exact,) = torch.autograd.grad(forward[function](wide).sum(), wide)
    assert dz is not None
    assert (dz.double() - exact).abs().max() <= 2.0**-20
