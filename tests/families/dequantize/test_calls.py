"""Calls on the CPU: what they return, what is refused, what compilers see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dequantize_weights import EVERY, experts, rows, rows_spec, spec

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.dequantize import DequantizeShape
from warploom.quantization import PackedExperts
from warploom.runtime.families.dequantize.call import DequantizeCall
from warploom.runtime.families.dequantize.family import FAMILY
from warploom.runtime.families.gemm.block_scales import dequantised
from warploom.runtime.sampled import differ

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [kind for kind in EVERY if kind[1] in (16, 32, None)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
def test_results_are_those_of_the_weight_itself(kind: tuple[str, int | None, str, str]) -> None:
    packed = experts(kind, 3, 70, 160)
    for dtype in (BF16, FP16):
        expected = packed.dequantize(dtype)
        assert torch.equal(warploom.dequantize(packed, dtype), expected)
        assert torch.equal(warploom.dequantize(packed, dtype, first=1), expected[1:])
        assert torch.equal(warploom.dequantize(packed, dtype, first=1, end=2), expected[1:2])
        assert torch.equal(warploom.dequantize(packed[2], dtype), expected[2])


@pytest.fixture
def packed() -> PackedExperts:
    return experts(("uint4", 32, "bf16", "16-bit"), 3, 70, 160)


def test_a_result_may_have_any_strides(packed: PackedExperts) -> None:
    room = torch.zeros(3, 75, 163, dtype=BF16)
    out = room[:, 2:72, 3:]
    assert warploom.dequantize(packed, out=out) is out
    assert torch.equal(out, packed.dequantize())
    assert not room[:, :2].any() and not room[:, 72:].any() and not room[..., :3].any()
    assert warploom.dequantize(packed, first=3).shape == (0, 70, 160)


def test_what_is_not_taken_is_told(packed: PackedExperts) -> None:
    out = torch.empty(3, 70, 160, dtype=BF16)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"weight": torch.ones(2, 2)}, "must be a PackedWeight or PackedExperts, or a tensor"),
        ({"dtype": torch.float32}, "dtype torch.float32.*torch.bfloat16"),
        ({"first": -1}, "experts -1 to None of 3"),
        ({"first": 2, "end": 4}, "experts 2 to 4 of 3"),
        ({"weight": packed[0], "first": 1}, "must be a range of the weight's experts"),
        ({"out": out[1:]}, r"out \[2, 70, 160\]"),
        ({"out": out.half()}, "must be .* of torch.bfloat16"),
        ({"out": torch.empty(3, 160, 70, dtype=BF16).mT}, "contiguous along K"),
        ({"out": out[:1].expand(3, 70, 160)}, "no two elements at one address"),
        ({"spec": "gemm"}, "gemm"),
    ]
    for keywords, said in wrong:
        with pytest.raises(warploom.WarploomError, match=said):
            warploom.dequantize(**{"weight": packed, **keywords})
    scales = packed.slabs[..., :-1]
    with pytest.raises(ProblemError, match="data of"):
        warploom.dequantize(PackedExperts(scales, packed.metadata))


def test_a_scale_that_requires_grad_is_refused() -> None:
    packed = experts(("int4", None, "fp32", "16-bit"), 1, 8, 16)
    assert packed.channel_scales is not None
    packed.channel_scales.requires_grad_()
    with pytest.raises(ProblemError, match="a quantized weight is fixed"):
        warploom.dequantize(packed)
    with torch.no_grad():
        assert warploom.dequantize(packed).shape == (1, 8, 16)


def test_only_tensors_that_kernels_cannot_read_are_copied(packed: PackedExperts) -> None:
    def copies(weight: PackedExperts) -> tuple[str, ...]:
        return warploom.explain(warploom.dequantize, weight, gpu="h200").copies

    assert copies(packed) == ()
    assert copies(PackedExperts(packed.slabs[::2], packed.metadata)) == ("data",)
    plan = warploom.explain(warploom.dequantize, packed, FP16, gpu="h200")
    assert plan.kernel.startswith("dequantize_sm90a_fp16_uint4_g32_bf16_")


def test_compilers_see_one_operator(packed: PackedExperts) -> None:
    def called(weight: PackedExperts, out: torch.Tensor) -> torch.Tensor:
        warploom.dequantize(weight, out=out)
        return warploom.dequantize(weight, FP16, first=1) + out[1:]

    out = torch.empty(3, 70, 160, dtype=BF16)
    compiled = torch.compile(called, fullgraph=True, backend="aot_eager")
    found = compiled(packed, torch.empty_like(out))
    assert torch.equal(found, called(packed, out))


def test_torch_finds_no_fault_with_the_operator(packed: PackedExperts) -> None:
    call = FAMILY.call(packed)
    values, _ = call.crossing()
    torch.library.opcheck(torch.ops.warploom.dequantize.default, values)
    again = DequantizeCall.crossed(*values)
    assert again.packing == call.packing and again.metadata == packed.metadata


def test_random_weights_are_quantized_as_the_operation_says() -> None:
    for kernel in (*map(spec, KINDS), rows_spec(), rows_spec(scale="e8m0")):
        operation: Any = kernel.operation
        call = FAMILY.draw(
            operation, DequantizeShape(5, 40, 64), "cpu", torch.Generator().manual_seed(0)
        )
        if operation.layout == "slabs":
            kind = operation.format, operation.group or None, operation.scale
            assert call.packing[:4] == (*kind, operation.activations)
        assert FAMILY.share([call.out], FAMILY.expected(call)) > 1
        call.compute(None, (call.out,))  # type: ignore[arg-type]
        assert FAMILY.share([call.out], FAMILY.expected(call)) == 0


def test_rows_of_e4m3_have_scales_of_blocks() -> None:
    for scale_type in ("fp32", "e8m0"):
        data, scale = rows(rows_spec(scale=scale_type), 3, 130, 200)
        expected = dequantised(data, scale, torch.float32)
        for dtype in (BF16, FP16):
            found = warploom.dequantize(data, dtype, scale=scale, first=1)
            assert differ(found, expected[1:].to(dtype)).sum() == 0
            found = warploom.dequantize(data[2], dtype, scale=scale[2])
            assert differ(found, expected[2].to(dtype)).sum() == 0


def test_rows_are_copied_only_where_k_is_not_contiguous() -> None:
    data, scale = rows(rows_spec(), 3, 130, 200, apart=3)
    for one, copies in ((data, ()), (data.mT.contiguous().mT, ("data",))):
        plan = warploom.explain(warploom.dequantize, one, scale=scale, gpu="h200")
        assert plan.copies == copies
        assert plan.kernel.startswith("dequantize_sm90a_bf16_e4m3_g128_fp32_rows_")


def test_rows_that_are_not_taken_are_told() -> None:
    data, scale = rows(rows_spec(), 3, 130, 200)
    packed = experts(KINDS[0], 1, 64, 128)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((data,), {}, "or a tensor of e4m3 with scale"),
        ((packed,), {"scale": scale}, "or a tensor of e4m3 with scale"),
        ((data.float(),), {"scale": scale}, "must be a quantized weight, or a tensor"),
        ((data[0, 0],), {"scale": scale}, "must be a quantized weight, or a tensor"),
        ((data,), {"scale": scale[:, :1]}, r"scale \[3, 1, 2\].*must be \[3, 2, 2\]"),
        ((data,), {"scale": scale.half()}, "of torch.float16"),
        ((data[0],), {"scale": scale[0], "first": 1}, "must be a range"),
    ]
    for given, keywords, said in wrong:
        with pytest.raises(ProblemError, match=said):
            warploom.dequantize(*given, **keywords)
