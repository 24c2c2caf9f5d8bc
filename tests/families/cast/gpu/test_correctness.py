"""Every bit of q and of scales against torch, over extents that no tile divides."""

from __future__ import annotations

import cast_cases as cases
import pytest
import torch
from cast_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families.cast import CastSchedule
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
# One row, one column; a tile, less 1 and more; parts of 128 that are short, or of few vectors.
EXTENTS = [(1, 1), (1, 4096), (3, 63), (127, 129), (128, 128), (200, 600), (257, 1000), (1031, 17)]
TYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
BLOCKS: list[str | tuple[int, int]] = ["tensor", "row", (1, 128), (128, 128), (1, 32)]


@pytest.mark.parametrize(
    "kernel", [*cases.EVERY, *cases.GATES, *cases.GROUPS, *cases.GIVEN], ids=short
)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_bit_is_right(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_rows_of_any_pitch_and_address_are_read_and_written_in_place(kernel: KernelSpec) -> None:
    for pad, shift in ((16, 0), (8, 8), (1, 0), (13, 1), (0, 3)):
        for m, n in ((130, 200), (67, 1000)):
            cases.made(kernel, m, n, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("m,n", [(8192, 4096), (4099, 7168), (16, 65_536), (100_003, 64)])
@pytest.mark.parametrize("kernel", cases.SMOKE, ids=short)
def test_large_extents(kernel: KernelSpec, m: int, n: int) -> None:
    """Many tiles, whose results are held against torch on the same GPU."""
    cases.made(kernel, m, n).verify()


@pytest.mark.parametrize("extents", [(1, 256), (130, 512), (257, 1280), (600, 768)], ids=str)
@pytest.mark.parametrize("kernel", cases.GATES, ids=short)
def test_what_a_gate_makes_is_cast(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    """As torch computes it: bit by bit of relu; else few values are rounded to a neighbour.

    Where such a value is the largest of its block, the block's power of two may be the next.
    """
    operation = kernel.operation
    for pad, shift in ((0, 0), (16, 0), (8, 8), (13, 1)):
        made = cases.made(kernel, *extents, pad=pad, shift=shift)
        if operation.gate == "relu":  # type: ignore[attr-defined]
            made.verify()
            continue
        results, right = made.run(), [one.cuda() for one in made.expected()]
        assert all(one.untouched_outside() for one in made.guarded)
        for i in range(0, len(results), 2):
            shared = i + 1 == len(results)  # by both orientations
            (q, scale), (right_q, right_scale) = (
                (one[i], one[1].mT if shared and one[1].dim() == 2 else one[1 if shared else i + 1])
                for one in (results, right)
            )
            found, exact = dequantized(q, scale), dequantized(right_q, right_scale)
            assert (found - exact).norm() <= 0.02 * exact.norm()
            assert (found != exact).float().mean() < 0.05
            near = (scale / right_scale - 1).abs() <= (0 if operation.pow2 else 2**-7)  # type: ignore[attr-defined]
            assert (~near).sum() <= max(1, 0.05 * near.numel())


def dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values that q and its scales stand for."""
    if scale.dim() == 1:
        scale = scale[:, None]
    for dim in range(scale.dim()):
        if scale.shape[dim] not in (1, q.shape[dim]):
            scale = scale.repeat_interleave(128, dim).narrow(dim, 0, q.shape[dim])
    return q.double() * scale.double()


@pytest.mark.parametrize("gradient", [False, True])
def test_a_gate_of_what_is_not_finite(gradient: bool) -> None:
    z = torch.randn(200, 512, device="cuda").bfloat16()
    z[3, 5], z[7, 300], z[9, 1] = torch.inf, -torch.inf, torch.nan
    dh = torch.ones(200, 256, device="cuda").bfloat16() if gradient else None
    for block in ("row", (1, 128), "tensor"):
        given = {"block": block, "transpose": True, "gate": "relu"}
        found = warploom.cast(z, TYPES[1], gradient=dh, **given)
        cpu = None if dh is None else dh.cpu()
        right = warploom.cast(z.cpu(), TYPES[1], gradient=cpu, **given)
        for one, other in zip(found, right, strict=True):
            assert not cases.differ(one.cpu(), other).any()


@pytest.mark.parametrize("transpose", [False, True])
def test_scales_of_blocks_may_be_row_major(transpose: bool) -> None:
    kernel = cases.spec("1x128", transpose=transpose)
    cases.made(kernel, 300, 520, layout="row_major").verify()
    usual = warploom.cast(cases.made(kernel, 300, 520).call.x, torch.float8_e4m3fn, block=(1, 128))
    other = warploom.cast(
        cases.made(kernel, 300, 520).call.x,
        torch.float8_e4m3fn,
        block=(1, 128),
        scale_layout="row_major",
    )
    assert usual[1].stride() == (1, 300) and other[1].stride() == (5, 1)
    assert torch.equal(usual[1], other[1])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_16_bit_number_is_cast_as_the_reference_casts_it(
    dtype: torch.dtype, rounding: str
) -> None:
    """All of bf16 and of fp16 by scales of many sizes: NaN, Inf, subnormal, halfway, too large."""
    bits = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16)
    state = torch.tensor([3, 5], device="cuda") if rounding == "stochastic" else None
    for source in (torch.bfloat16, torch.float16):
        x = bits.view(source).view(256, 256)
        for scale in (1.0, 2.0**-9, 0.37, 1e30, 1e-38, 1e-45, 0.0, -3.0, torch.inf, torch.nan):
            given = torch.tensor([scale], device="cuda")
            q, _ = warploom.cast(x, dtype, scale=given, rounding=rounding, rounding_state=state)
            right, _ = warploom.cast(
                x.cpu(),
                dtype,
                scale=given.cpu(),
                rounding=rounding,
                rounding_state=None if state is None else state.cpu(),
            )
            wrong = cases.differ(q.cpu(), right)
            assert not wrong.any(), (scale, int(wrong.sum()), x.cpu()[wrong][:8])


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_scales_of_what_is_zero_tiny_huge_or_not_finite(
    dtype: torch.dtype, block: str | tuple[int, int]
) -> None:
    """Bit for bit those of the reference, whatever the largest magnitude of a block is."""
    if block == (1, 32) and dtype == torch.int8:
        return
    peaks = [0.0, 1e-45, 1e-40, 1.2e-38, 1e-36, 2.0**-30, 448.0, 449.0, 3e38, torch.inf, torch.nan]
    for power in (False, True):
        if power and block == (1, 32):
            continue
        for x in (
            torch.tensor(peaks, device="cuda")[:, None] * torch.ones(1, 200, device="cuda"),
            *(torch.full((3, 130), peak, device="cuda") for peak in peaks),
        ):
            found = warploom.cast(x, dtype, block=block, pow2=power, transpose=True)
            right = warploom.cast(x.cpu(), dtype, block=block, pow2=power, transpose=True)
            for one, other in zip(found, right, strict=True):
                assert not cases.differ(one.cpu(), other).any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_stochastic_rounding_is_unbiased_in_every_binade(dtype: torch.dtype) -> None:
    """Means of 2^20 roundings within 4 sigma, from subnormal numbers to the largest."""
    largest = {torch.float8_e4m3fn: 448, torch.float8_e5m2: 57344, torch.int8: 127}[dtype]
    least = {torch.float8_e4m3fn: -12, torch.float8_e5m2: -19, torch.int8: -3}[dtype]
    one = torch.ones(1, device="cuda")
    for exponent in range(least, 16):
        for seed, fraction in enumerate((1.0137, 1.3137, 1.7771)):
            value = fraction * 2.0**exponent
            if value > largest:
                continue
            x = torch.full((1024, 1024), value, device="cuda")
            state = torch.tensor([exponent + 100, seed], device="cuda")
            q, _ = warploom.cast(x, dtype, scale=one, rounding="stochastic", rounding_state=state)
            wide = q.double()
            exact = x[0, 0].double()
            assert wide.unique().numel() == 2, (exponent, fraction)
            sigma = wide.std() / x.numel() ** 0.5
            assert (wide.mean() - exact).abs() <= 4 * sigma, (exponent, fraction)


def test_random_numbers_do_not_repeat_along_rows_columns_or_between_orientations() -> None:
    x = torch.full((512, 512), 1.05, device="cuda")
    state = torch.tensor([1, 2], device="cuda")
    q, _, q_t, _ = warploom.cast(
        x,
        torch.float8_e4m3fn,
        block=(1, 128),
        transpose=True,
        pow2=True,
        rounding="stochastic",
        rounding_state=state,
    )
    low = q.float().min()
    is_up = (q.float() > low).double()
    is_up_t = (q_t.float() > low).double()
    share = is_up.mean()
    for one, other in (
        (is_up[:, 1:], is_up[:, :-1]),
        (is_up[1:], is_up[:-1]),
        (is_up[:, 8:], is_up[:, :-8]),
        (is_up[:, 16:], is_up[:, :-16]),
        (is_up[128:], is_up[:-128]),
        (is_up, is_up_t),
        (is_up, is_up_t.t()),
    ):
        covariance = ((one - share) * (other - share)).mean() / (share * (1 - share))
        assert covariance.abs() < 5 / one.numel() ** 0.5
    other, _ = warploom.cast(
        x, torch.float8_e4m3fn, block=(1, 128), pow2=True, rounding="stochastic"
    )
    assert not torch.equal(other.float(), q.float())


@pytest.mark.usefixtures("memory")
def test_past_2_to_the_31_values_rows_are_read_and_written() -> None:
    m, n = (1 << 19) + 5, 4096 + 128
    x = torch.ones(1, n, device="cuda").bfloat16().expand(m, n).contiguous()
    x[-1] = 3.0
    for block in ("tensor", "row", (1, 128)):
        q, scale = warploom.cast(x, torch.float8_e4m3fn, block=block)
        first = 448.0 if block != "tensor" else 448.0 / 3
        assert (q[-1].float() == 448).all()
        assert q[0, 0].float() == torch.tensor(first).to(torch.float8_e4m3fn).float()
        assert (q[:-1].view(torch.uint8) == q[0, 0].view(torch.uint8)).all()
        del q, scale


def test_a_schedule_of_any_size_has_the_same_bits() -> None:
    for kernel in (
        cases.spec("1x128", CastSchedule(threads, vectors))
        for threads in (128, 512)
        for vectors in (1, 4)
    ):
        cases.made(kernel, 259, 1111).verify()
