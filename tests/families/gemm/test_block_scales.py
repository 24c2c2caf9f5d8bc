"""Block scales of gemm without a GPU: which calls have them, what they compute, what is refused."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Gate
from warploom.generator.families.gemm import FAMILY, GemmOperation, GemmShape, complete
from warploom.generator.families.gemm.launch import GemmProblem, ScaleStrides
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.dispatch import choose
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.reference import error_share, gemm_bound
from warploom.runtime.families.gemm.samples import GemmData

PROMOTED = "gemm_sm90a_e4m3_e4m3_bf16_promoted_128x128x128_stages6_0df7d4f8"
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(E4M3)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Powers of two that differ from neighbour to neighbour."""
    exponents = torch.arange(torch.Size(shape).numel()).reshape(shape) * 5 % 7 - 3
    return exponents.float().exp2().to(dtype)


def spread(scale: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    """A scale for each element of rows [.., rows, k], written down without the product's code."""
    r = torch.arange(rows) if scale.shape[-2] == rows else torch.arange(rows) // 128
    return scale.float().double()[..., r, :][..., torch.arange(k) // 128]


def operation(call: GemmCall) -> GemmOperation:
    return cast("GemmOperation", call.draft(NO_GPU).choice.spec.operation)


@pytest.mark.parametrize(
    ("m", "n", "k"), [(5, 200, 320), (64, 576, 640), (3, 192, 130), (1, 128, 256), (7, 100, 100)]
)
@pytest.mark.parametrize("dtype", [torch.float32, E8M0], ids=["fp32", "e8m0"])
@pytest.mark.parametrize("rows", ["block", "row"])
def test_a_call_scales_each_block_by_its_own_scale(
    m: int, n: int, k: int, dtype: torch.dtype, rows: str
) -> None:
    a, b = drawn(m, k), drawn(n, k, seed=1).t()
    of_b = -(-n // 128) if rows == "block" else n
    pair = scales(m, -(-k // 128), dtype=dtype), scales(of_b, -(-k // 128), dtype=dtype)
    bias = torch.randn(n)
    d = warploom.gemm(a, b, scale_a=pair[0], scale_b=pair[1], bias=bias, out_dtype=torch.float32)
    left, right = a.double() * spread(pair[0], m, k), b.t().double() * spread(pair[1], n, k)
    exact = left @ right.t() + bias.double()
    assert (d.double() - exact).abs().max() <= 1e-4 * (left.abs() @ right.abs().t()).max()
    listed = (("scale_a", pair[0]), ("scale_b", pair[1]), ("bias", bias))
    assert torch.allclose(gemm_bound(a, b, listed, d.dtype)[0], exact)
    assert error_share(d, a, b, listed) < 1


@pytest.mark.parametrize("which", [0, 1])
def test_the_bound_notices_a_scale_of_another_block(which: int) -> None:
    a, b = drawn(64, 640), drawn(256, 640, seed=1).t()
    pair = [scales(64, 5), scales(2, 5)]
    d = warploom.gemm(a, b, scale_a=pair[0], scale_b=pair[1])
    assert error_share(d, a, b, (("scale_a", pair[0]), ("scale_b", pair[1]))) < 1
    for shift, dim in ((1, 0), (8, 0), (1, 1)):
        wrong = [*pair]
        wrong[which] = pair[which].roll(shift + (which == 1 and shift == 8), dim)
        assert error_share(d, a, b, (("scale_a", wrong[0]), ("scale_b", wrong[1]))) > 1
    last = [one.clone() for one in pair]
    last[which][:, -1] = last[which][:, -2]  # the last but one, used twice
    assert error_share(d, a, b, (("scale_a", last[0]), ("scale_b", last[1]))) > 1


def test_shapes_tell_vectors_from_blocks() -> None:
    a, b = drawn(16, 2048), drawn(16, 2048, seed=1).t()
    of_rows: dict[str, Any] = {"scale_a": torch.rand(16), "scale_b": torch.rand(1, 16)}
    assert operation(call(a, b, **of_rows)).block_scales == "none"
    # [1, 16] is a scale for each column of 16, and for each of 16 blocks of k: A's scales decide.
    both = {"scale_a": torch.rand(16, 16), "scale_b": torch.rand(1, 16)}
    assert operation(call(a, b, **both)).block_scales == "row_block"
    assert (
        operation(call(a, b, **{**both, "scale_b": torch.rand(16, 16)})).block_scales == "row_row"
    )


def test_short_k_has_vectors_where_they_mean_the_same() -> None:
    a, b = drawn(7, 100), drawn(100, 100, seed=1).t()
    pair = torch.rand(7, 1), torch.rand(1, 1)
    assert operation(call(a, b, scale_a=pair[0], scale_b=pair[1])).block_scales == "none"
    narrow = [one.to(E8M0) for one in pair]
    assert operation(call(a, b, scale_a=narrow[0], scale_b=narrow[1])).block_scales == "row_block"


def call(a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> GemmCall:
    return GemmCall(a, b, list(keywords.items()))


def test_scales_lie_anyhow() -> None:
    """Any strides: of a transposed matrix, of every other element, of one that is repeated."""
    a, b = drawn(9, 384), drawn(256, 384, seed=1).t()
    pair = scales(9, 3), scales(2, 3)
    wanted = warploom.gemm(a, b, scale_a=pair[0], scale_b=pair[1])
    transposed = [one.t().contiguous().t() for one in pair]
    sparse = [torch.stack((one, one.neg()), -1).flatten(-2)[:, ::2] for one in pair]
    for views in (transposed, sparse):
        d = warploom.gemm(a, b, scale_a=views[0], scale_b=views[1])
        assert torch.equal(d, wanted)
    problem = drafted(call(a, b, scale_a=sparse[0], scale_b=transposed[1].expand(2, 3)))
    assert (problem.scales_a.row, problem.scales_a.k) == (6, 2)
    assert (problem.scales_b.row, problem.scales_b.k) == (1, 2)
    one = torch.ones(1, 1).expand(9, 3)
    repeated = drafted(call(a, b, scale_a=one, scale_b=pair[1])).scales_a
    assert (repeated.row, repeated.k) == (0, 0)


def drafted(one: GemmCall) -> GemmProblem:
    return cast("GemmProblem", one.draft(NO_GPU).problem)


def test_batches_are_rows_of_one_matrix_or_batches() -> None:
    a, b = drawn(2, 3, 9, 256), drawn(128, 256, seed=1).t()
    scale_a, scale_b = scales(2, 3, 9, 2), scales(1, 2)
    together = call(a, b, scale_a=scale_a, scale_b=scale_b)
    assert not operation(together).batched
    assert drafted(together).scales_a.row == 2
    apart = call(a, b, scale_a=scales(2, 3, 10, 2)[:, :, :9], scale_b=scale_b)
    assert operation(apart).batched
    assert drafted(apart).scales_a.batches.pitch == 20
    turned = scale_a.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ProblemError, match=r"batches one stride apart.*contiguous"):
        call(a, b, scale_a=turned, scale_b=scale_b).draft(NO_GPU)
    each = call(a, drawn(2, 3, 128, 256).mT, scale_a=scale_a, scale_b=scales(2, 3, 1, 2))
    assert operation(each).batched
    problem = drafted(each)
    assert (problem.scales_a.batches.count, problem.scales_a.batches.pitch) == (6, 18)
    assert (problem.scales_b.batches.count, problem.scales_b.batches.pitch) == (6, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale_b": None}, "that of block scales"),
        ({"scale_b": torch.rand(256)}, "that of block scales"),
        ({"scale_a": torch.rand(16)}, "that of block scales"),
        ({"scale_b": torch.rand(5, 2)}, "that of block scales"),
        ({"scale_a": torch.rand(16, 5).double()}, "must be fp32 or float8_e8m0fnu"),
        ({"scale_a": torch.rand(16, 5, device="meta")}, "must be on one device"),
        ({"scale_a": torch.rand(16, 5).requires_grad_()}, "are not differentiated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_scales_that_do_not_go_together_are_refused(change: dict[str, Any], said: str) -> None:
    a, b = drawn(16, 640), drawn(256, 640, seed=1).t()
    with pytest.raises(ProblemError, match=said):
        warploom.gemm(a, b, **{"scale_a": torch.rand(16, 5), "scale_b": torch.rand(2, 5), **change})


def test_vmap_is_refused_by_name() -> None:
    a, b = drawn(4, 16, 640), drawn(256, 640, seed=1).t()
    of_b = scales(2, 5)
    examples = torch.func.vmap(
        lambda one, scale: warploom.gemm(one, b, scale_a=scale, scale_b=of_b)
    )
    with pytest.raises(ProblemError, match=r"block scales inside of torch.func's vmap"):
        examples(a, torch.rand(4, 16, 5))


def test_a_compiled_function_computes_the_same() -> None:
    a, b = drawn(16, 640), drawn(256, 640, seed=1).t()
    of_b = scales(2, 5)

    def product(a: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, scale_a=scale, scale_b=of_b)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, scales(16, 5)), product(a, scales(16, 5)))


def test_inductor_compiles_a_product_with_e8m0_scales_into_a_tensor() -> None:
    """It compiles no operator that writes, beside e8m0."""
    a, b = drawn(16, 256), drawn(128, 256, seed=1).t()
    of_a = torch.ones(16, 2).to(torch.float8_e8m0fnu)

    def product(a: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, b, scale_a=scale, scale_b=scale[:1], out=out)

    outs = torch.zeros(2, 16, 128, dtype=torch.bfloat16)
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True)
    assert torch.equal(compiled(a, of_a, outs[0]), product(a, of_a, outs[1]))
    assert torch.equal(outs[0], outs[1]) and outs.any()


# ---- Kernels -------------------------------------------------------------------------------------


def block_scaled(**fields: Any) -> GemmOperation:
    chosen = {"accumulation": "promoted", "block_scales": "row_block", **fields}
    return GemmOperation("e4m3", "e4m3", "bf16", **chosen)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"accumulation": "fast"}, "must be of fp8 and promoted"),
        ({"block_scales": "none", "block_scale_a": "e8m0"}, "without block_scales: must be fp32"),
        ({"block_scales": "row_row", "epilogue": (Gate("silu"),)}, "must be row_block"),
    ],
    ids=str,
)
def test_no_operation_has_block_scales_that_nothing_multiplies(
    fields: dict[str, Any], said: str
) -> None:
    assert any(said in reason for reason in FAMILY.operation_reasons(block_scaled(**fields)))


@pytest.mark.parametrize(
    ("tile", "said"), [((64, 176, 128), "3 blocks of 128"), ((128, 256, 128), "registers")]
)
def test_a_tile_that_kernels_cannot_scale_is_refused(tile: tuple[int, int, int], said: str) -> None:
    one = block_scaled()
    with pytest.raises(SpecificationError, match=said):
        KernelSpec("sm_90a", one, complete("sm_90a", one, {"tile": tile}))


def test_up_has_scales_of_its_own() -> None:
    """Guards against kernels that scaled up by the scale of the gate: their rows lie half of N
    apart, and the block of up's begins anywhere.
    """
    one = block_scaled(epilogue=(Gate("silu"),))
    for fields in (
        {"tile": (128, 128, 128)},
        {"tile": (64, 64, 128), "swap_ab": True, "consumers": 1},
    ):
        text = render(KernelSpec("sm_90a", one, complete("sm_90a", one, fields)))
        assert "(p.n / 2 + min(n, p.n - 1) / 2) / 128" in text
    with pytest.raises(SpecificationError, match=r"tile n 112.*must divide 128"):
        KernelSpec("sm_90a", one, complete("sm_90a", one, {"tile": (64, 112, 128)}))


@pytest.mark.parametrize("m", [1, 16, 33, 64, 128, 256, 512, 4096])
def test_every_shape_has_a_kernel_with_a_gate(m: int) -> None:
    one, shape = block_scaled(epilogue=(Gate("silu"),)), GemmShape(m, 28672, 4096)
    for gpu in (NO_GPU, DeviceLimits(132, "NVIDIA H200")):
        assert choose(one, shape, device=gpu).spec.operation == one


def test_a_gate_of_odd_halves_is_refused() -> None:
    a, b = drawn(16, 256), drawn(2 * 96, 256).t()
    keywords: dict[str, Any] = {"scale_a": scales(16, 2), "scale_b": scales(2, 2)}
    keywords["out_dtype"] = torch.bfloat16
    with pytest.raises(ProblemError, match=r"gate of 192 columns.*multiple of 64.*pad the weight"):
        warploom.gemm(a, b, gate="silu", **keywords)
    listed = [(name, keywords.pop(name)) for name in ("scale_a", "scale_b")]
    with pytest.raises(ProblemError, match=r"gate of 192 columns.*multiple of 64.*pad the weight"):
        warploom.gemm(a, b, epilogue=[*listed, ("swiglu_gate", 1.0, 5.0)], **keywords)
    keywords |= dict(listed)
    halves = warploom.gemm(a, b, **keywords).float().chunk(2, -1)
    turns = b.view(256, 2, 96).mT.reshape(256, 192)  # gate and up in turn: blocks are of what lies
    found = warploom.gemm(a, turns, gate="silu", gate_layout="interleaved", **keywords)
    assert found.shape == halves[0].shape


def test_a_gate_scales_each_half_by_its_own_blocks() -> None:
    a, b, scale_a, scale_b = drawn(16, 256), drawn(384, 256), scales(16, 2), scales(3, 2)
    found = warploom.gemm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, gate="silu", out_dtype=torch.bfloat16
    )
    wide = (a.double() * spread(scale_a, 16, 256)) @ (b.double() * spread(scale_b, 384, 256)).t()
    gate, up = wide.chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    assert (found.double() - exact).abs().max() <= 0.02 * exact.abs().max()


def test_names_and_digests_of_kernels_without_block_scales_stay() -> None:
    plain = GemmOperation("e4m3", "e4m3", "bf16", accumulation="promoted")
    spec = KernelSpec("sm_90a", plain, complete("sm_90a", plain, {"tile": (128, 128, 128)}))
    assert spec.name == PROMOTED
    scaled = block_scaled(block_scale_a="e8m0")
    other = KernelSpec("sm_90a", scaled, complete("sm_90a", scaled, {"tile": (128, 128, 128)}))
    assert parse_name(other.name) == other
    assert "row_block_sa_e8m0" in other.name


@pytest.mark.parametrize("m", [1, 16, 33, 128, 256, 512, 4096])
@pytest.mark.parametrize("scaling", ["row_block", "row_row"])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (576, 7168), (130, 520), (32768, 512)])
def test_every_shape_has_a_kernel(n: int, k: int, m: int, scaling: str) -> None:
    one, shape = block_scaled(block_scales=scaling), GemmShape(m, n, k)
    spec = choose(one, shape, requires=FAMILY.table.required(one, shape)).spec
    assert spec.operation == one


def test_samples_have_the_scales_of_their_operation() -> None:
    one = GemmData(block_scaled(block_scale_b="e8m0"), GemmShape(20, 300, 600), "cpu", 0).operands()
    (_, scale_a), (_, scale_b) = one.listed
    assert (scale_a.shape, scale_b.shape, scale_b.dtype) == ((20, 5), (3, 5), E8M0)
    d = warploom.gemm(one.a, one.b, epilogue=one.listed)
    assert error_share(d, one.a, one.b, one.listed) < 1


def test_a_stride_that_kernels_cannot_count_is_refused() -> None:
    one = block_scaled()
    spec = choose(one, GemmShape(16, 256, 256)).spec
    problem = GemmProblem(16, 256, 256, 256, 256, 256, scales_a=ScaleStrides(2**30, 1))
    with pytest.raises(ProblemError, match=r"stride 1073741824 of scale_a: must be smaller"):
        FAMILY.launches(spec, problem, NO_GPU)
