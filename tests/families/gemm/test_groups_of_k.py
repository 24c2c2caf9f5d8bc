"""Groups of k in 8 bits, which begin at multiples of 128, on the CPU."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from host import build, definitions, needs_compiler

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation, GemmShape, complete
from warploom.generator.families.gemm.launch import launches
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime.dispatch import choose
from warploom.runtime.families.gemm.family import FAMILY
from warploom.runtime.families.gemm.grouped_call import GroupedCall

M, N, K = 40, 48, 640
ENDS = (128, 128, 384, 512)  # the second group is empty, and 128 of k have none
RANGES = [*zip((0, *ENDS), ENDS, strict=False)]
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
FLOAT8 = TYPES[0]
WHOLE: dict[str, Any] = {"layout_a": "row", "layout_b": "col", "batched": True, "groups": "k"}
PLAIN = GemmOperation("e4m3", "e4m3", "bf16", **WHOLE)
SIXTEEN = GemmOperation(
    "bf16", "bf16", "fp32", layout_a="col", layout_b="row", batched=True, groups="k"
)
BLOCKS = GemmOperation(
    *("e4m3", "e4m3", "fp32"), accumulation="promoted", block_scales="row_row", **WHOLE
)


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def operands(kind: torch.dtype = FLOAT8) -> tuple[torch.Tensor, torch.Tensor]:
    """A [M, K] and B.T [N, K]; what no product reads is NaN."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(M, K, generator=generator), torch.randn(N, K, generator=generator)
    if kind == torch.int8:
        return (a * 30).to(kind), (b * 30).to(kind)
    a[:, ENDS[-1] :], b[:, ENDS[-1] :] = torch.nan, torch.nan
    return a.to(kind), b.to(kind)


