"""Calls on the CPU: what they return, what is copied and planned, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.cast import CastOperation, CastShape
from warploom.runtime import dispatch
from warploom.runtime.families import family
from warploom.runtime.families.cast import checks
from warploom.runtime.families.cast.call import CastCall
from warploom.runtime.plan import targets

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
LARGEST = {E4M3: 448.0, E5M2: 57344.0, INT8: 127.0}
STEPS = {E4M3: 2.0**-4, E5M2: 2.0**-3, INT8: 0.0}  # the relative error of one rounding
SMALLEST = {E4M3: 2.0**-10, E5M2: 2.0**-17, INT8: 0.5}  # the absolute one, where that is more
Block = str | tuple[int, int]
BLOCKS: list[Block] = ["tensor", "row", (1, 128), (128, 128), (1, 32)]
EXTENTS: dict[Block, tuple[int, int]] = {
    "row": (1, 10_000),
    (1, 128): (1, 128),
    (128, 128): (128, 128),
    (1, 32): (1, 32),
}


def operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    sizes = torch.exp2(torch.randint(-9, 9, (shape[0], 1), generator=random).float())
    return (torch.randn(shape, generator=random) * sizes).to(dtype)


def expanded(scale: torch.Tensor, block: Block, m: int, n: int) -> torch.Tensor:
    """The scale of each value, in float64."""
    wide = scale.double()
    if block == "tensor":
        return wide.expand(m, n)
    down, across = EXTENTS[block]
    return wide.repeat_interleave(down, 0)[:m].repeat_interleave(across, 1)[:, :n]


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
@pytest.mark.parametrize("source", checks.FLOATS, ids=str)
def test_values_times_scales_are_the_nearest_that_there_are(
    source: torch.dtype, dtype: torch.dtype, block: Block
) -> None:
    """Against float64, by the scales that are returned: those are of the largest magnitudes."""
    if (block, dtype) == ((1, 32), INT8):
        return
    m, n = 130, 300
    x = operand(m, n, dtype=source)
    of_x, scale_x, q_t, scale_t = warploom.cast(x, dtype, block=block, transpose=True)
    for right, q, scale in ((x, of_x, scale_x), (x.t(), q_t, scale_t)):
        assert (q.shape, q.dtype) == (right.shape, dtype)
        each = expanded(scale, block, *right.shape)
        exact = right.double() / each
        error = (q.double() - exact).abs()
        bound = (exact.abs() * STEPS[dtype]).clamp(min=SMALLEST[dtype])
        assert (error <= bound + exact.abs() * 2.0**-22).all()
        assert exact.abs().max() <= LARGEST[dtype] * (1 + 2.0**-22)
        if block != (1, 32):
            assert scale.dtype == torch.float32
            assert exact.abs().max() >= LARGEST[dtype] * (1 - 2.0**-22)


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_powers_of_two_are_the_least_that_leave_values_in_range(dtype: torch.dtype) -> None:
    x = operand(200, 520)
    for block, keywords in (((1, 128), {"pow2": True}), ((1, 32), {})):
        _, scale = warploom.cast(x, dtype, block=block, **keywords)  # type: ignore[arg-type]
        plain = scale.double()
        assert (torch.frexp(plain)[0] == 0.5).all()
        width = block[1]
        padded = torch.nn.functional.pad(x.double().abs(), (0, -520 % width))
        peaks = padded.reshape(200, -1, width).amax(-1)
        assert (peaks <= LARGEST[dtype] * plain).all()
        assert (peaks > LARGEST[dtype] * plain / 2).all()
    assert scale.dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_a_block_of_zeros_nan_or_infinity_has_the_scale_1(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 128)
    x[1, 3], x[2, 3], x[3, 3], x[1:, 4] = torch.nan, torch.inf, -torch.inf, 2.0
    q, scale = warploom.cast(x, dtype, block=(1, 128))
    assert (scale == 1).all() and (q[1:, 4].float() == 2).all() and (q[0].float() == 0).all()
    found = q[1:, 3].float()
    if dtype == INT8:
        assert found.tolist() == [0, 127, -128]
    elif dtype == E5M2:
        assert found[0].isnan() and found[1:].tolist() == [torch.inf, -torch.inf]
    else:
        assert found.isnan().all()


def test_tiny_magnitudes_have_finite_scales() -> None:
    """448 over a magnitude below 1.3e-36 is beyond fp32: the largest number stands for it."""
    for peak in (1e-45, 1e-40, 1e-37):
        x = torch.full((1, 128), peak)
        for power in (False, True):
            q, scale = warploom.cast(x, E4M3, block="row", pow2=power)
            assert 0 < scale.item() < 1e-38 and q.float().isfinite().all()
    _, scale = warploom.cast(torch.full((1, 32), 1e-45), E4M3, block=(1, 32))
    assert scale.view(torch.uint8).item() == 0  # 2^-127


def test_given_scales_are_used_and_returned() -> None:
    x = operand(130, 300)
    for block in BLOCKS[:-1]:
        _, scale = warploom.cast(x, E4M3, block=block, pow2=True)
        found, returned = warploom.cast(x, E4M3, block=block, scale=2 * scale)
        expected = (x.double() / (2 * expanded(scale, block, 130, 300))).float().to(E4M3)
        assert torch.equal(found.float(), expected.float())
        assert torch.equal(returned, 2 * scale)
    q, _ = warploom.cast(x, E4M3, scale=torch.zeros(1))
    assert (q.float() == 0).all()
    q, _ = warploom.cast(x, E4M3, scale=torch.tensor(1e-6))
    large = x.abs() > 1e-3
    assert large.any() and (q[large].float() == torch.copysign(torch.tensor(448.0), x[large])).all()


@pytest.mark.parametrize("block", ["row", (1, 128)], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_given_scales_of_both_orientations_are_used_and_returned(
    block: Block, rounding: str
) -> None:
    """Those of powers of two are the ones that a call computes: all bits are the same."""
    x = operand(6, 130).view(2, 3, 130)
    keywords: dict[str, Any] = {"block": block, "transpose": True, "rounding": rounding}
    if rounding == "stochastic":
        keywords["rounding_state"] = torch.tensor([3, 8])
    right = warploom.cast(x, E4M3, pow2=True, **keywords)
    dense = (right[1].contiguous(), right[3].contiguous())
    apart = tuple(torch.stack([one, one], -1)[..., 0] for one in dense)  # of two elements apart
    for scale, scale_t in ((right[1], right[3]), dense, apart):
        found = warploom.cast(x, E4M3, scale=scale, scale_t=scale_t, **keywords)
        assert found[1] is scale and found[3] is scale_t
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one.float(), other.float()) and one.shape == other.shape
    one_scale = torch.tensor(0.125)
    expanded_to = (one_scale.expand_as(right[1]), one_scale.expand_as(right[3]))
    found = warploom.cast(x, E4M3, scale=expanded_to[0], scale_t=expanded_to[1], **keywords)
    if rounding == "nearest":
        q, _, q_t, _ = warploom.cast(x, E4M3, scale=one_scale, transpose=True)
        assert torch.equal(found[0].float(), q.float())
        assert torch.equal(found[2].float(), q_t.float())


def test_each_orientation_has_the_signs_of_its_own_scales() -> None:
    x = torch.tensor([[1.0, -2.0], [torch.inf, 3.0]])
    scale, scale_t = torch.tensor([[1.0], [-1.0]]), torch.tensor([[-1.0], [1.0]])
    keywords: dict[str, Any] = {"block": "row", "transpose": True}
    q, _, q_t, _ = warploom.cast(x, E5M2, scale=scale, scale_t=scale_t, **keywords)
    assert q.float().tolist() == [[1.0, -2.0], [-torch.inf, -3.0]]
    assert q_t.float().tolist() == [[-1.0, -torch.inf], [-2.0, 3.0]]


def test_given_scales_cost_one_launch_of_both_orientations() -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    ones: dict[str, Any] = {"device": "meta", "dtype": torch.float32}
    keywords = {"block": "row", "transpose": True, "scale": torch.empty(8192, 1, **ones)}
    keywords["scale_t"] = torch.empty(4096, 1, **ones)
    told = warploom.explain(warploom.cast, x, E4M3, **keywords, gpu="h200")
    assert told.kernel.startswith("cast_sm90a_bf16_e4m3_row_static_transpose_256x1_")


def test_both_orientations_of_shared_scales_have_one_rounding() -> None:
    x = operand(130, 300)
    for keywords in (
        {"block": "tensor"},
        {"block": (128, 128)},
        {"block": "tensor", "scale": torch.tensor(0.3)},
        {"block": (128, 128), "scale": torch.rand(2, 3)},
    ):
        q, scale, q_t, scale_t = warploom.cast(
            x,
            E4M3,
            transpose=True,
            rounding="stochastic",
            **keywords,  # type: ignore[call-overload]
        )
        assert torch.equal(q.float().t(), q_t.float())
        assert torch.equal(scale.t() if scale.dim() == 2 else scale, scale_t)


def test_where_results_lie() -> None:
    """Rows are a multiple of 16 bytes apart; columns of scales a multiple of 4 numbers."""
    x = operand(6, 130).view(2, 3, 130)
    q, scale, q_t, scale_t = warploom.cast(x, E4M3, block=(1, 128), transpose=True)
    assert (q.shape, q.stride()) == ((2, 3, 130), (3 * 144, 144, 1))
    assert (scale.shape, scale.stride()) == ((2, 3, 2), (3, 1, 8))
    assert (q_t.shape, q_t.stride()) == ((130, 6), (16, 1))
    assert (scale_t.shape, scale_t.stride()) == ((130, 1), (1, 132))
    _, scale, _, scale_t = warploom.cast(
        x, E4M3, block=(1, 128), transpose=True, scale_layout="row_major"
    )
    assert scale.stride() == (6, 2, 1) and scale_t.stride() == (1, 1)
    assert warploom.cast(x, E4M3)[1].shape == ()
    assert warploom.cast(x, E4M3, block="row")[1].shape == (2, 3, 1)
    assert warploom.cast(x, E4M3, block=(128, 128))[1].shape == (1, 2)
    assert warploom.cast(x, E4M3, block=(1, 32))[1].shape == (2, 3, 5)
    assert warploom.cast(x[0, 0], E4M3, block=(1, 128))[1].shape == (2,)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_a_gate_makes_of_its_halves_is_cast(block: Block) -> None:
    z, dh = operand(130, 512, dtype=torch.bfloat16), operand(130, 256, dtype=torch.bfloat16)
    gate, up = z[:, :256].double(), z[:, 256:].double()
    s = torch.sigmoid(gate)
    h = (gate * s * up).bfloat16()
    of_gate = dh.double() * up * (s + gate * s * (1 - s))
    dz = torch.cat((of_gate, dh.double() * gate * s), 1).bfloat16()
    for exact, gradient in ((h, None), (dz, dh)):
        given: dict[str, Any] = {"block": block, "transpose": True}
        found = warploom.cast(z, E4M3, gate="silu", gradient=gradient, **given)
        for one, right in zip(found, warploom.cast(exact, E4M3, **given), strict=True):
            wide = right.float()
            assert one.shape == right.shape and one.stride() == right.stride()
            assert (one.float() - wide).norm() <= 2**-6 * wide.norm()  # few are rounded otherwise


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_what_is_empty_has_empty_results(block: Block) -> None:
    for shape in ((0, 256), (5, 0), (2, 0, 8)):
        q, scale = warploom.cast(torch.zeros(shape), E4M3, block=block)
        assert q.shape == shape
        assert (scale.float() == 1).all()
        *_, q_t, scale_t = warploom.cast(torch.zeros(shape), E4M3, block=block, transpose=True)
        assert q_t.shape == (shape[-1], torch.Size(shape[:-1]).numel())
        assert (scale_t.float() == 1).all()


def test_an_amax_is_raised_and_nan_wins() -> None:
    amax, x = torch.full((1,), 2.0), torch.full((3, 5), -1.5)
    for scale in (None, torch.ones(1)):
        for value, right in ((-1.0, 2.0), (-7.0, 7.0)):
            x[2, 4] = value
            warploom.cast(x, E4M3, scale=scale, amax=amax)
            assert amax.item() == right
        amax.fill_(2.0)
    x[1, 1] = torch.nan
    warploom.cast(x, E4M3, amax=amax)
    assert amax.isnan().all()


# ---- Stochastic rounding -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_stochastic_rounding_is_unbiased_and_fixes_what_there_is(dtype: torch.dtype) -> None:
    one, count = torch.ones(1), 1 << 18
    state = torch.tensor([17, 4])
    least = {E4M3: -11, E5M2: -18, INT8: -3}[dtype]
    for exponent in range(least, 9):
        value = 1.3137 * 2.0**exponent
        if value > LARGEST[dtype]:
            continue
        x = torch.full((count // 512, 512), value)
        q, _ = warploom.cast(x, dtype, scale=one, rounding="stochastic", rounding_state=state)
        wide = q.double()
        low, high = wide.min(), wide.max()
        assert low < x[0, 0] < high and wide.unique().numel() == 2
        sigma = ((x[0, 0] - low) * (high - x[0, 0]) / count).sqrt()
        assert (wide.mean() - x[0, 0]).abs() <= 4 * sigma, exponent
    every = torch.arange(-128, 128).to(torch.int8).view(dtype).float()
    finite = every[every.isfinite()]
    q, _ = warploom.cast(finite, dtype, scale=one, rounding="stochastic")
    assert torch.equal(q.float(), finite)


def test_the_same_state_has_the_same_bits_and_another_has_others() -> None:
    x = torch.full((64, 300), 1.05)
    one = torch.ones(1)

    def bits(*state: int) -> torch.Tensor:
        given = {"rounding_state": torch.tensor(state)} if state else {}
        return warploom.cast(x, E4M3, scale=one, rounding="stochastic", **given)[0].float()  # type: ignore[call-overload]

    assert torch.equal(bits(1, 2), bits(1, 2))
    assert not torch.equal(bits(1, 2), bits(1, 3)) and not torch.equal(bits(1, 2), bits(2, 2))
    assert not torch.equal(bits(), bits())
    torch.manual_seed(3)
    first = bits()
    torch.manual_seed(3)
    assert torch.equal(first, bits())


# ---- Plans ---------------------------------------------------------------------------------------


def test_rows_of_one_pitch_are_not_copied() -> None:
    x = operand(12, 140)
    views = {
        "dense": (x, 0),
        "part of a row": (x[:, 3:131], 0),
        "leading dimensions": (x.view(3, 4, 140)[..., :99], 0),
        "columns": (x.t(), 1),
        "rows in another order": (x.view(3, 4, 140).transpose(0, 1), 1),
    }
    for name, (view, copies) in views.items():
        expected = warploom.cast(view.contiguous(), E4M3, block=(1, 128))
        found = warploom.cast(view, E4M3, block=(1, 128))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.float(), other.float()), name
        drafted = CastCall(view, E4M3, (1, 128)).draft(targets.at_hand(-1))
        assert len(drafted.copies) == copies, name


def test_kernels_are_explained_for_a_gpu_that_is_not_here() -> None:
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta")
    keywords: dict[str, Any] = {"dtype": E4M3, "block": (1, 128), "transpose": True}
    told = warploom.explain(warploom.cast, x, **keywords, gpu="h200")
    assert told.kernel.startswith("cast_sm90a_bf16_e4m3_1x128_transpose_256x1_")


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_trial_holds_every_result(block: Block) -> None:
    runtime = family("cast")
    call = CastCall(operand(40, 200), E4M3, block, True)
    spec = call.draft(targets.at_hand(-1)).choice.spec
    trial = runtime.trial(spec.operation, CastShape(40, 200), "cpu", 1)
    assert trial.error_share(spec) == 0
    for result in trial.results:
        bits = result.view(torch.uint8 if result.dtype.itemsize == 1 else torch.int32)
        place = bits[(0,) * bits.dim()] if bits.dim() else bits
        place ^= 1
        assert trial.held_share() > 1
        place ^= 1
    assert trial.held_share() == 0


@pytest.mark.parametrize("block", ["row", "1x128"])
def test_a_trial_of_given_scales_has_those_of_both_orientations(block: str) -> None:
    runtime, both = family("cast"), {"static": True, "transpose": True}
    operation = CastOperation("bf16", "e4m3", block, **both)  # type: ignore[arg-type]
    spec = dispatch.choose(operation, CastShape(40, 200)).spec
    trial = runtime.trial(operation, CastShape(40, 200), "cpu", 1)
    (call,) = trial.sets
    assert call.scale.shape[0] == 40 and call.scale_t.shape[0] == 200
    assert trial.error_share(spec) == 0
    eager, *_ = runtime.baselines(operation, trial)
    assert [one.dtype for one in eager.functions[0]()] == [E4M3, E4M3]


# ---- Errors --------------------------------------------------------------------------------------


def _given(shape: tuple[int, int], **options: Any) -> dict[str, Any]:
    """Scales of 4 rows of 8 values, and of their transpose."""
    ones = {"scale": torch.ones(4, 1), "scale_t": torch.ones(shape)}
    return {"block": (1, 128), "transpose": True, **ones, **options}


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"x": [1.0]}, "must be a torch tensor"),
        ({"x": torch.tensor(1.0)}, r"must be \[.., m, n\] or \[n\]"),
        ({"x": torch.zeros(4, 8).double()}, "must be float16, bfloat16 or float32"),
        ({"x": torch.zeros(4, 8, requires_grad=True)}, "not differentiable"),
        ({"dtype": torch.float16}, "must be a torch.dtype: one of torch.float8_e4m3fn"),
        ({"dtype": "e4m3"}, "must be a torch.dtype"),
        ({"block": (1, 64)}, r'must be "tensor", "row", \(1, 128\)'),
        ({"block": [1, 128]}, r'must be "tensor", "row", \(1, 128\)'),
        ({"block": None}, r'must be "tensor", "row", \(1, 128\)'),
        ({"transpose": 1}, "must be True or False"),
        ({"pow2": "no"}, "must be True or False"),
        ({"rounding": "up"}, "must be one of nearest, stochastic"),
        ({"scale_layout": "m"}, "must be one of column_major, row_major"),
        ({"gate": "tanh", "transpose": True}, "gate 'tanh'.*must be one of relu"),
        ({"gate": ["silu"]}, "gate .*must be one of relu"),
        ({"gate": "silu"}, "a gate without transpose"),
        ({"gate": "silu", "transpose": True}, "of torch.float32 with a gate"),
        ({"gradient": torch.ones(4, 2)}, "gradient without a gate"),
        (
            {"block": "row", "transpose": True, "scale": torch.ones(4, 1)},
            "transpose and scale with block 'row': must be with scale_t",
        ),
        (
            {"block": "row", "transpose": True, "scale_t": torch.ones(8, 1)},
            "scale_t without scale: must be with scale",
        ),
        (
            {"block": "row", "scale": torch.ones(4, 1), "scale_t": torch.ones(8, 1)},
            "scale_t without transpose: must be with transpose=True",
        ),
        (
            {"transpose": True, "scale": torch.ones(1), "scale_t": torch.ones(1)},
            "scale_t with block 'tensor': must be left out: x.T has the scales of x",
        ),
        (
            {"block": (1, 32), "transpose": True, "scale_t": torch.ones(8, 1)},
            "scale_t with .*e8m0 scales are computed",
        ),
        (
            _given((8, 1), block="row", scale_t=torch.ones(4, 1)),
            r"scale_t \[4, 1\].*shape \[8, 1\]",
        ),
        (_given((8, 1), scale_t=torch.ones(8)), r"scale_t \[8\].*with the shape \[8, 1\]"),
        (_given((8, 1), scale_t=torch.ones(8, 1).half()), "scale_t .*must be torch.float32"),
        (_given((8, 1), scale_t=torch.ones(8, 1, device="meta")), "one device"),
        (_given((8, 1), scale_t=torch.ones(8, 1, requires_grad=True)), "not differentiable"),
        (_given((8, 1), scale_t=2.0), "scale_t .*must be a torch tensor"),
        (_given((8, 1), pow2=True), "pow2 and scale"),
        ({"block": (1, 32), "dtype": INT8}, "as mxfp8 has them"),
        ({"block": (1, 32), "pow2": True}, "e8m0 scales are powers of two"),
        ({"block": (1, 32), "scale": torch.ones(4, 1)}, "e8m0 scales are computed"),
        ({"scale": torch.ones(1), "pow2": True}, "must be False with scale"),
        ({"scale": torch.ones(2)}, "must be torch.float32 with one element"),
        ({"scale": torch.ones(1).half()}, "must be torch.float32 with one element"),
        ({"scale": torch.ones(4), "block": "row"}, r"with the shape \[4, 1\]"),
        ({"scale": torch.ones(1, 4), "block": (1, 128)}, r"with the shape \[4, 1\]"),
        ({"scale": 0.5}, "must be a torch tensor"),
        (
            {"scale": torch.ones(4, 1), "block": (1, 128), "transpose": True},
            "blocks of x and of x.T have scales of their own",
        ),
        ({"amax": torch.zeros(2)}, "must have one element of torch.float32"),
        ({"amax": torch.zeros(1).half()}, "must have one element of torch.float32"),
        ({"amax": torch.zeros(1), "block": (1, 128)}, 'must have a block of "tensor"'),
        ({"rounding_state": torch.zeros(2, dtype=torch.int64)}, "must be left out"),
        (
            {"rounding": "stochastic", "rounding_state": torch.zeros(2)},
            r"must be int64 \[2\], contiguous",
        ),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str) -> None:
    given = {"x": torch.zeros(4, 8), "dtype": E4M3, **wrong}
    for _ in range(2):
        with pytest.raises(ProblemError, match=rule):
            warploom.cast(**given)


def test_an_amax_in_memory_of_x_is_refused() -> None:
    x = torch.zeros(4, 8)
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.cast(x, E4M3, amax=x[0, :1])


def test_dual_tensors_are_refused() -> None:
    from torch.autograd import forward_ad

    x = torch.zeros(4, 8)
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="no forward-mode derivative"):
        warploom.cast(forward_ad.make_dual(x, x), E4M3)


# ---- The operator --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 32), (2, 5)], ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_inductor_compiles_casts_of_every_shape(block: Block, shape: tuple[int, int]) -> None:
    """It compiles no operator that may write, beside e8m0: these casts write nothing."""

    def quantized(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return warploom.cast(x, E4M3, block=block, transpose=True)

    torch._dynamo.reset()
    x = operand(shape[1], shape[0]).reshape(shape)
    compiled = torch.compile(quantized, fullgraph=True)
    for one, other in zip(compiled(x), quantized(x), strict=True):
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())
        assert torch.equal(one.float(), other.float())


@pytest.mark.parametrize("block", ["tensor", "row", "1x128", "128x128", "1x32"])
def test_torch_finds_no_fault_with_the_operator(block: str) -> None:
    operator = torch.ops.warploom.cast.default
    rest = (None, False, "nearest", None, "column_major", None, None, None)
    given = (operand(7, 130), E5M2, block, True, *rest)
    torch.library.opcheck(operator, given)
    torch.library.opcheck(torch.ops.warploom.cast_functional.default, given)
    if block in ("row", "1x128"):
        given = (*given[:4], torch.ones(7, {"row": 1, "1x128": 2}[block]), *rest[1:])
        torch.library.opcheck(operator, (*given, torch.ones(130, 1)))
    if block == "tensor":
        torch.library.opcheck(
            operator, (operand(2, 5), INT8, block, False, *rest), {"amax": torch.zeros(1)}
        )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_compiled_code_calls_the_operator(block: Block) -> None:
    def scaled(x: torch.Tensor, amax: torch.Tensor | None) -> list[torch.Tensor]:
        results = warploom.cast(x * 2, E4M3, block=block, transpose=True, amax=amax)
        return [one.float() + 1 for one in results]

    torch._dynamo.reset()  # which counts compilations of one function, of whatever blocks
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager")
    for shape in ((6, 130), (2, 3, 48)):
        x = operand(shape[-1], torch.Size(shape[:-1]).numel()).reshape(shape)
        amaxes = [torch.zeros(1), torch.zeros(1)] if block == "tensor" else [None, None]
        found, right = compiled(x, amaxes[0]), scaled(x, amaxes[1])
        for one, other in zip(found, right, strict=True):
            assert torch.equal(one, other)
        if block == "tensor":
            assert torch.equal(amaxes[0], amaxes[1]) and amaxes[0].item() > 0  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_fake_tensors_get_what_calls_return(block: Block) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = operand(6, 130).view(2, 3, 130)
    keywords: dict[str, Any] = {"block": block, "transpose": True}
    expected = warploom.cast(real, E4M3, **keywords)
    with FakeTensorMode() as mode:
        found = warploom.cast(mode.from_tensor(real), E4M3, **keywords)
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )
