"""Rows in groups on the CPU: what calls return, where groups lie, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pretended_gpu import PretendedGpu, gpu

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.cast import (
    CastOperation,
    CastProblem,
    CastSchedule,
    CastShape,
)
from warploom.generator.launches import NO_GPU
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.families.cast.call import CastCall
from warploom.runtime.plan import targets

__all__ = ["gpu"]

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
Block = str | tuple[int, int]
BLOCKS: list[Block] = ["tensor", "row", (1, 128)]
ENDS = (5, 5, 140, 268, 390)  # of 400 rows: the second is empty, and ten rows have none
ROWS, WIDTH = 400, 300
RANGES = [*zip((0, *ENDS), ENDS, strict=False)]
STARTS = (0, 128, 128, 384, 512)  # in x.T: where groups begin, in whole blocks of 128
LAST = 640


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def operand(dtype: torch.dtype = torch.bfloat16, width: int = WIDTH) -> torch.Tensor:
    """Rows of very different sizes; those of no group are NaN."""
    random = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-9, 9, (ROWS, 1), generator=random).float())
    x = torch.randn(ROWS, width, generator=random) * sizes
    x[ENDS[-1] :] = torch.nan
    return x.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.float(), other.float())


def test_given_scales_of_groups_are_those_that_a_call_returns() -> None:
    x = operand()
    for block in BLOCKS[1:]:
        right = groups_of(x, E4M3, block, pow2=True)
        found = groups_of(x, E4M3, block, scale=right[1], scale_t=right[3])
        assert found[1] is right[1] and found[3] is right[3]
        assert torch.equal(found[4], right[4])
        assert same(found[0][: ENDS[-1]], right[0][: ENDS[-1]])
        assert same(found[2][:, :LAST], right[2][:, :LAST])
    few = torch.ones(WIDTH, LAST // 128)  # as many as these groups have, not as any may have
    with pytest.raises(ProblemError, match=r"scale_t .*shape \[300, 8\].* in 5 groups"):
        groups_of(x, E4M3, (1, 128), scale=torch.ones(ROWS, 3), scale_t=few)


def groups_of(
    x: torch.Tensor, dtype: torch.dtype, block: Block, **options: Any
) -> tuple[torch.Tensor, ...]:
    return warploom.cast(x, dtype, block=block, transpose=True, offsets=offsets(*ENDS), **options)


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_blocks_of_a_group_are_those_that_it_has_alone(
    source: torch.dtype, dtype: torch.dtype
) -> None:
    """A block that had rows of two groups would have the larger scale in both."""
    x = operand(source)
    q, scale, q_t, scale_t, ends = groups_of(x, dtype, (1, 128))
    assert ends.tolist() == [128, 128, 384, 512, 640] and ends.dtype == torch.int32
    assert q_t.shape == (WIDTH, 1024) and scale_t.shape == (WIDTH, 8)
    for (begin, end), start in zip(RANGES, STARTS, strict=True):
        own = warploom.cast(x[begin:end], dtype, block=(1, 128), transpose=True)
        blocks = -(-(end - begin) // 128)
        assert same(q[begin:end], own[0]) and same(scale[begin:end], own[1])
        assert same(q_t[:, start : start + end - begin], own[2])
        assert not q_t[:, start + end - begin : start + blocks * 128].float().any()
        assert same(scale_t[:, start // 128 : start // 128 + blocks], own[3])


@pytest.mark.parametrize("block", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, INT8], ids=str)
def test_other_scales_are_of_the_rows_that_count(dtype: torch.dtype, block: str) -> None:
    """A NaN of the rows that have no group would make the scale 1."""
    x = operand()
    for options in ({}, {"pow2": True}):
        q, scale, q_t, scale_t, _ = groups_of(x, dtype, block, **options)
        own = warploom.cast(x[: ENDS[-1]], dtype, block=block, transpose=True, **options)
        counted = scale[: ENDS[-1]] if block == "row" else scale
        assert same(q[: ENDS[-1]], own[0]) and same(counted, own[1]) and same(scale_t, own[3])
        for (begin, end), start in zip(RANGES, STARTS, strict=True):
            assert same(q_t[:, start : start + end - begin], own[2][:, begin:end])
            rest = q_t[:, start + end - begin : start + -(-(end - begin) // 128) * 128]
            assert not rest.float().any()


def test_given_scales_and_an_amax_are_of_the_rows_that_count() -> None:
    x, scale = operand(torch.float32), torch.tensor(0.37)
    amax = torch.full((1,), 2.0**-9)
    q, returned, q_t, scale_t, _ = groups_of(x, E5M2, "tensor", scale=scale, amax=amax)
    assert returned is scale and scale_t is scale
    assert amax.item() == x[: ENDS[-1]].abs().max().item()
    right, _ = warploom.cast(x[: ENDS[-1]], E5M2, scale=scale)
    assert same(q[: ENDS[-1]], right) and same(q_t[:, :5], right[:5].t())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_stochastic_rounding_leaves_gaps_zero_and_one_state_has_one_result(block: Block) -> None:
    x, state = operand(), torch.tensor([3, 4])
    options: dict[str, Any] = {"rounding": "stochastic"}
    found = groups_of(x, E4M3, block, rounding_state=state, **options)
    again = groups_of(x, E4M3, block, rounding_state=state, **options)
    other = groups_of(x, E4M3, block, **options)
    for begin, end in ((128, 384), (0, 5)):
        assert same(found[2][:, begin:end], again[2][:, begin:end])
    assert not same(found[2][:, 128:384], other[2][:, 128:384])
    assert not found[2][:, 5:128].float().any()
    if block == "tensor":
        assert same(found[0][5:140].t(), found[2][:, 128 : 128 + 135])


@pytest.mark.parametrize("gradient", [False, True])
def test_what_a_gate_makes_is_in_groups(gradient: bool) -> None:
    z, dh = operand(width=512), operand(width=256) if gradient else None
    found = groups_of(z, E4M3, (1, 128), gate="silu", gradient=dh)
    last = ENDS[-1]
    made = warploom.cast(
        *(z[:last], E4M3),
        block=(1, 128),
        transpose=True,
        gate="silu",
        gradient=None if dh is None else dh[:last],
    )
    assert same(found[0][:last], made[0]) and same(found[1][:last], made[1])
    own = warploom.cast(
        *(z[5:140], E4M3),
        block=(1, 128),
        transpose=True,
        gate="silu",
        gradient=None if dh is None else dh[5:140],
    )
    assert same(found[2][:, 128:263], own[2]) and same(found[3][:, 1:3], own[3])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_room_suffices_for_whatever_groups_there_are(block: Block) -> None:
    for m, ends, columns in (
        (0, (0, 0), 0),
        (5, (), 0),
        (1, (1,), 128),
        (128, (128,), 128),
        (129, (129,), 256),
        (129, (1, 129), 256),
        (256, (1, 2, 256), 512),
        (3, (3,) * 1024, 384),
        (1024, (*range(1, 1025),), 131072),
        (1030, (*range(7, 1031),), 131072),
    ):
        *_, q_t, scale_t, found = warploom.cast(
            torch.ones(m, 8), E4M3, block=block, transpose=True, offsets=offsets(*ends)
        )
        assert q_t.shape == (8, columns) and found.shape == (len(ends),)
        assert scale_t.shape == {"tensor": (), "row": (8, 1)}.get(str(block), (8, columns // 128))
        assert found.tolist() == sorted(found.tolist())
        assert not len(found) or int(found[-1]) <= columns


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_groups_of_no_rows_have_scales_of_1_and_end_at_0(block: Block) -> None:
    amax = torch.zeros(1) if block == "tensor" else None
    for m, n, ends in ((6, 4, (0, 0, 0)), (0, 4, (0,)), (6, 0, (2, 6)), (6, 4, ())):
        x = torch.full((m, n), torch.nan)
        _, scale, q_t, scale_t, found = warploom.cast(
            x, E4M3, block=block, transpose=True, offsets=offsets(*ends), amax=amax
        )
        assert found.tolist() == [0] * len(ends) and q_t.shape[0] == n
        if block != (1, 128):
            assert (scale_t == 1).all()
        if block == "tensor":
            assert scale == 1 and amax == 0


# ---- Gradients of weights ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2, INT8], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_grouped_gemms_take_what_casts_write(block: Block, dtype: torch.dtype) -> None:
    if (block, dtype) == ((1, 128), INT8):
        return
    x, dy = operand(width=80), operand(width=48)
    *_, x_t, scale_x, ends = groups_of(x, dtype, block)
    *_, dy_t, scale_dy, _ = groups_of(dy, dtype, block)
    dw = warploom.grouped_gemm(
        *(dy_t, x_t.t()), offs=ends, scale_a=scale_dy, scale_b=scale_x, out_dtype=torch.float32
    )
    assert dw.shape == (len(ENDS), 48, 80) and not dw[1].any()
    wide = [
        value.double() * (scale.double() if block != (1, 128) else _spread(scale))
        for value, scale in ((dy_t, scale_dy), (x_t, scale_x))
    ]
    for group, (start, end) in enumerate(zip(STARTS, ends.tolist(), strict=True)):
        exact = wide[0][:, start:end] @ wide[1][:, start:end].t()
        assert (dw[group].double() - exact).abs().max() <= 2**-18 * max(1.0, exact.abs().max())


def _spread(scale: torch.Tensor) -> torch.Tensor:
    return scale.double().repeat_interleave(128, 1)


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"offsets": offsets(5, 3)}, "must not decrease, from 0 on to at most 8"),
        ({"offsets": offsets(5, 9)}, "must not decrease, from 0 on to at most 8"),
        ({"offsets": offsets(-1, 8)}, "must not decrease, from 0 on to at most 8"),
        ({"offsets": offsets(8).long()}, "must be contiguous int32"),
        ({"offsets": offsets(4, 8)[None]}, "must be contiguous int32"),
        ({"offsets": offsets(4, 5, 8, 8)[::2]}, "must be contiguous int32"),
        ({"offsets": offsets(*[8] * 1025)}, "must be at most 1024"),
        ({"offsets": [8]}, "must be a torch tensor"),
        ({"transpose": False}, "offsets without transpose.*groups have gaps in x.T alone"),
        ({"block": (128, 128)}, "offsets with block .*which grouped GEMMs read"),
        ({"block": (1, 32)}, "offsets with block .*which grouped GEMMs read"),
        ({"x": torch.zeros(2, 4, 8)}, "with offsets.*must be .m, n."),
        ({"x": torch.zeros(8)}, "with offsets.*must be .m, n."),
        ({"offsets": torch.zeros(2, dtype=torch.int32, device="meta")}, "device"),
    ],
)
def test_groups_that_are_wrong_are_told(wrong: dict[str, Any], rule: str) -> None:
    given = {"x": torch.zeros(8, 16), "dtype": E4M3, "offsets": offsets(4, 8), "transpose": True}
    for _ in range(2):
        with pytest.raises(ProblemError, match=rule):
            warploom.cast(**{**given, **wrong})


# ---- Operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_compiled_code_has_groups_and_fake_tensors_have_their_room(block: Block) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def cast(x: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return warploom.cast(x, E4M3, block=block, transpose=True, offsets=ends)

    torch._dynamo.reset()
    x, ends = operand(), offsets(*ENDS)
    right = cast(x, ends)
    found = torch.compile(cast, fullgraph=True, backend="aot_eager")(x, ends)
    with FakeTensorMode() as mode:
        fake = cast(mode.from_tensor(x), mode.from_tensor(ends))
    for one, other, empty in zip(found, right, fake, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert (empty.shape, empty.stride()) == (other.shape, other.stride())
    assert same(found[2][:, :LAST], right[2][:, :LAST]) and same(found[4], right[4])


@pytest.mark.parametrize("grouped", [False, True])
def test_compiled_code_is_one_for_all_numbers_of_rows(grouped: bool) -> None:
    """Batches have as many as they have: torch gives up a function that it compiles for each."""
    from torch._dynamo.testing import CompileCounter

    def cast(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        if grouped:
            return warploom.cast(x, E4M3, block=(1, 128), transpose=True, offsets=ends)[0]
        return warploom.cast(x, E4M3, block=(1, 128))[0]

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(cast, fullgraph=True, backend=counter)
    x = operand().nan_to_num()
    for rows in (400, 300, 257, 140, 200):
        ends = offsets(5, rows)
        assert same(compiled(x[:rows], ends), cast(x[:rows], ends))
    assert counter.frame_count == 2  # of the first number of rows, then of any


def test_torch_finds_no_fault_with_the_operator_of_groups() -> None:
    rest = (False, "nearest", None, "column_major", None, None, None)
    x = torch.ones(128, 130)  # of a whole block, so that no column is left as it is
    for scale, scale_t in ((None, None), (torch.ones(128, 2), torch.ones(130, 1))):
        given = (x, E5M2, "1x128", True, scale, *rest, scale_t, offsets(128))
        torch.library.opcheck(torch.ops.warploom.cast_groups.default, given)
        torch.library.opcheck(torch.ops.warploom.cast_groups_functional.default, given)


def test_calls_like_the_last_are_recognised_and_cast_their_own_groups() -> None:
    x = operand()
    for ends in (ENDS, (1, 2, 3, 4, 390), (390, 390, 390, 390, 390), ENDS):
        *_, q_t, _, found = warploom.cast(
            x, E4M3, block=(1, 128), transpose=True, offsets=offsets(*ends)
        )
        last = ends[-1] - ends[-2]
        own = warploom.cast(x[ends[-2] : ends[-1]], E4M3, block=(1, 128), transpose=True)
        begin = int(found[-2])
        assert same(q_t[:, begin : begin + last], own[2])


def test_kernels_are_handed_every_tensor_by_its_name(gpu: PretendedGpu) -> None:
    """Offsets in the place of a scale, or of where groups end, would be seen on a GPU alone."""
    x, ends_of_rows, scale = operand(), offsets(*ENDS), torch.ones(())
    for _ in range(3):
        q, _, q_t, _, ends = warploom.cast(
            x, E4M3, transpose=True, scale=scale, offsets=ends_of_rows
        )
    given = {"x": x, "scale": scale, "offsets": ends_of_rows, "q": q, "q_t": q_t, "ends": ends}
    launch = gpu.launches[-1]
    assert {name: launch[name] for name in given} == {
        name: one.data_ptr() for name, one in given.items()
    }
    assert all(one["offsets"] == ends_of_rows.data_ptr() for one in gpu.launches)


# ---- Kernels -------------------------------------------------------------------------------------


def spec(block: str = "1x128", **options: Any) -> KernelSpec:
    options = {"transpose": True, **options}
    operation = CastOperation("bf16", "e4m3", block, offsets=True, **options)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, CastSchedule(256))


def test_kernels_of_groups_have_both_orientations() -> None:
    assert spec().name.startswith("cast_sm90a_bf16_e4m3_1x128_transpose_offsets_256x1_")
    for options, told in (
        ({"transpose": False}, "offsets without transpose"),
        ({"block": "128x128"}, "offsets with block 128x128"),
        ({"block": "1x32"}, "offsets with block 1x32"),
    ):
        with pytest.raises(SpecificationError, match=told):
            spec(**options)
    for block in ("tensor", "row", "1x128"):
        dispatch.choose(spec(block).operation, CastShape(8192, 4096))  # type: ignore[type-var]


def test_launches_are_of_as_many_tiles_as_groups_may_have() -> None:
    """Whatever the offsets are: in one launch, but for scales of all rows."""
    known = family("cast")
    for m, groups, tiles in ((1, 1024, 1), (1024, 1024, 1024), (8192, 32, 95), (129, 1, 2)):
        problem = CastProblem(m, 300, 300, 304, (1, m), 896, (1, 300), groups=groups)
        (launch,) = known.launches(spec(), problem, NO_GPU)
        assert launch.grid == tiles * 3 and launch.parameters["groups"] == groups
        *_, factors = known.launches(spec("row"), problem, NO_GPU)
        assert factors.grid == tiles * 3
        sizes = {one.tensor: one.bytes for one in known.workspaces(spec("row"), problem)}
        assert sizes == {
            "factors": (tiles + 3) * 512,
            "peaks": 2 * tiles * 3 * 512,
            "done": (tiles + 3) * 4,
        }
    huge = CastProblem(2**31 - 1000, 8, 8, 16, (1, 8), 8, (1, 8), groups=1024)
    with pytest.raises(ProblemError, match="must be smaller"):
        known.launches(spec(), huge, NO_GPU)


def test_a_call_without_offsets_has_the_kernel_that_it_had() -> None:
    call = CastCall(operand(), E4M3, (1, 128), True)
    assert not call.draft(targets.at_hand(-1)).choice.spec.operation.offsets  # type: ignore[attr-defined]
    assert len(warploom.cast(operand(), E4M3, block=(1, 128), transpose=True)) == 4