def exact(
    a: torch.Tensor, b: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """The products of all groups, of operands times block scales."""
    wide = [a.double(), b.double()]
    if scales is not None:
        wide = [
            one * scale.double().repeat_interleave(128, 1)
            for one, scale in zip(wide, scales, strict=True)
        ]
    return torch.stack([wide[0][:, begin:end] @ wide[1][:, begin:end].t() for begin, end in RANGES])


def close(found: torch.Tensor, right: torch.Tensor, share: float = 2**-20) -> bool:
    return bool((found.double() - right).abs().max() <= share * right.abs().max())


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_each_group_has_its_own_result_and_an_empty_one_zeros(kind: torch.dtype) -> None:
    a, b = operands(kind)
    d = warploom.grouped_gemm(a, b.t(), offs=offsets(*ENDS))
    assert d.shape == (len(ENDS), M, N) and not d[1].any()
    assert d.dtype == (torch.int32 if kind == torch.int8 else torch.bfloat16)
    assert close(d, exact(a, b), 2**-8)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_scales_are_of_tensors_or_of_rows_as_casts_return_them(kind: torch.dtype) -> None:
    a, b = operands(kind)
    rows, columns, one = torch.rand(M) + 0.5, torch.rand(N) + 0.5, torch.tensor(0.75)
    for scale_a, scale_b in (
        (one, one),
        (one[None], one[None, None]),
        (rows, columns),
        (rows[:, None], columns[:, None]),
        (rows[:, None], one),
        (one, columns[:, None]),
    ):
        d = warploom.grouped_gemm(
            *(a, b.t()),
            offs=offsets(*ENDS),
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=torch.float32,
        )
        factor = scale_a.reshape(-1, 1).double() * scale_b.reshape(1, -1).double()
        assert close(d, exact(a, b) * factor), (scale_a.shape, scale_b.shape)


@pytest.mark.parametrize("layout", ["along k", "along rows"])
def test_block_scales_are_those_of_the_groups_own_k(layout: str) -> None:
    """Those behind the last group are NaN, as all may be that casts do not write."""
    a, b = operands()
    scales = torch.rand(M, K // 128) + 0.5, torch.rand(N, K // 128) + 0.5
    right = exact(*(one.nan_to_num() for one in (a.float(), b.float())), scales)  # type: ignore[call-arg]
    for scale in scales:
        scale[:, ENDS[-1] // 128 :] = torch.nan
    if layout == "along rows":
        scales = scales[0].t().contiguous().t(), scales[1].t().contiguous().t()
    d = warploom.grouped_gemm(
        *(a, b.t()), offs=offsets(*ENDS), scale_a=scales[0], scale_b=scales[1]
    )
    assert close(d, right, 2**-8) and not d[1].any()


def test_one_block_of_k_has_scales_of_rows_that_are_block_scales_as_well() -> None:
    a, b = operands()
    a, b = a[:, :128].contiguous(), b[:, :128].contiguous()
    scale_a, scale_b = torch.rand(M, 1), torch.rand(N, 1)
    for ends in ((128,), (0, 128), (128, 128)):
        d = warploom.grouped_gemm(
            *(a, b.t()), offs=offsets(*ends), scale_a=scale_a, scale_b=scale_b
        )
        whole = (a.double() * scale_a.double()) @ (b.double() * scale_b.double()).t()
        assert close(d.double().sum(0), whole, 2**-8)
    d = warploom.grouped_gemm(a, b.t(), offs=offsets(128), scale_a=scale_a, scale_b=scale_a.mean())
    assert close(d[0], (a.double() * scale_a) @ b.double().t() * scale_a.mean(), 2**-7)


def test_scales_of_rows_need_no_k_and_may_be_beside_one_of_a_tensor() -> None:
    """However much of k there is, that groups of some rows or none can have."""
    a, b = operands()
    scale_a, scale_b, one = torch.rand(M, 1), torch.rand(N, 1), torch.full((1, 1), 2.0)
    for k in (0, 128, 256):
        left, right, ends = a[:, :k], b[:, :k], offsets(0, k)
        wide = left.double() @ right.double().t()
        for first, second in ((scale_a, scale_b), (scale_a, one), (one, scale_b), (one, one)):
            d = warploom.grouped_gemm(left, right.t(), offs=ends, scale_a=first, scale_b=second)
            assert close(d[1], wide * first.double() * second.double().t(), 2**-8)
            assert not d[0].any()


def test_block_scales_of_no_columns_are_those_of_casts() -> None:
    a, b = operands()
    for m, n in ((M, 0), (0, N), (0, 0)):
        d = warploom.grouped_gemm(
            *(a[:m], b[:n].t()),
            offs=offsets(*ENDS),
            scale_a=torch.ones(m, 5),
            scale_b=torch.ones(n, 5),
        )
        assert d.shape == (len(ENDS), m, n)


def test_operands_that_are_views_are_read_or_copied() -> None:
    a, b = operands()
    right = warploom.grouped_gemm(a, b.t(), offs=offsets(*ENDS))
    wide = torch.zeros(M, K + 16).to(FLOAT8)
    wide[:, :K] = a
    for view in (wide[:, :K], a.t().contiguous().t()):
        assert torch.equal(warploom.grouped_gemm(view, b.t(), offs=offsets(*ENDS)), right)


def test_compiled_code_calls_the_operator() -> None:
    def gradient(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return warploom.grouped_gemm(a, b.t(), offs=ends, scale_a=torch.ones(()), scale_b=None)

    a, b = operands()
    torch._dynamo.reset()
    compiled = torch.compile(gradient, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, offsets(*ENDS)), gradient(a, b, offsets(*ENDS)))


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offs": offsets(100, 512)}, "must be multiples of 128.*use what warploom.cast"),
        ({"offs": offsets(128, 641)}, "must not decrease"),
        ({"offs": offsets(256, 128)}, "must not decrease"),
        ({"bias": torch.ones(N)}, "bias with a.*those of k have scales in 8 bits alone"),
        ({"activation": "relu"}, "activation with a"),
        ({"row_scale": torch.ones(M)}, "row_scale with a"),
        ({"scale_a": torch.ones(M - 1)}, "scale_a"),
        ({"scale_a": torch.ones(M, 5), "scale_b": torch.ones(1, 5)}, "one for each 1x128 of b.T"),
        ({"scale_a": torch.ones(M, 5)}, "which is that of block scales"),
    ],
)
def test_bad_calls_are_refused(change: dict[str, Any], told: str) -> None:
    a, b = operands()
    with pytest.raises(ProblemError, match=told):
        warploom.grouped_gemm(a, b.t(), **{"offs": offsets(*ENDS), **change})


def test_operands_of_16_bits_have_no_scales() -> None:
    a, b = (one.nan_to_num().bfloat16() for one in (x.float() for x in operands()))
    with pytest.raises(ProblemError, match=r"scale_a with a.*those of k have scales in 8 bits"):
        warploom.grouped_gemm(a, b.t(), offs=offsets(*ENDS), scale_a=torch.ones(()))


def test_the_last_group_may_end_with_k() -> None:
    """Where TMA has zeros for what a k tile lacks."""
    a, b = operands()
    a, b = a[:, :500].contiguous(), b[:, :500].contiguous()
    d = warploom.grouped_gemm(a, b.t(), offs=offsets(128, 500))
    assert close(d[1], a[:, 128:].double() @ b[:, 128:].double().t(), 2**-8)


def test_gradients_are_not_those_of_8_bits() -> None:
    a, b = operands()
    scale = torch.ones(M, requires_grad=True)
    with pytest.raises(ProblemError, match="must be of 16 bits"):
        warploom.grouped_gemm(a, b.t(), offs=offsets(*ENDS), scale_a=scale)


# ---- Kernels -------------------------------------------------------------------------------------


def spec_of(operation: GemmOperation, tile: tuple[int, int], **fields: Any) -> KernelSpec:
    whole = {"tile": (*tile, 128), **fields}
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, whole))


def test_illegal_kernels_say_why() -> None:
    for change, told in (
        ({"layout_a": "col", "layout_b": "row"}, "of 8 bits row and col"),
        ({"block_scales": "row_block", "accumulation": "promoted"}, "row_row with groups k"),
    ):
        with pytest.raises(SpecificationError, match=told):
            spec_of(GemmOperation("e4m3", "e4m3", "bf16", **{**WHOLE, **change}), (128, 128))


@pytest.mark.parametrize(
    "operation",
    [
        PLAIN,
        BLOCKS,
        GemmOperation("int8", "int8", "int32", **WHOLE),
        GemmOperation("e4m3", "e5m2", "fp32", accumulation="promoted", **WHOLE),
        GemmOperation("e5m2", "e4m3", "bf16", epilogue=(Scale("row"), Scale("column")), **WHOLE),
        GemmOperation("int8", "int8", "fp16", epilogue=(Scale("device"),) * 2, **WHOLE),
    ],
    ids=lambda one: one.a + one.block_scales + one.d,
)
def test_every_shape_has_a_kernel_whose_sample_is_right(operation: GemmOperation) -> None:
    for n in (1, 129, 4096):
        choose(operation, GemmShape(2048, n, 300, 8))
    trial = FAMILY.trial(operation, GemmShape(20, 64, 200, 4), "cpu", 0)
    one = trial.sets[0]
    assert one.offs is not None and one.a.shape == (20, 800) and int(one.offs[-1]) == 800
    assert all(end % 128 == 0 or end == 800 for end in one.offs.tolist())
    (call,) = FAMILY.calls(operation, GemmShape(20, 64, 200, 4))
    assert isinstance(call, GroupedCall)
    assert call.draft(NO_GPU).choice.spec.operation == operation


def test_boxes_are_of_plain_matrices() -> None:
    """Groups begin where k tiles do, so that no box stops within one."""
    a, b = operands()
    draft: Any = GroupedCall(a, b.t(), offsets(*ENDS)).draft(NO_GPU)
    (launch,) = launches(draft.choice.spec, draft.problem, DeviceLimits(132))
    for name, rows in (("a", M), ("b", N)):
        found = launch.parameters[f"{name}_map"]
        assert isinstance(found, TensorMap) and found.extents == (K, rows)
        assert found.pitches == (K,)
    assert launch.parameters["batches"] == len(ENDS)


def test_kernels_are_handed_block_scales_of_all_k() -> None:
    a, b = operands()
    scale_a = torch.ones(K // 128, 44).t()[:M]
    draft: Any = GroupedCall(
        *(a, b.t(), offsets(*ENDS)), scale_a=scale_a, scale_b=torch.ones(N, K // 128)
    ).draft(NO_GPU)
    assert draft.choice.spec.operation.block_scales == "row_row"
    strides = [
        (one.row, one.k, one.batches.pitch)
        for one in (draft.problem.scales_a, draft.problem.scales_b)
    ]
    assert strides == [(1, 44, 0), (K // 128, 1, 0)]
    one = GroupedCall(a, b.t()[:, :1], offsets(*ENDS), None, torch.ones(M, 5), torch.ones(1, 5))
    assert one.draft(NO_GPU).choice.spec.operation.block_scales == "row_row"  # type: ignore[attr-defined]


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
_HARNESS = Path(__file__).with_name("groups_of_k.cpp")


@needs_compiler
@pytest.mark.parametrize(
    "spec",
    [
        spec_of(PLAIN, (128, 256), cluster=(2, 1)),
        spec_of(BLOCKS, (64, 128), kernel_schedule="pingpong"),
        KernelSpec("sm_90a", SIXTEEN, complete("sm_90a", SIXTEEN, {"tile": (128, 128, 64)})),
    ],
    ids=lambda one: one.name,
)
def test_k_tiles_are_those_of_their_group_whatever_the_offsets_are(
    spec: KernelSpec, tmp_path: Path
) -> None:
    parts = definitions(render(spec), "TileCoord", "Tiles", "GroupTable", "GroupedTiles")
    assert len(parts) == 4
    schedule: Any = spec.schedule
    m, n, tile_k = schedule.tile
    constants = f"""
constexpr bool kWhole = {str(spec.operation is not SIXTEEN).lower()};
constexpr int kTileM = {m}, kTileN = {n}, kTileK = {tile_k}, kSwizzle = {schedule.swizzle_size};
constexpr int kClusterM = {schedule.cluster[0]}, kClusterN = {schedule.cluster[1]};
struct Parameters {{
  int m, n, k, batches;
  const int* offsets;
}};
"""
    text = (_STUBS, constants, *parts, f'#line 1 "{_HARNESS}"', _HARNESS.read_text())
    program = build("\n".join(text), tmp_path)
    draws, cases = random.Random(0), list[str]()
    for k, groups in ((128, 1), (640, 9), (5000, 129), (128 * 700, 1024)):
        ends = [128 * one for one in sorted(draws.choices(range(k // 128 + 1), k=groups))]
        within = sorted(draws.choices(range(k + 1), k=groups))
        unordered = draws.choices(range(-9, k + 99), k=groups)
        for given in (
            ends,
            within,
            unordered,
            [k] * groups,
            [0] * groups,
            [2**31 - 1] * groups,
            [-5] * groups,
        ):
            cases.append(f"{m + 9} {n + 9} {k} {groups} {' '.join(map(str, given))}")
    done = subprocess.run(
        [program], input="\n".join(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout or "a sum beyond 32 bits"
