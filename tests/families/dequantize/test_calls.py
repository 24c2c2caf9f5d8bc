"""Calls on the CPU: what they return, what is refused, what compilers see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dequantize_weights import EVERY, experts, spec

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.dequantize import DequantizeShape
from warploom.quantization import PackedExperts
from warploom.runtime.families.dequantize.call import DequantizeCall
from warploom.runtime.families.dequantize.family import FAMILY

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
        ({"weight": torch.ones(2, 2)}, "must be a PackedWeight or PackedExperts"),
        ({"dtype": torch.float32}, "dtype torch.float32.*torch.bfloat16"),
        ({"first": -1}, "experts -1 to None of 3"),
        ({"first": 2, "end": 4}, "experts 2 to 4 of 3"),
        ({"weight": packed[0], "first": 1}, "must be a range of the experts"),
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
    for kind in KINDS:
        operation: Any = spec(kind).operation
        call = FAMILY.draw(
            operation, DequantizeShape(5, 40, 64), "cpu", torch.Generator().manual_seed(0)
        )
        assert call.packing[:4] == kind
        assert FAMILY.share([call.out], FAMILY.expected(call)) > 1
        call.compute(None, (call.out,))  # type: ignore[arg-type]
        assert FAMILY.share([call.out], FAMILY.expected(call)) == 0
