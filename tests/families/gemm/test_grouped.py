"""Grouped GEMM on the CPU: forms of calls, gradients, errors, and how tiles find their groups."""

from __future__ import annotations

import random
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from grouped_operands import BF16, ENDS, ROWS, K, N, offsets, operands
from host import build, definitions, needs_compiler
from pretended_gpu import PretendedGpu, gpu

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Amax, Gate, Residual, Scale
from warploom.generator.families._product import Batches
from warploom.generator.families.gemm import (
    MOST_GROUPS,
    GemmOperation,
    GemmProblem,
    GemmShape,
    complete,
    gemm_layout,
)
from warploom.generator.families.gemm.launch import launches
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime.dispatch import choose
from warploom.runtime.families.gemm.family import FAMILY
from warploom.runtime.families.gemm.grouped_call import GroupedCall

__all__ = ["gpu"]


def group_of_rows() -> torch.Tensor:
    rows = torch.arange(ENDS[-1], dtype=torch.int32)
    return torch.searchsorted(offsets(*ENDS), rows, right=True)


def products(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The rows that have a group, by their weights."""
    return torch.einsum("sk,snk->sn", a[: ENDS[-1]], w[group_of_rows()])


def close(found: torch.Tensor, exact: torch.Tensor, share: float = 2**-7) -> bool:
    return bool((found.double() - exact).abs().max() <= share * exact.abs().max() + 1e-3)


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [BF16, torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_rows_are_multiplied_by_the_weight_of_their_group(kind: torch.dtype) -> None:
    """A row that has its neighbour's weight, or an empty group's NaN, is far off."""
    a, w = operands(kind)
    d = warploom.grouped_gemm(a, w.mT, offs=offsets(*ENDS))
    assert d.dtype == {torch.float8_e4m3fn: BF16, torch.int8: torch.int32}.get(kind, kind)
    assert close(d[: ENDS[-1]], products(a.double(), w.double()))


@pytest.mark.parametrize("column", [False, True], ids=["b row", "b col"])
def test_rows_of_no_group_are_left_as_they_are(column: bool) -> None:
    a, w = operands()
    b = w.mT if column else w.mT.contiguous()
    out = torch.full((ROWS, N), 7.0, dtype=BF16)
    for _ in range(3):  # the second and third are recognised
        assert warploom.grouped_gemm(a, b, offs=offsets(*ENDS), out=out) is out
        assert (out[ENDS[-1] :] == 7).all() and out.isfinite().all()


def test_groups_end_at_the_largest_offset() -> None:
    """An offset below the one before it counts as that, as kernels have it."""
    a, w = operands()
    for ends, count in (((6, 2, 4, 4), 6), ((5, 5, 99, 7), ROWS), ((-1, -2, -3, -3), 0)):
        counted = GroupedCall(a, w.mT, offsets(*ends)).counted()
        assert counted.tolist() == [True] * count + [False] * (ROWS - count)
    assert not GroupedCall(a, w[:0].mT, offsets()).counted().any()


WAYS = ("plain", "bias", "bias of all", "gate", "oai", "row_scale", "residual")
OAI: dict[str, Any] = {"gate": "swiglu_oai", "gate_alpha": 0.5, "gate_limit": 1.5}


def oai(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return (up.clamp(-1.5, 1.5) + 1) * gate.clamp(max=1.5) * (0.5 * gate.clamp(max=1.5)).sigmoid()


def test_the_epilogue_is_that_of_the_group() -> None:
    a, w = operands()
    bias, row = torch.randn(len(ENDS), N), torch.rand(ROWS)
    scale_a, scale_b = torch.rand(ROWS), torch.rand(len(ENDS), N)
    residual = torch.randn(ROWS, N)
    narrow = residual[:, ::2].to(BF16).contiguous()
    group, last = group_of_rows(), ENDS[-1]
    x = products(a.double(), w.double())
    scaled = scale_a[:last, None] * scale_b[group] * x
    biased = x + bias[group]
    half = N // 2
    silu = torch.nn.functional.silu
    cases: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({"bias": bias.to(BF16)}, x + bias.to(BF16).double()[group]),
        ({"bias": bias[0]}, x + bias[0]),
        ({"scale_a": scale_a, "scale_b": scale_b}, scaled),
        ({"scale_b": scale_b[:, :1]}, scale_b[group][:, :1] * x),
        ({"bias": bias, "activation": "relu"}, biased.relu()),
        ({"bias": bias, "row_scale": row}, biased * row[:last, None]),
        (
            {"bias": bias, "gate": "silu", "row_scale": row},
            silu(biased[:, :half]) * biased[:, half:] * row[:last, None],
        ),
        ({"gate": "silu", "gate_layout": "interleaved"}, silu(x[:, 0::2]) * x[:, 1::2]),
        ({"bias": bias, **OAI}, oai(biased)),
        ({"row_scale": row, "residual": residual}, x * row[:last, None] + residual[:last]),
        ({"gate": "silu", "residual": narrow}, silu(x[:, :half]) * x[:, half:] + narrow[:last]),
        ({"residual": narrow, **OAI}, oai(x) + narrow[:last]),
    ]
    for keywords, exact in cases:
        d = warploom.grouped_gemm(a, w.mT, offs=offsets(*ENDS), **keywords)
        assert d.shape == (ROWS, exact.shape[1])
        assert close(d[:last], exact), keywords.keys()


def test_groups_of_k_have_a_result_each_and_empty_ones_zeros() -> None:
    """A neighbour's NaN that is multiplied by 0 would be NaN."""
    torch.manual_seed(0)
    a, b = torch.randn(ROWS, K).to(BF16), torch.randn(ROWS, N).to(BF16)
    a[ENDS[-1] :], b[:5] = torch.nan, torch.nan
    d = warploom.grouped_gemm(a.t(), b, offs=offsets(*ENDS))
    assert d.shape == (len(ENDS), K, N) and not d[1].any()
    for group in (2, 3):
        own = slice(ENDS[group - 1], ENDS[group])
        assert close(d[group], a[own].double().t() @ b[own].double())


def test_groups_of_columns_and_batches_are_as_torchs() -> None:
    a, w = operands()
    w[1] = 0
    d = warploom.grouped_gemm(w, a.t(), offs=offsets(*ENDS))
    assert d.shape == (N, ROWS)
    assert close(d[:, : ENDS[-1]].t(), products(a.double(), w.double()))
    batched = warploom.grouped_gemm(w, w.mT)
    assert close(batched, w.double() @ w.double().mT)
    assert close(warploom.grouped_gemm(w, w.mT, **OAI), oai(w.double() @ w.double().mT))


@pytest.mark.parametrize("shape", [(0, 8, 8, 2), (5, 0, 8, 2), (5, 8, 0, 2), (5, 8, 8, 0)], ids=str)
def test_what_is_empty_has_the_result_of_nothing(shape: tuple[int, int, int, int]) -> None:
    rows, n, k, groups = shape
    a, w = torch.ones(rows, k, dtype=BF16), torch.ones(groups, n, k, dtype=BF16)
    ends = torch.full((groups,), rows, dtype=torch.int32)
    out = torch.full((rows, n), 7.0, dtype=BF16)
    warploom.grouped_gemm(a, w.mT, offs=ends, out=out)
    assert (out == (7 if not groups else k)).all()
    by_k = warploom.grouped_gemm(a.t(), torch.ones(rows, n, dtype=BF16), offs=ends)
    assert by_k.shape == (groups, k, n)


@pytest.mark.parametrize(
    ("which", "compiled"),
    [*product(WAYS, [False]), ("bias of all", True), ("oai", True), ("row_scale", True)],
)
def test_gradients_are_those_of_the_rows_that_have_a_group(which: str, compiled: bool) -> None:
    """Rows of no group have zeros: what lies there would go into the gradient of their tokens."""
    a, w = operands()
    w[1] = 0
    read = [a.nan_to_num().requires_grad_(), w.requires_grad_()]
    keywords: dict[str, Any] = {"gate": {"gate": "silu"}, "oai": OAI}.get(which, {})
    if which.startswith("bias"):
        bias = torch.randn(*((len(ENDS),) if which == "bias" else ()), N).to(BF16)
        keywords = {"bias": bias.requires_grad_()}
    if which == "row_scale":
        keywords = {"row_scale": torch.rand(ROWS, requires_grad=True)}
    if which == "residual":
        keywords = {"residual": torch.randn(ROWS, N, requires_grad=True)}
    tensors = [one for one in keywords.values() if isinstance(one, torch.Tensor)]

    def call(a: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return warploom.grouped_gemm(a, w.mT, offs=ends, **keywords)

    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    d = run(*read, offsets(*ENDS))
    dd = torch.randn_like(d)
    found = torch.autograd.grad(d, (*read, *tensors), dd)
    wide = [one.detach().double().requires_grad_() for one in (*read, *tensors)]
    exact, group = products(wide[0], wide[1]), group_of_rows()
    if which.startswith("bias"):
        exact = exact + (wide[2][group] if which == "bias" else wide[2])
    if which == "gate":
        exact = torch.nn.functional.silu(exact[:, : N // 2]) * exact[:, N // 2 :]
    if which == "oai":
        exact = oai(exact)
    if which == "row_scale":
        exact = exact * wide[2][: ENDS[-1], None]
    if which == "residual":
        exact = exact + wide[2][: ENDS[-1]]
    wanted = torch.autograd.grad(exact, wide, dd[: ENDS[-1]].double())
    for one, other, of in zip(found, wanted, (*read, *tensors), strict=True):
        assert one.dtype == of.dtype and one.shape == of.shape
        assert close(one, other, 2**-5)
    assert not found[0][ENDS[-1] :].any()
    assert found[1].is_contiguous()  # as the weight is, not its transpose


def test_gradients_of_groups_of_k_have_groups_of_rows() -> None:
    torch.manual_seed(0)
    a = torch.randn(ROWS, K, dtype=BF16, requires_grad=True)
    b = torch.randn(ROWS, N, dtype=BF16, requires_grad=True)
    d = warploom.grouped_gemm(a.t(), b, offs=offsets(*ENDS))
    dd = torch.randn_like(d)
    found = torch.autograd.grad(d, (a, b), dd)
    each = dd.double()[group_of_rows()]
    last = ENDS[-1]
    assert close(found[0][:last], torch.einsum("skn,sn->sk", each, b[:last].double()))
    assert close(found[1][:last], torch.einsum("skn,sk->sn", each, a[:last].double()))
    assert not found[0][last:].any() and not found[1][last:].any()


# ---- Block scales, and batches of which only the first rows count --------------------------------


def blocks(k: int = 320, n: int = 256) -> dict[str, torch.Tensor]:
    """fp8 rows and weights with their block scales, and both times these in float64."""
    torch.manual_seed(0)
    groups = len(ENDS)
    a = torch.randn(ROWS, k).to(torch.float8_e4m3fn)
    w = torch.randn(groups, n, k).to(torch.float8_e4m3fn)
    scale_a = torch.rand(ROWS, -(-k // 128)) + 0.5
    scale_b = torch.rand(groups, -(-n // 128), -(-k // 128)) + 0.5
    wide_a = a.double() * scale_a.double().repeat_interleave(128, 1)[:, :k]
    each = scale_b.double().repeat_interleave(128, 2)[:, :, :k]
    wide_w = w.double() * each.repeat_interleave(128, 1)[:, :n]
    return {"a": a, "w": w, "sa": scale_a, "sb": scale_b, "wide_a": wide_a, "wide_w": wide_w}


@pytest.mark.parametrize(("k", "n"), [(2880, 128), (320, 200), (64, 96)])
def test_rows_are_multiplied_with_the_block_scales_of_their_group(k: int, n: int) -> None:
    """K = 2880 is 22.5 blocks, as gpt-oss has it; 64 and 96 are less than one."""
    one = blocks(k, n)
    d = warploom.grouped_gemm(
        *(one["a"], one["w"].mT), offs=offsets(*ENDS), scale_a=one["sa"], scale_b=one["sb"]
    )
    assert d.dtype == BF16
    assert close(d[: ENDS[-1]], products(one["wide_a"], one["wide_w"]))


def test_block_scales_may_be_powers_of_two() -> None:
    one = blocks()
    e8m0 = torch.full_like(one["sb"], 127 + 3).to(torch.uint8).view(torch.float8_e8m0fnu)
    plain = torch.full_like(one["sb"], 8.0)
    found = [
        warploom.grouped_gemm(
            *(one["a"], one["w"].mT), offs=offsets(*ENDS), scale_a=one["sa"], scale_b=scale
        )
        for scale in (e8m0, plain)
    ]
    assert found[0][: ENDS[-1]].equal(found[1][: ENDS[-1]])


LENGTHS = (5, 0, 9, 7)


def masked() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batches of 9 rows, of which those that do not count are NaN, and their weights."""
    torch.manual_seed(0)
    a, w = torch.randn(len(LENGTHS), 9, K, dtype=BF16), torch.randn(len(LENGTHS), N, K, dtype=BF16)
    for group, length in enumerate(LENGTHS):
        a[group, length:] = torch.nan
    return a, w, offsets(*LENGTHS)


def test_rows_that_do_not_count_are_neither_read_nor_written() -> None:
    a, w, lengths = masked()
    bias, scale = torch.randn(len(LENGTHS), N, dtype=BF16), torch.rand(len(LENGTHS), 9)
    residual = torch.randn(len(LENGTHS), 9, N)
    out = torch.full((len(LENGTHS), 9, N), 7.0, dtype=BF16)
    steps = {"bias": bias, "row_scale": scale, "residual": residual, "out": out}
    d = warploom.grouped_gemm(a, w.mT, lengths=lengths, expected_m=4, **steps)
    assert d.data_ptr() == out.data_ptr()
    exact = (a.double() @ w.mT.double() + bias[:, None].double()) * scale[..., None].double()
    exact += residual
    for group, length in enumerate(LENGTHS):
        assert not length or close(d[group, :length], exact[group, :length])
        assert (d[group, length:] == 7).all()


def test_masked_batches_have_block_scales_of_each_row() -> None:
    one = blocks()
    a, sa = one["a"][:36].view(4, 9, -1), one["sa"][:36].view(4, 9, -1)
    d = warploom.grouped_gemm(
        a, one["w"].mT, lengths=offsets(*LENGTHS), scale_a=sa, scale_b=one["sb"]
    )
    exact = one["wide_a"][:36].view(4, 9, -1) @ one["wide_w"].mT
    for group, length in enumerate(LENGTHS):
        assert not length or close(d[group, :length], exact[group, :length])


def test_a_kernel_of_masked_batches_is_chosen_by_the_rows_that_are_expected() -> None:
    a, w, lengths = torch.ones(512, K, dtype=BF16), masked()[1], offsets(*LENGTHS)
    tiles = []
    for expected in (100, 8):
        call = GroupedCall(a, w.mT, lengths, expected_m=expected)
        spec: Any = call.draft(NO_GPU).choice.spec
        assert spec.operation == MASKED
        tiles.append(spec.schedule.tile[0])
    assert tiles == [128, 32]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offs": offsets(*ENDS)}, "must be one of them"),
        ({"lengths": None, "expected_m": 4}, "with lengths, int32"),
        ({"lengths": offsets(5, 0, 10, 7)}, "lengths .* must be from 0 to 9"),
        ({"lengths": offsets(5, -1, 9, 7)}, "must be from 0 to 9"),
        ({"lengths": offsets(5, 0, 9)}, "4 matrices with lengths .* must be one for each group"),
        ({"lengths": torch.tensor(LENGTHS)}, "lengths .* contiguous int32"),
        ({"lengths": list(LENGTHS)}, "with lengths, int32"),
        ({"expected_m": -1}, "expected_m -1"),
        ({"expected_m": 2.5}, "expected_m 2.5"),
        ({"a": torch.ones(36, K, dtype=BF16)}, r"must be \[G, M, K\]"),
        ({"out": torch.ones(4, 10, N, dtype=BF16)[:, :9]}, "batches 9 rows apart"),
        ({"row_scale": torch.ones(4, 8)}, "row_scale"),
        ({"bias": torch.ones(N, requires_grad=True)}, "masked batches are not differentiated"),
        ({"row_scale": torch.ones(4, 9).to_sparse()}, "row_scale, a sparse tensor"),
        ({"a": torch.ones(4, 9, K, dtype=BF16).to_sparse()}, "a, a sparse tensor"),
    ],
    ids=str,
)
def test_bad_calls_of_masked_batches_are_refused(change: dict[str, Any], told: str) -> None:
    a, w, lengths = masked()
    call = {"a": a, "lengths": lengths, **change}
    with pytest.raises(ProblemError, match=told):
        warploom.grouped_gemm(call.pop("a"), w.mT, **call)


@pytest.mark.parametrize(
    ("scale_a", "scale_b", "told"),
    [
        ((ROWS, 3), (4, 256, 3), r"must be \[G, N/128, K/128\]"),
        ((ROWS, 3), (4, 256), "is that of block scales"),
        ((ROWS,), (4, 2, 3), "is that of block scales"),
        ((ROWS, 2), (4, 2, 3), "scale_"),
    ],
    ids=str,
)
def test_scales_that_are_not_those_of_blocks_are_refused(
    scale_a: tuple[int, ...], scale_b: tuple[int, ...], told: str
) -> None:
    one = blocks()
    with pytest.raises(ProblemError, match=told):
        warploom.grouped_gemm(
            *(one["a"], one["w"].mT),
            offs=offsets(*ENDS),
            scale_a=torch.ones(scale_a),
            scale_b=torch.ones(scale_b),
        )


@pytest.mark.parametrize("shape", [(9, 4, N), (1, 36, N), (4, 9, N, 1), (36, N)], ids=str)
def test_masked_results_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    a, w, lengths = masked()
    with pytest.raises(ProblemError, match="out "):
        warploom.grouped_gemm(a, w.mT, lengths=lengths, out=torch.empty(shape, dtype=BF16))


def test_masked_batches_of_no_rows_have_results_of_none() -> None:
    a, w, lengths = masked()
    d = warploom.grouped_gemm(a[:, :0], w.mT, lengths=torch.zeros_like(lengths))
    assert d.shape == (len(LENGTHS), 0, N)


# ---- Bad calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offs": None}, "must come with offs"),
        ({"offs": offsets(5, 3, 20, 33)}, "must not decrease"),
        ({"offs": offsets(-1, 3, 20, 33)}, "must not decrease, from 0 on"),
        ({"offs": offsets(5, 5, 20, 38)}, "to at most 37"),
        ({"offs": offsets(5, 5, 20)}, "4 matrices with offs .* must be one for each group"),
        ({"offs": torch.tensor(ENDS)}, "must be contiguous int32"),
        ({"offs": offsets(*ENDS)[:, None]}, "must be contiguous int32"),
        ({"offs": list(ENDS)}, "offs"),
        ({"b": torch.ones(4, 40, N, dtype=BF16)}, r"must be \[S, K\] by \[G, K, N\]"),
        ({"a": torch.ones(ROWS, K)}, "element types of operands"),
        ({"a": torch.ones(ROWS, K, dtype=torch.float16)}, "must have one type"),
        ({"bias": torch.ones(3, N)}, "bias"),
        ({"row_scale": torch.ones(3)}, r"row_scale \[3\] .* 37 elements"),
        ({"scale_b": torch.ones(4)}, r"scale_b \[4\] .*\[4, 32\] or \[32\], \[4, 1\] for a scale"),
        ({"scale_b": torch.ones(3, 1)}, r"scale_b \[3, 1\] .* \[4, 1\] for a scale of each"),
        ({"bias": torch.ones(4, 1, N)}, r"bias \[4, 1, 32\] .* use bias.flatten"),
        ({"residual": torch.ones(4, ROWS, N)}, r"residual \[4, 37, 32\] .* must be \[37, 32\]"),
        ({"residual": torch.ones(4 * ROWS, N)}, r"residual .* must be \[37, 32\], a row for each"),
        ({"row_scale": torch.ones(4, ROWS)}, r"row_scale \[4, 37\] .* must have 37 elements"),
        ({"scale_a": torch.ones(4, ROWS)}, r"scale_a \[4, 37\] .* must have 37 elements"),
        ({"row_scale": torch.ones(ROWS, dtype=BF16)}, "must be fp32"),
        ({"gate": "tanh"}, "must be one of"),
        ({"activation": ["relu"]}, "activation .*must be one of"),
        ({"gate": "silu", "gate_layout": []}, "gate_layout .*must be one of"),
        ({"gate": "silu", "activation": "relu"}, "must be one of them"),
        ({"gate_limit": 2.0}, "limit 2.0 with gate None: .*those of swiglu_oai"),
        ({"gate_alpha": torch.ones(2)}, r"gate_alpha <tensor \[2\]> of type Tensor: .* a number"),
        ({"gate": "swiglu_oai", "gate_limit": [7.0]}, r"gate_limit \[7.0\] .* must be a number"),
        ({"gate": "swiglu_oai", "gate_alpha": True}, "gate_alpha True .* must be a number"),
        ({"out": torch.zeros(ROWS, N + 1, dtype=BF16)}, "out"),
        ({"use_fast_accum": 2}, "use_fast_accum"),
    ],
    ids=str,
)
def test_bad_calls_are_refused(change: dict[str, Any], told: str) -> None:
    a, w = operands()
    call = {"a": a, "b": w.mT, "offs": offsets(*ENDS), **change}
    with pytest.raises(ProblemError, match=told):
        warploom.grouped_gemm(call["a"], call["b"], **_others(call))
    graded = {**call, "a": call["a"].detach().requires_grad_()}
    if "activation" not in change and "gate" not in change:
        graded |= {"activation": "relu"}  # which torch computes, for the gradient
    if "out" not in change:
        with pytest.raises(ProblemError, match=told):
            warploom.grouped_gemm(graded["a"], graded["b"], **_others(graded))


def _others(call: dict[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in call.items() if name not in ("a", "b")}


def test_calls_of_another_form_are_refused() -> None:
    a, w = operands()
    ends = offsets(*ENDS)
    for call, told in (
        (lambda: warploom.grouped_gemm(a.t(), a, offs=ends, bias=w[0, 0]), "bias with a"),
        (lambda: warploom.grouped_gemm(w, w.mT, offs=ends), "groups of one size are batches"),
        (
            lambda: warploom.grouped_gemm(a.to(torch.int8).t(), a.to(torch.int8), offs=ends),
            "must be multiples of 128.*warploom.cast",
        ),
    ):
        with pytest.raises(ProblemError, match=told):
            call()
    graded, named = a.clone().requires_grad_(), {"activation": "relu", "spec": "nonsense"}
    with pytest.raises(ProblemError, match="spec 'nonsense' with an epilogue"):
        warploom.grouped_gemm(graded, w.mT, offs=ends, **named)
    no_tensors: tuple[tuple[Any, Any], ...] = (([1.0], None), (a, [1.0]))
    for rows, bias in no_tensors:
        with pytest.raises(ProblemError, match="must be a torch tensor"):
            warploom.grouped_gemm(rows, w.mT, offs=ends, bias=bias)
    many = torch.zeros(MOST_GROUPS + 1, dtype=torch.int32)
    with pytest.raises(ProblemError, match="at most 1024 groups"):
        warploom.grouped_gemm(a.t(), a, offs=many)


def test_illegal_kernels_say_why() -> None:
    plain: dict[str, Any] = {"batched": True, "groups": "rows"}
    for change, told in (
        ({"batched": False}, "batched false with groups rows"),
        ({"layout_a": "col"}, "layout_a col with groups rows"),
        ({"groups": "k"}, "must be col and row"),
        ({"sparse": "a"}, "sparse a with groups"),
        ({"epilogue": (Amax(),)}, "without outputs beside D"),
        (
            {"a": "e4m3", "b": "e4m3", "accumulation": "promoted", "block_scales": "row_row"},
            "block_scales row_row with groups rows",
        ),
    ):
        with pytest.raises(SpecificationError, match=told):
            spec_of(GemmOperation(**{"a": "bf16", "b": "bf16", "d": "bf16", **plain, **change}))
    with pytest.raises(SpecificationError, match="split_k 2"):
        spec_of(GemmOperation("bf16", "bf16", "bf16", **plain), split_k=2)


# ---- Kernels and launches ------------------------------------------------------------------------


def spec_of(operation: GemmOperation, **fields: Any) -> KernelSpec:
    fields = {"tile": (128, 128, 64), **fields}
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))


BY_ROWS = GemmOperation("bf16", "bf16", "bf16", batched=True, groups="rows")
BY_K = GemmOperation("bf16", "bf16", "bf16", "col", "row", batched=True, groups="k")
MASKED = replace(BY_ROWS, groups="masked")
BLOCKS = GemmOperation(
    "e4m3",
    "e4m3",
    "bf16",
    accumulation="promoted",
    batched=True,
    block_scales="row_block",
    groups="rows",
)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 100, 256, 4000])
def test_few_rows_of_a_group_are_on_the_narrow_side(rows: int, bits: int) -> None:
    kind: Any = {16: "bf16", 8: "e4m3"}[bits]
    operation = GemmOperation(kind, kind, "bf16", batched=True, groups="rows")
    schedule: Any = choose(operation, GemmShape(rows, 4096, 2048, 64), device=NO_GPU).spec.schedule
    assert schedule.swap_ab or rows > 64
    assert not schedule.swap_ab or schedule.tile[0] >= min(rows, 64)


@pytest.mark.parametrize("rows", [128, 160, 256, 288, 320])
@pytest.mark.parametrize("epilogue", [(), (Gate("silu"),)], ids=["plain", "gate"])
def test_rows_that_vary_around_a_multiple_of_a_tile_get_a_larger_tile(
    rows: int, epilogue: tuple[Gate, ...]
) -> None:
    """Half of the groups of 256 rows on average have more, and took three tiles of 128 rows."""
    operation = GemmOperation(
        "bf16", "bf16", "bf16", batched=True, groups="rows", epilogue=epilogue
    )
    shape = GemmShape(rows, 1536, 2048, 128)
    schedule: Any = choose(operation, shape, device=NO_GPU).spec.schedule
    spread = 1.2 * rows**0.5
    tiles = -(-rows // schedule.tile[0])
    if epilogue and rows == 320:  # no larger tile has registers for a gate
        return
    assert rows + spread <= tiles * schedule.tile[0]


@pytest.mark.parametrize("rows", [128, 160, 256, 288, 320])
def test_results_in_fp32_are_stored_by_tma_at_every_number_of_rows(rows: int) -> None:
    """Swapped tiles have no such store for fp32, and were the only ones of their class."""
    operation = GemmOperation("bf16", "bf16", "fp32", batched=True, groups="rows")
    schedule: Any = choose(operation, GemmShape(rows, 1536, 2048, 128), device=NO_GPU).spec.schedule
    assert schedule.store == "tma"


def test_every_shape_has_a_kernel() -> None:
    for operation in (BY_ROWS, BY_K, MASKED, BLOCKS):
        for requires in ("tma", "direct"):
            for rows in (1, 30, 100, 5000):
                shape = GemmShape(rows, 72, 4096, 8)
                assert choose(operation, shape, device=NO_GPU, requires=requires).spec


def test_the_grid_is_the_same_whatever_the_offsets_are() -> None:
    """A captured graph replays it: each group may have one tile that is not full."""
    problem = GemmProblem(1000, 4096, 512, 512, 512, 4096, batches=3, batches_b=Batches(3, 512))
    (launch,) = launches(spec_of(BY_ROWS), problem, DeviceLimits(10_000))
    assert launch.grid == (8 + 3 - 1) * 32
    (launch,) = launches(spec_of(BY_ROWS), problem, DeviceLimits(132))
    assert launch.grid == 132
    (launch,) = launches(spec_of(BY_K), problem, DeviceLimits(10_000))
    assert launch.grid == 3 * 8 * 32


def test_stores_and_sums_stop_where_groups_end() -> None:
    """D's map, and those of operands by k, have rows that end at any: see `bounded`."""
    problem = GemmProblem(1000, 4096, 512, 512, 512, 4096, batches=3, batches_b=Batches(3, 512))
    spec = spec_of(BY_ROWS)
    (launch,) = launches(spec, problem, DeviceLimits(132))
    d_map, a_map = launch.parameters["d_map"], launch.parameters["a_map"]
    assert isinstance(d_map, TensorMap) and isinstance(a_map, TensorMap)
    columns, rows = gemm_layout(spec.operation, spec.schedule).store_box  # type: ignore[arg-type]
    assert d_map.extents == (4096, 2**30, 1001, 2**30 + 1) and d_map.box == (columns, rows, 1, 1)
    assert first_row(d_map, 7, 500) == 493
    assert a_map.extents == (512, 1000)
    problem = GemmProblem(512, 4096, 1000, 512, 4096, 4096, batches=3, batch_pitch_d=512 * 4096)
    (launch,) = launches(spec_of(BY_K, cluster=(2, 1)), problem, DeviceLimits(132))
    b_map = launch.parameters["b_map"]
    assert isinstance(b_map, TensorMap)
    assert b_map.extents == (4096, 2**30, 1001, 2**30 + 1) and b_map.box == (64, 32, 1, 1)
    assert first_row(b_map, 64, 64) == 0 and first_row(b_map, 1, 1000) == 999


@pytest.mark.parametrize("expected_m", [None, 4], ids=["rows", "masked"])
@pytest.mark.parametrize("of", ["a weight", "a gradient"])
def test_a_matrix_that_is_expanded_to_all_groups_is_copied_for_each(
    of: str, expected_m: int | None
) -> None:
    """Tiles find a matrix by its group: TMA reads zeros past the last one of a map."""
    b = torch.ones(1, N, K, dtype=BF16).mT if of == "a weight" else torch.ones(1, 1, 1, dtype=BF16)
    b = b.expand(len(ENDS), K, N)
    call = GroupedCall(torch.ones(36, K, dtype=BF16), b, offsets(*ENDS), expected_m=expected_m)
    draft: Any = call.draft(NO_GPU)
    assert draft.copies == ("b",)
    b_map = launches(draft.choice.spec, draft.problem, DeviceLimits(132))[0].parameters["b_map"]
    assert isinstance(b_map, TensorMap) and b_map.extents[-1] == len(ENDS)
    assert call.copied(draft.details).b.stride(0) == draft.problem.batches_b.pitch == N * K


def first_row(found: TensorMap, valid: int, end: int) -> int:
    """The row at which a box begins that has so many up to the end."""
    pitch, again, last = found.pitches
    assert pitch == again and found.fits(1 << 40)
    address = ((2**30 - valid) * pitch + end * again + 2**30 * last) % 2**64
    assert address % pitch == 0
    return address // pitch


_STUBS = """
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>
#define __device__
#define __forceinline__ inline
#define CUTE_UNROLL
using std::max; using std::min;
struct Threads { int x; };
static thread_local Threads threadIdx, blockDim;
void __syncthreads();
int __shfl_up_sync(uint32_t, int, int);
"""
_HARNESS = Path(__file__).with_name("groups.cpp")


@needs_compiler
@pytest.mark.parametrize("operation", ["rows", "masked"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tile": (128, 256, 64), "cluster": (2, 1), "swizzle_size": 3},
        {"tile": (128, 64, 64), "cluster": (1, 2), "raster": "along_n"},
        {"tile": (16, 128, 64), "swap_ab": True},
    ],
    ids=str,
)
def test_tiles_find_their_groups_whatever_the_offsets_are(
    fields: dict[str, Any], operation: str, tmp_path: Path
) -> None:
    spec = spec_of({"rows": BY_ROWS, "masked": MASKED}[operation], **fields)
    names = ("TileCoord", "GroupTable", "GroupedTiles")
    parts = definitions(render(spec), *names)
    assert len(parts) == 3
    schedule: Any = spec.schedule
    m, n, _ = schedule.tile
    constants = f"""
constexpr int kTileM = {m}, kTileN = {n}, kSwizzle = {schedule.swizzle_size};
constexpr int kClusterM = {schedule.cluster[0]}, kClusterN = {schedule.cluster[1]};
constexpr bool kMasked = {str(operation == "masked").lower()};
struct Parameters {{
  int m, n, batches;
  const int* offsets;
}};
"""
    text = (_STUBS, constants, *parts, f'#line 1 "{_HARNESS}"', _HARNESS.read_text())
    program = build("\n".join(text), tmp_path)
    draws, cases = random.Random(0), list[str]()
    for rows, columns, groups in ((1, 8, 1), (702, 264, 9), (5160, 1000, 129), (2048, 72, 1024)):
        ends = sorted(draws.choices(range(rows + 1), k=groups))
        unordered = draws.choices(range(-9, rows + 99), k=groups)
        whole = [0] * (groups // 2) + [rows] * (groups - groups // 2)
        few = draws.choices(range(rows // groups + 1), k=groups)
        for given in (ends, unordered, whole, few, [2**31 - 1] * groups, [-(2**31)] * groups):
            cases.append(f"{rows} {columns} {groups} {' '.join(map(str, given))}")
    done = subprocess.run(
        [program], input="\n".join(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout or "a sum beyond 32 bits"


@pytest.mark.parametrize(
    "operation",
    [
        *(BY_ROWS, BY_K, MASKED, BLOCKS),
        replace(BLOCKS, groups="masked", block_scale_b="e8m0"),
        replace(BY_ROWS, epilogue=(Gate("silu"), Scale("row"), Residual("bf16"))),
        replace(MASKED, epilogue=(Scale("row"), Scale("row"), Residual("fp32"))),
    ],
    ids=["rows", "k", "masked", "blocks", "masked blocks", "residual", "masked residual"],
)
def test_samples_are_calls_of_their_operation(operation: GemmOperation) -> None:
    """What the tuner times is drawn here, and held against float64."""
    shape = GemmShape(20, 64, 128, 4)
    trial = FAMILY.trial(operation, shape, "cpu", 0)
    one = trial.sets[0]
    assert one.offs is not None
    if operation.groups == "masked":  # how many of 30 rows count
        assert one.a.shape == (120, 128) and 10 <= int(one.offs.min()) <= int(one.offs.max()) < 30
    else:
        assert one.offs[-1] == 4 * (128 if operation is BY_K else 20)
    (call,) = FAMILY.calls(operation, shape)
    assert isinstance(call, GroupedCall)
    assert call.draft(NO_GPU).choice.spec.operation == operation
    assert trial.error_share(choose(operation, shape, device=NO_GPU).spec) <= 1


def test_kernels_are_handed_every_tensor_by_its_place_in_the_epilogue(gpu: PretendedGpu) -> None:
    """A bias in the place of a scale would be seen on a GPU alone."""
    a, w = operands()
    ends, bias = offsets(*ENDS), torch.ones(len(ENDS), N, dtype=BF16)
    row, residual = torch.ones(ROWS), torch.ones(ROWS, N // 2)
    steps = {"bias": bias, "gate": "silu", "row_scale": row, "scale_a": row, "residual": residual}
    for _ in range(3):
        d = warploom.grouped_gemm(a, w.mT, offs=ends, **steps)  # type: ignore[arg-type]
    for launch in gpu.launches:
        given = {"a": a, "b": w, "offsets": ends, "bias_1": bias, "scale_0": row, "scale_3": row}
        given["residual_4"] = residual
        assert {name: launch[name] for name in given} == {
            name: one.data_ptr() for name, one in given.items()
        }
    assert gpu.launches[-1]["d"] == d.data_ptr()
    call = GroupedCall(a, w.mT, ends, **steps)  # type: ignore[arg-type]
    drafted = call.draft(NO_GPU)
    scalars = dict(zip(drafted.scalars, call.scalars(drafted.details), strict=True))
    assert scalars == {"residual_4_beta": 1.0}


@pytest.mark.parametrize("together", [True, False], ids=["lengths", "offs"])
def test_kernels_are_handed_block_scales_and_how_they_lie(
    gpu: PretendedGpu, together: bool
) -> None:
    one = blocks()
    a, sa, rows = one["a"][:36], one["sa"][:36].t().contiguous().t(), {"offs": offsets(*ENDS)}
    bias = torch.ones(len(ENDS), 256, dtype=BF16)
    if together:
        a, rows = a.view(4, 9, -1), {"lengths": offsets(*LENGTHS)}
        sa = sa.unflatten(0, (4, 9))
    for _ in range(2):
        warploom.grouped_gemm(*(a, one["w"].mT), scale_a=sa, scale_b=one["sb"], bias=bias, **rows)
    for launch in gpu.launches:
        given = {"a": a, "a_scales": sa, "b_scales": one["sb"], "bias_0": bias}
        assert {name: launch[name] for name in given} == {
            name: tensor.data_ptr() for name, tensor in given.items()
        }


def test_block_scales_are_read_wherever_they_lie() -> None:
    one = blocks()
    column_by_column = one["sa"].t().contiguous().t()
    for scale_a, strides in ((one["sa"], (3, 1)), (column_by_column, (1, ROWS))):
        call = GroupedCall(
            *(one["a"], one["w"].mT, offsets(*ENDS)), scale_a=scale_a, scale_b=one["sb"]
        )
        problem: Any = call.draft(NO_GPU).problem
        assert (problem.scales_a.row, problem.scales_a.k) == strides
        assert (problem.scales_b.row, problem.scales_b.k) == (3, 1)
        assert problem.scales_b.batches == Batches(len(ENDS), 2 * 3)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", ["scale_a", "scale_b", "row_scale", "residual", "out"])
@pytest.mark.parametrize("form", ["rows", "masked", "columns"])
def test_numbers_in_the_place_of_tensors_are_named(form: str, name: str, grad: bool) -> None:
    a, w = operands()
    rows: dict[str, Any] = {"offs": offsets(*ENDS), name: 0.5}
    given = (a, w.mT)
    if form == "masked":
        a, w, lengths = masked()
        given, rows = (a, w.mT), {"lengths": lengths, name: 0.5}
    if form == "columns":
        given = (w, a.t())
    with (
        pytest.raises(ProblemError, match=f"{name} 0.5 of type float"),
        torch.set_grad_enabled(grad),
    ):
        warploom.grouped_gemm(*given, **rows)


def test_groups_of_columns_are_written_where_the_call_says() -> None:
    a, w = operands()
    w[1] = 0
    out = torch.empty(ROWS, N, dtype=BF16).t()
    assert warploom.grouped_gemm(w, a.t(), offs=offsets(*ENDS), out=out) is out
    assert close(out[:, : ENDS[-1]].t(), products(a.double(), w.double()))
    with pytest.raises(ProblemError, match=r"out .* whose columns have groups"):
        warploom.grouped_gemm(w, a.t(), offs=offsets(*ENDS), out=out[None])


def test_batches_have_a_scale_of_each_matrix() -> None:
    _, w = operands()
    w[1], scale = 0, torch.rand(len(ENDS), 1)
    d = warploom.grouped_gemm(w, w.mT, scale_b=scale)
    assert close(d, w.double() @ w.double().mT * scale[..., None])
    with pytest.raises(ProblemError, match="bias"):
        warploom.grouped_gemm(w, w.mT, bias=torch.tensor(1.0))


def test_nested_tensors_are_named() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)])
    with pytest.raises(ProblemError, match="a, a nested tensor"):
        warploom.grouped_gemm(nested, operands()[1].mT, offs=offsets(*ENDS))
