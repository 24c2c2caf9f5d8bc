"""Rows that are written where indices say: on the CPU, in messages, rules, texts and launches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch._subclasses import FakeTensorMode

import warploom
from warploom.errors import ProblemError
from warploom.generator.epilogue import Bias, EpilogueStep, Gate, Scale, Scatter
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation, GemmProblem, complete, gemm_layout
from warploom.generator.launches import NO_GPU, Address
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.grouped_call import GroupedCall

BF16 = torch.bfloat16
M, N, K, ROWS = 40, 48, 64, 60  # ROWS of D, where it is given
ENDS = torch.tensor([10, 10, 35], dtype=torch.int32)  # of groups: the last five rows have none
TO = Scatter("int32")
GEMM = family("gemm")

GENERATOR = torch.Generator().manual_seed(0)
A = torch.randn(M, K, generator=GENERATOR).to(BF16)
B = torch.randn(K, N, generator=GENERATOR).to(BF16)
W = torch.randn(3, N, K, generator=GENERATOR).to(BF16)
ORDER = torch.randperm(M, generator=GENERATOR)
SCALE = torch.rand(M, generator=GENERATOR)


def some(dtype: torch.dtype) -> torch.Tensor:
    """Indices of rows of D [ROWS, n], and of none."""
    index = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:M].to(dtype)
    none = [-1, ROWS, torch.iinfo(dtype).max, torch.iinfo(dtype).min]
    index[[3, 7, 12, 30]] = torch.tensor(none, dtype=dtype)
    return index


def moved(plain: torch.Tensor, index: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """What `into` is to hold, one row after the other."""
    wanted = into.clone()
    for row, to in enumerate(index.tolist()[: len(plain)]):
        if 0 <= to < len(wanted):
            wanted[to] = plain[row]
    return wanted


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_rows_with_an_index_are_written_and_no_others(
    index: torch.dtype, dtype: torch.dtype
) -> None:
    given = {"bias": torch.ones(N), "activation": "silu", "out_dtype": dtype}
    plain = warploom.gemm(A, B, **given)  # type: ignore[arg-type]
    out = torch.full((ROWS, N), 7.0).to(dtype)
    found = warploom.gemm(A, B, out=out, scatter=some(index), **given)  # type: ignore[arg-type]
    assert found is out
    wanted = moved(plain.float(), some(index), torch.full((ROWS, N), 7.0))
    assert torch.equal(out.float(), wanted)
    d = warploom.gemm(A, B, scatter=ORDER.to(index), **given)  # type: ignore[arg-type]
    assert torch.equal(d.float()[ORDER], plain.float())


def test_a_list_of_steps_may_end_with_it() -> None:
    listed = [("residual", torch.ones(M, N), 1.0), ("scatter", ORDER)]
    plain = warploom.gemm(A, B, residual=torch.ones(M, N))
    assert torch.equal(warploom.gemm(A, B, epilogue=listed)[ORDER], plain)
    alike = warploom.gemm(A, B, epilogue=listed[:1], scatter=ORDER)
    assert torch.equal(alike[ORDER], plain)


def test_rows_of_groups_are_written_where_indices_say() -> None:
    given: dict[str, Any] = {"offs": ENDS, "gate": "silu", "row_scale": SCALE}
    plain = warploom.grouped_gemm(A, W.mT, **given)[:35]
    out = torch.full((ROWS, N // 2), 7.0, dtype=BF16)
    warploom.grouped_gemm(A, W.mT, scatter=some(torch.int32), out=out, **given)
    assert torch.equal(out, moved(plain, some(torch.int32), torch.full_like(out, 7.0)))


def test_the_rows_of_experts_go_back_to_their_tokens() -> None:
    ids = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)
    offsets, order, inverse = warploom.route(ids, 3)
    rows, down = torch.randn(8, K).to(BF16), W.mT
    by_expert = warploom.grouped_gemm(rows, down, offs=offsets)
    by_token = warploom.grouped_gemm(rows, down, offs=offsets, scatter=order)
    assert torch.equal(by_token, by_expert[inverse.flatten().long()])


@pytest.mark.parametrize("grouped", [False, True], ids=["gemm", "grouped"])
@pytest.mark.parametrize("steps", [{}, {"activation": "silu"}], ids=str)
def test_gradients_come_back_by_the_same_indices(grouped: bool, steps: dict[str, Any]) -> None:
    index = ORDER.clone()
    index[[3, 4]] = torch.tensor([-1, M])

    def run(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
        if grouped:
            return warploom.grouped_gemm(a, b.mT, offs=ENDS, row_scale=SCALE, **steps, **more)
        return warploom.gemm(a, b, **steps, **more)

    one = A.clone().requires_grad_(), (W if grouped else B).clone().requires_grad_()
    other = A.clone().requires_grad_(), (W if grouped else B).clone().requires_grad_()
    d = run(*one, scatter=index)
    dd = torch.randn(d.shape, generator=torch.Generator().manual_seed(2)).to(BF16)
    taken = dd[index.clamp(0, M - 1)]
    taken[[3, 4]] = 0
    if grouped:
        taken[35:] = 0
    found = torch.autograd.grad(d, one, dd)
    wanted = torch.autograd.grad(run(*other), other, taken)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_compilers_and_fake_tensors_see_what_eager_calls_do() -> None:
    def both(index: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        warploom.gemm(A, B, scatter=index, out=out)
        grouped = warploom.grouped_gemm(A, W.mT, offs=ENDS, scatter=index)
        return warploom.gemm(A, B, scatter=index, activation="relu"), grouped[index[:35]]

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    outs = torch.zeros(ROWS, N, dtype=BF16), torch.zeros(ROWS, N, dtype=BF16)
    for x, y in zip(both(ORDER, outs[0]), compiled(ORDER, outs[1]), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(*outs)

    def graded(a: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, B, scatter=ORDER, activation="relu")

    a, again = A.clone().requires_grad_(), A.clone().requires_grad_()
    graded(a).sum().backward()
    torch.compile(graded, backend="aot_eager", fullgraph=True)(again).sum().backward()
    assert a.grad is not None and again.grad is not None and torch.equal(a.grad, again.grad)
    with FakeTensorMode() as mode:
        fake = map(mode.from_tensor, (A, B, ORDER, outs[0]))
        a, b, index, out = fake
        assert warploom.gemm(a, b, scatter=index).shape == (M, N)
        assert warploom.gemm(a, b, scatter=index, out=out) is out


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no tensor": (lambda: warploom.gemm(A, B, scatter=3), "scatter 3: must be a tensor"),  # type: ignore[arg-type]
    "floats": (lambda: warploom.gemm(A, B, scatter=SCALE), "must be int32 or int64 [40]"),
    "too few": (lambda: warploom.gemm(A, B, scatter=ORDER[:3]), "scatter [3] of torch.int64"),
    "apart": (
        lambda: warploom.gemm(A, B, scatter=torch.zeros(80).long()[::2]),
        "use index.contiguous()",
    ),
    "batches": (lambda: warploom.gemm(A[None], B, scatter=ORDER), "must be of rows of one matrix"),
    "rounding": (
        lambda: warploom.gemm(A, B, scatter=ORDER, rounding="stochastic"),
        "scatter with rounding stochastic",
    ),
    "not last": (
        lambda: warploom.gemm(A, B, epilogue=[("scatter", ORDER), ("bias", torch.ones(N))]),
        "must be the last",
    ),
    "two that are last": (
        lambda: warploom.gemm(
            A, B, epilogue=[("mean_square", torch.ones(M, 3)), ("scatter", ORDER)]
        ),
        "must be one of them, as each is the last step",
    ),
    "precision": (
        lambda: warploom.gemm(A.float(), B.float(), scatter=ORDER, precision="fp32"),
        "scatter with precision",
    ),
    "algorithm": (
        lambda: warploom.gemm(A, B, scatter=ORDER, algorithm="strassen"),
        "scatter with algorithm strassen",
    ),
    "columns of out": (
        lambda: warploom.gemm(A, B, scatter=ORDER, out=A.new_empty(ROWS, 8)),
        "must be [60, 48]",
    ),
    "the residual": (
        lambda: warploom.gemm(A, B, scatter=ORDER, residual=(x := A.new_zeros(M, N)), out=x),
        "do not overlap",
    ),
    "gradients with out": (
        lambda: warploom.gemm(
            A.clone().requires_grad_(), B, scatter=ORDER, out=A.new_empty(ROWS, N)
        ),
        "out with a tensor that requires grad",
    ),
    "gradients in 8 bits": (
        lambda: warploom.gemm(
            A.clone().requires_grad_(), B, scatter=ORDER, out_dtype=torch.float8_e4m3fn
        ),
        "must be of 16 bits or more",
    ),
    "gradients of lists": (
        lambda: warploom.gemm(A.tolist(), B, scatter=ORDER),  # type: ignore[arg-type]
        "of type list: must be a torch tensor",
    ),
    "gradients and indices on another device": (
        lambda: warploom.gemm(A.clone().requires_grad_(), B, scatter=ORDER.to("meta")),
        "a on cpu, b on cpu, scatter on meta: must be on one device",
    ),
    "gradients and sparse indices": (
        lambda: warploom.gemm(A.clone().requires_grad_(), B, scatter=ORDER.to_sparse()),
        "scatter, a sparse tensor",
    ),
    "gradients and nested indices": (
        lambda: warploom.gemm(
            *(A.clone().requires_grad_(), B),
            scatter=torch.nested.nested_tensor([ORDER[:20], ORDER[20:]]),
        ),
        "scatter, a nested tensor",
    ),
    "gradients, and scattered twice": (
        lambda: warploom.gemm(
            A.clone().requires_grad_(), B, epilogue=[("scatter", ORDER), ("scatter", ORDER)]
        ),
        "epilogue with scatter and scatter: must be one of them",
    ),
    "gradients of a plan": (
        lambda: warploom.plan(A, B, scatter=ORDER)(A.clone().requires_grad_(), B, scatter=ORDER),
        "scatter with a tensor that requires grad",
    ),
    "too few for groups": (
        lambda: warploom.grouped_gemm(A, W.mT, offs=ENDS, scatter=ORDER[:3]),
        "scatter [3] of torch.int64",
    ),
    "groups of one size": (
        lambda: warploom.grouped_gemm(A[None], W[:1].mT, scatter=ORDER),
        "must be of groups of rows",
    ),
    "masked": (
        lambda: warploom.grouped_gemm(A[None], W[:1].mT, lengths=ENDS[:1], scatter=ORDER),
        "scatter with lengths",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_scattered_is_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ProblemError, match=re.escape(message)):
        call()


@pytest.mark.parametrize(
    "index", [SCALE, torch.ones(M).bool(), ORDER[:3]], ids=["float", "bool", "few"]
)
def test_compilers_refuse_indices_of_groups_as_eager_calls_do(index: torch.Tensor) -> None:
    def graded(a: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return warploom.grouped_gemm(a, W.mT, offs=ENDS, row_scale=SCALE, scatter=at)

    compiled = torch.compile(graded, backend="eager")
    for call in (graded, compiled):
        with pytest.raises(ProblemError, match=re.escape("must be int32 or int64 [40]")):
            call(A.clone().requires_grad_(), index)


def test_indices_of_one_process_are_refused_with_distributed_tensors() -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        a, b = (DTensor.from_local(one, mesh, [Replicate()]) for one in (A.clone(), B))
        with pytest.raises(ProblemError, match="must be distributed over the mesh of a and b"):
            warploom.gemm(a.requires_grad_(), b, scatter=ORDER)
    finally:
        torch.distributed.destroy_process_group()


PLAIN = GemmOperation("bf16", "bf16", "bf16", epilogue=(TO,))
OPERATIONS = {
    "batched": (replace(PLAIN, batched=True), "batched with scatter_int32"),
    "masked": (replace(PLAIN, batched=True, groups="masked"), "groups masked with scatter_int32"),
    "pieces": (replace(PLAIN, terms=3, accumulation="promoted"), "terms 3 with scatter_int32"),
    "int32": (replace(PLAIN, a="int8", b="int8", d="int32"), "d int32"),
    "first": (replace(PLAIN, epilogue=(TO, Bias("bf16"))), "must be the last"),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_that_do_not_combine_say_why(name: str) -> None:
    operation, message = OPERATIONS[name]
    assert any(message in reason for reason in GEMM.operation_reasons(operation))


def test_a_scattered_result_takes_the_schedules_of_any_other() -> None:
    steps = (Bias("bf16"),)
    scattered = replace(PLAIN, epilogue=(*steps, TO))
    assert GEMM.table.timed_as(scattered) == replace(PLAIN, epilogue=steps)


def spec(*steps: EpilogueStep, tile: tuple[int, int], **fields: Any) -> KernelSpec:
    operation = replace(PLAIN, epilogue=(*steps, TO), **fields.pop("operation", {}))
    schedule = complete("sm_90a", operation, {"tile": (*tile, 64), **fields})
    return KernelSpec("sm_90a", operation, schedule)


GROUPED = {"batched": True, "groups": "rows"}
SPECS = [
    spec(tile=(128, 128)),
    spec(tile=(64, 8), consumers=1),
    spec(tile=(256, 96)),
    spec(tile=(128, 176)),
    spec(tile=(128, 128), operation={"d": "fp32"}),
    spec(Gate("silu"), tile=(128, 256)),
    spec(Scale("row"), tile=(128, 256), operation=GROUPED, cluster=(2, 1)),
    spec(tile=(16, 128), swap_ab=True, operation=GROUPED),
    spec(Gate("silu"), tile=(32, 128), swap_ab=True),
    spec(tile=(64, 64), consumers=1, split_k=4),
]


@pytest.mark.parametrize("kernel", SPECS, ids=lambda one: one.name)
def test_threads_store_every_16_bytes_of_a_buffer_once(kernel: KernelSpec) -> None:
    """The loop of the store, thread by thread: which words of which rows it reads and writes."""
    layout = gemm_layout(kernel.operation, kernel.schedule)  # type: ignore[arg-type]
    (columns, rows), span = layout.store_box, layout.store_span
    vectors = span // 16
    apart = 128 // vectors
    found = []
    for thread in range(128):
        for i in range(-(-rows // apart)):
            row = thread // vectors + i * apart
            offset = row * span + thread % vectors * 16
            if row < rows:
                found.append((row, thread % vectors, offset ^ (offset >> 3 & span - 16)))
    assert sorted(x[:2] for x in found) == [(r, v) for r in range(rows) for v in range(vectors)]
    assert sorted(x[2] for x in found) == list(range(0, rows * span, 16))
    assert span * 8 == columns * {"bf16": 16, "fp32": 32}[kernel.operation.d]  # type: ignore[attr-defined]
    text = render(kernel)
    assert "d_map" not in text
    assert f"kStaged = {rows}," in text and f"kSpan = {span};" in text
    assert "staged = thread / kVectors, byte = thread % kVectors * 16;" in text
    assert ("kRowsOfThread = kStaged / kApart;" in text) == (rows > apart)
    assert layout.rows_of_thread == -(-rows // apart)


def test_launches_have_the_indices_and_the_rows_of_d() -> None:
    out = torch.empty(ROWS, N, dtype=BF16)
    given: dict[str, Any] = {"bias": torch.ones(3, N), "row_scale": SCALE, "scatter": ORDER}
    grouped = GroupedCall(A, W.mT, ENDS, out=out, **given).draft(NO_GPU)
    plain = GemmCall(A, B, [("bias", torch.ones(N)), ("scatter", ORDER)], out).draft(NO_GPU)
    for draft, name in ((grouped, "scatter_2"), (plain, "scatter_1")):
        problem = cast("GemmProblem", draft.problem)
        assert (problem.m, problem.rows_d) == (M, ROWS)
        (launch,) = GEMM.launches(draft.choice.spec, problem, NO_GPU)
        addresses = {one.tensor for one in launch.parameters.values() if isinstance(one, Address)}
        assert addresses <= {*draft.tensors}
        assert name in addresses and launch.parameters["d_rows"] == ROWS
