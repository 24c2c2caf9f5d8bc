"""Products of operands and of gradients in every view of small and empty shapes, in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from odd_views import odd_views

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.gemm.layer import Layer

SHAPES = [(m, n) for m in (0, 1, 5) for n in (0, 1, 8)]
DEPTHS = (1, 16)
EPILOGUES: dict[str, dict[str, Any]] = {
    "none": {},
    "bias": {"bias": True},
    "relu": {"activation": "relu"},
    "bias and relu": {"bias": True, "activation": "relu"},
    "recomputed": {"activation": "relu", "preactivation": "recompute"},
    "scale": {"scale_a": 1.5},
    "residual": {"residual": True},
}


def values(*shape: int, device: str) -> torch.Tensor:
    """Whole numbers, whose products are exact in bf16."""
    chance = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=chance).to(device, torch.bfloat16)


def gradients(m: int, n: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Gradients of a result in every view; of a sum, they are expanded."""
    yield from odd_views(values(m, n, device=device))
    yield from odd_views(torch.ones(m, n, device=device).bfloat16())


def close(found: torch.Tensor | None, exact: torch.Tensor | None, what: str) -> None:
    assert (found is None) == (exact is None), what
    if found is not None and exact is not None:
        # What says how they differ takes longer than a small product.
        if found.shape == exact.shape and torch.allclose(found.double(), exact, 1e-2, 1e-2):
            return
        message = f"{what}: {{}}".format
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2, msg=message)


def operands_give_exact_results(m: int, n: int, k: int, device: str) -> None:
    """`gemm` of each view of a and b, and of what its epilogue reads and `out`.

    Only what has a last dimension of several elements that are apart may be refused.
    """
    a, b = values(m, k, device=device), values(k, n, device=device)
    exact = a.double() @ b.double()
    for at_a, one in odd_views(a):
        for at_b, other in odd_views(b):
            close(warploom.gemm(one, other), exact, f"a {at_a}, b {at_b}")
    for name, shape in {"residual": (m, n), "bias": (n,)}.items():
        for where, view in odd_views(values(*shape, device=device)):
            if view.shape[-1] < 2 or view.stride(-1) == 1:
                found = warploom.gemm(a, b, **{name: view})
                close(found, exact + view.double(), f"{name} {where}")
    for name, shape in {"scale_a": (m, 1), "scale_b": (1, n)}.items():
        for where, view in odd_views(values(*shape, device=device).float()):
            try:
                found = warploom.gemm(a, b, **{name: view}, out_dtype=torch.float32)
            except ProblemError:
                assert view.numel() > 1 and view.squeeze().stride(0) != 1
                continue
            close(found, exact * view.double(), f"{name} {where}")
    for where, out in odd_views(torch.full((m, n), 7.0, device=device)):
        apart = "expanded" in where or (out.shape[-1] > 1 and out.stride(-1) != 1)
        if not apart:
            close(warploom.gemm(a, b, out=out), exact, f"out {where}")


def gradients_of_gemm_are_exact(m: int, n: int, k: int, device: str, epilogue: str) -> None:
    """Both gradients, and those of bias and residual, of each view of the result's gradient."""
    asked = dict(EPILOGUES[epilogue])
    for where, dd in gradients(m, n, device):
        for transposed in (False, True):
            b = values(n, k, device=device).t() if transposed else values(k, n, device=device)
            leaves = {"a": values(m, k, device=device), "b": b}
            if "bias" in asked:
                leaves["bias"] = values(n, device=device)
            if "residual" in asked:
                leaves["residual"] = values(m, n, device=device)
            wide = {name: one.double().requires_grad_() for name, one in leaves.items()}
            leaves = {name: one.detach().requires_grad_() for name, one in leaves.items()}
            z = wide["a"] @ wide["b"] * asked.get("scale_a", 1)
            z = z + wide["bias"] if "bias" in asked else z
            z = z.relu() if "activation" in asked else z
            z = z + wide["residual"] if "residual" in asked else z
            z.backward(dd.double())
            warploom.gemm(**{**asked, **leaves}).backward(dd)
            for name, leaf in leaves.items():
                close(leaf.grad, wide[name].grad, f"{epilogue}, gradient of {name}, dd {where}")


def gradients_of_a_layer_are_exact(
    m: int, n: int, k: int, device: str, activations: Sequence[str | None] = (None, "relu")
) -> None:
    """Those of a layer by what it keeps of its calls, twice of each view."""
    plain, x, bias = (values(*shape, device=device) for shape in ((n, k), (m, k), (n,)))
    for activation in activations:
        for where, dd in gradients(m, n, device):
            wide = [one.double().requires_grad_() for one in (x, plain, bias)]
            z = torch.nn.functional.linear(*wide)
            (z if activation is None else z.relu()).backward(dd.double())
            for at_weight, weight in odd_views(plain):
                layer = Layer()
                leaves = [one.detach().requires_grad_() for one in (x, weight, bias)]
                for _ in range(2):
                    given = (*leaves, activation, "save")
                    result = layer.again(*given)
                    result = layer.call(*given) if result is None else result
                    found = torch.autograd.grad(result, leaves, dd)
                    for one, exact in zip(found, wide, strict=True):
                        close(one, exact.grad, f"{activation}, weight {at_weight}, dd {where}")
