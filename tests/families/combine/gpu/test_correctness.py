"""Every element of results against float64, over extents that no CTA divides."""

from __future__ import annotations

import combine_cases as cases
import pytest
import torch
from combine_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.combine.call import CombineCall

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
EXTENTS = [(1, 1, 8), (1, 8, 2048), (5, 3, 24), (64, 4, 2880), (61, 11, 1032), (257, 2, 7168)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_element_is_within_its_bound(kernel: KernelSpec) -> None:
    for tokens, k, columns in EXTENTS:
        cases.made(kernel, tokens, k, columns).verify()
        cases.made(kernel, tokens, k, columns, pad=8).verify()


def test_nan_reaches_its_token_alone() -> None:
    made = cases.made(cases.spec(128, weights="fp32"), 64, 3, 256)
    (before,) = [one.clone() for one in made.verify()]
    call = made.call
    assert isinstance(call, CombineCall)
    token = int((call.inverse[:, 1] >= 0).nonzero()[0])
    call.rows[call.inverse[token, 1], 7] = torch.nan
    (found,) = made.run()
    assert found[token, 7].isnan()
    found[token, 7] = before[token, 7]
    assert torch.equal(found, before)


@pytest.mark.usefixtures("memory")
def test_past_2_to_the_31_elements_rows_are_found() -> None:
    rows, columns = (1 << 20) + 3, 2056
    values = torch.zeros(rows, columns, device="cuda").bfloat16()
    values[-1] = 3.0
    inverse = torch.tensor([[rows - 1, 0], [rows, -1]], dtype=torch.int32, device="cuda")
    (found,) = plan.run(CombineCall(values, inverse))
    assert (found[0] == 3).all() and (found[1] == 0).all()


@pytest.mark.parametrize("skipping", [False, True])
def test_gradients_are_those_of_the_sum(skipping: bool) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    ids = torch.randint(0, 8 + 3 * skipping, (300, 4), generator=random, device="cuda")
    hidden = torch.randn(300, 512, generator=random, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(300, 4, generator=random, device="cuda").requires_grad_()
    offsets, _, inverse = warploom.route(ids, 8)

    def layer() -> torch.Tensor:
        rows = warploom.permute(hidden, inverse, offsets=offsets)
        return warploom.combine(rows, inverse, weights, offsets=offsets)

    kept = (weights.double() * (ids < 8)).sum(1, keepdim=True)
    gradient = torch.randn(300, 512, generator=random, device="cuda").bfloat16()
    found = torch.autograd.grad(layer(), (hidden, weights), gradient)
    wanted = torch.autograd.grad(hidden.double() * kept, (hidden, weights), gradient.double())
    for one, held in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), held.double(), rtol=2**-6, atol=2**-6)


def test_the_gpu_computes_what_the_reference_does() -> None:
    made = cases.made(cases.spec(128, weights="fp32"), 300, 3, 1024)
    call = made.call
    assert isinstance(call, CombineCall) and call.weights is not None
    wanted = warploom.combine(call.rows.cpu(), call.inverse.cpu(), call.weights.cpu())
    torch.testing.assert_close(made.run()[0].cpu(), wanted, rtol=2**-7, atol=1e-5)
