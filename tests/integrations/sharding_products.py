"""Products of distributed tensors, and sums of their columns: cases of sharding_cases.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sharding_checks import case, check, moved, place_of, shared, values, with_error

import warploom


def product(**options: Any) -> Callable[..., torch.Tensor]:
    def called(
        a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return warploom.gemm(
            a, b, bias=bias, residual=residual, out_dtype=torch.float32, beta=0.5, **options
        )

    return called


def operands() -> list[torch.Tensor]:
    """Extents are odd: one process has more than the other."""
    wide = torch.float32
    bias, residual = values(9, dtype=wide), values(5, 7, 9, dtype=wide)
    return [values(5, 7, 25), values(25, 9), bias, residual]


SPLITS: dict[str, tuple[tuple[int | None, ...], str]] = {
    "batches": ((0, None, None, 0), "0"),
    "rows": ((1, None, None, 1), "1"),
    "columns": ((None, 1, 0, 2), "2"),
    "nothing": ((None, None, None, None), "whole"),
}


@case
def products_are_split_along_each_dimension_of_d() -> None:
    for places, expected in SPLITS.values():
        for options in (
            {},
            {"scale_a": 0.5},
            {"activation": "relu"},
            {"activation": "gelu"},
            {"activation": "silu", "preactivation": "recompute"},
        ):
            check(product(**options), operands(), places, expected)


@case
def a_relu_that_ends_the_epilogue_is_split() -> None:
    """The backward pass keeps D there, which lies as D does."""
    for places, expected in SPLITS.values():
        check(
            lambda a, b, bias: warploom.gemm(a, b, bias=bias, activation="relu"),
            operands()[:3],
            places[:3],
            expected,
        )


@case
def products_split_along_k_are_terms_of_a_sum_with_one_bias() -> None:
    check(product(scale_a=2.0), operands(), (2, 0, None, None), "terms")


@case
def an_activation_of_terms_is_not_the_term_of_an_activation() -> None:
    """The operands are put together first, in two messages."""
    check(product(activation="gelu"), operands(), (2, 0, None, None), "whole", (2, 0))


@case
def terms_of_eight_bits_would_saturate() -> None:
    a, b = (torch.randint(-9, 9, shape).to(torch.int8) for shape in ((6, 32), (32, 16)))
    scale = torch.full((1,), 0.01)
    call = lambda a, b, s: warploom.gemm(a, b, scale_a=s, out_dtype=torch.int8)  # noqa: E731
    found = call(shared(a, 1), shared(b, 0), shared(scale, None))
    assert place_of(found) == "whole"
    assert torch.equal(found.full_tensor(), call(a, b, scale))


@case
def batches_of_both_operands_are_split() -> None:
    a, b = values(3, 4, 8), values(3, 8, 6)
    check(warploom.gemm, (a, b), (0, 0), "0")
    check(warploom.gemm, (values(3, 4, 8), values(1, 8, 6)), (0, None), "0")


@case
def gradients_of_scales_are_terms_too() -> None:
    wide = torch.float32
    rows, columns = values(7, dtype=wide), values(1, 9, dtype=wide)

    def scaled(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, scale_a=x, scale_b=y, activation="silu", out_dtype=wide)

    for places, expected in (((0, None, 0, None), "0"), ((None, 1, None, 1), "1")):
        check(scaled, (values(7, 16), values(16, 9), rows, columns), places, expected)


@case
def a_weight_is_gathered_rather_than_a_larger_input() -> None:
    found = warploom.gemm(shared(values(64, 16), 0), shared(values(16, 8), 1))
    assert place_of(found) == "0"


@case
def out_is_written_where_it_lies() -> None:
    a, b = values(7, 16, grad=False), values(16, 9, grad=False)
    want = warploom.gemm(a, b)
    out = shared(torch.full_like(want, torch.nan), 0)
    assert warploom.gemm(shared(a, 0), shared(b, None), out=out) is out
    torch.testing.assert_close(out.full_tensor(), want)
    out = shared(torch.full_like(want, torch.nan), 1)
    warploom.gemm(shared(a, 0), shared(b, None), out=out)  # b is cut where it is
    torch.testing.assert_close(out.full_tensor(), want)


@case
def the_largest_magnitude_is_that_of_all_shards() -> None:
    a, b = values(7, 16, grad=False), values(16, 9, grad=False)
    amax, whole = torch.zeros(1), shared(torch.zeros(1), None)
    warploom.gemm(a, b, amax=amax)
    warploom.gemm(shared(a, 0), shared(b, None), amax=whole)
    assert torch.equal(whole.to_local(), amax)


@case
def gradients_are_added_up_where_they_lie() -> None:
    for places, place in (((0, None), None), ((None, 1), 1)):
        a, b = values(7, 16), values(16, 9)
        gradient = torch.randn(7, 9).bfloat16()
        into = torch.ones(16, 9)
        warploom.gemm(a, b, main_grad=into).backward(gradient)
        given = [shared(one, at) for one, at in zip((a, b), places, strict=True)]
        sums = shared(torch.ones(16, 9), place)
        found = warploom.gemm(*given, main_grad=sums)
        found.backward(shared(gradient, 0 if place is None else 1))
        torch.testing.assert_close(sums.full_tensor(), into)
        assert given[1].grad is None


@case
def a_tensor_of_one_process_is_refused() -> None:
    with_error(lambda: warploom.gemm(shared(values(4, 8), 0), values(8, 8)), "of one process")


@case
def sums_of_columns_are_terms() -> None:
    from warploom.runtime.families.activation_backward.api import activation_backward

    dy, z = values(5, 7, 9, grad=False), values(5, 7, 9, grad=False)
    want = activation_backward(dy, z, "gelu", sums=True)
    for place, summed in ((0, "terms"), (1, "terms"), (2, "0")):
        given = shared(dy, place), shared(z, place)
        sent, found = moved(lambda given=given: activation_backward(*given, "gelu", sums=True))
        assert (place_of(found[0]), place_of(found[1]), sent) == (str(place), summed, 0)
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
