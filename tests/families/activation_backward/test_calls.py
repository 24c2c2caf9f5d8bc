"""Calls on the CPU: what they return, what is copied and planned, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError
from warploom.runtime import plan
from warploom.runtime.families import family
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.activation_backward.family import FAMILY as RUNTIME

FORWARD = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
TYPES = (torch.float16, torch.bfloat16, torch.float32)


def pair(*shape: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype), (2 * torch.randn(shape)).to(dtype)


def autograd(dy: torch.Tensor, z: torch.Tensor, activation: str) -> torch.Tensor:
    """dz in float64, by torch's own derivative."""
    wide = z.double().requires_grad_()
    (found,) = torch.autograd.grad(FORWARD[activation](wide), wide, dy.double())
    return found


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", FORWARD)
@pytest.mark.parametrize("types", [*itertools.product(TYPES, TYPES, TYPES)], ids=str)
def test_both_results_are_those_of_autograd_in_float64(
    activation: str, types: tuple[torch.dtype, ...]
) -> None:
    """A bound that is wide enough for a missing row, or for another derivative, is none."""
    dy, z, dz_dtype = torch.randn(7, 33).to(types[0]), torch.randn(7, 33).to(types[1]), types[2]
    call = ActivationBackwardCall(dy, z, activation, True, torch.empty_like(dy, dtype=dz_dtype))
    dz, sums = activation_backward(dy, z, activation, sums=True, out_dtype=dz_dtype)
    assert dz is not None and sums is not None
    assert (dz.dtype, sums.dtype, sums.shape) == (dz_dtype, torch.float32, (33,))
    (exact, bound), (exact_sums, bound_sums) = RUNTIME.expected(call)
    wanted = autograd(dy, z, activation)
    torch.testing.assert_close(exact, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact_sums, wanted.sum(0), rtol=1e-12, atol=1e-12)
    assert ((dz.double() - wanted).abs() <= bound).all()
    assert ((sums.double() - wanted.sum(0)).abs() <= bound_sums).all()
    lost = (wanted[0].abs() > bound_sums) | (wanted[0] == 0)
    assert lost.sum() > 30  # a lost row breaks nearly every bound


@pytest.mark.parametrize("activation", FORWARD)
def test_infinities_have_the_limits_and_nan_stays(activation: str) -> None:
    z = torch.tensor([-torch.inf, -3e38, -1e4, -200.0, 0.0, 200.0, 1e4, torch.inf, torch.nan])
    dz, _ = activation_backward(torch.ones_like(z), z, activation)
    assert dz is not None
    middle = 0.0 if activation == "relu" else 0.5
    assert dz[:-1].tolist() == [0, 0, 0, 0, middle, 1, 1, 1]
    assert dz[-1].isnan()


def test_without_an_activation_only_sums_are_computed() -> None:
    dy, _ = pair(3, 5, 17)
    dz, sums = activation_backward(dy, sums=True)
    assert dz is None and sums is not None
    torch.testing.assert_close(sums, dy.float().sum((0, 1)))
    assert activation_backward(*pair(2, 3), "relu")[1] is None


def test_a_vector_is_one_row_and_nothing_has_sums_of_0() -> None:
    dy, z = pair(9)
    dz, sums = activation_backward(dy, z, "silu", sums=True)
    assert dz is not None and sums is not None and dz.shape == sums.shape == (9,)
    torch.testing.assert_close(dz.float(), sums, rtol=2**-7, atol=0)
    for shape in ((0, 5), (2, 0, 5), (4, 0), (0,), (0, 0)):
        dy, z = pair(*shape)
        dz, sums = activation_backward(dy, z, "gelu", sums=True)
        assert dz is not None and sums is not None and dz.shape == dy.shape
        assert torch.equal(sums, torch.zeros(shape[-1]))
        assert torch.equal(activation_backward(dy, sums=True)[1], sums)


def test_results_lie_where_they_are_to() -> None:
    dy, z = pair(2, 6, 24)
    out = torch.full((2, 6, 40), 7.0).bfloat16()
    dz, _ = activation_backward(dy, z, "gelu_tanh", out=out[..., 8:32])
    assert dz is not None and dz.data_ptr() == out[..., 8:].data_ptr()
    expected, _ = activation_backward(dy, z, "gelu_tanh")
    assert expected is not None and torch.equal(dz, expected)
    assert (out[..., :8] == 7).all() and (out[..., 32:] == 7).all()


# ---- Plans ---------------------------------------------------------------------------------------


VIEWS = {
    "dense": (lambda: pair(4, 6, 16)[0], ()),
    "part of a row": (lambda: pair(4, 6, 40)[0][..., 3:19], ()),
    "every other row": (lambda: pair(4, 12, 16)[0][:, ::2], ()),
    "one batch": (lambda: pair(1, 24, 16)[0], ()),
    "batches apart": (lambda: pair(4, 9, 16)[0][:, :6], ("dy",)),
    "columns before rows": (lambda: pair(4, 16, 6)[0].mT, ("dy",)),
    "one row for all": (lambda: pair(1, 1, 16)[0].expand(4, 6, 16), ()),
    "one number for all": (lambda: pair(1, 1, 1)[0].expand(4, 6, 16), ("dy",)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_only_rows_that_no_pitch_leads_through_are_copied(name: str) -> None:
    make, copied = VIEWS[name]
    dy = make()
    plan.forget()
    z = torch.randn(dy.shape)
    dz, _ = activation_backward(dy, z, "silu")
    (planned,) = plan.known.values()
    assert planned.copies == copied
    call = ActivationBackwardCall(dy, z, "silu")
    problem: Any = call.draft(plan.targets.at_hand(-1)).problem
    assert problem.pitch_dy == {"part of a row": 40, "every other row": 32}.get(
        name, 0 if name == "one row for all" else 16
    )
    assert torch.equal(dz, activation_backward(dy.contiguous(), z, "silu")[0])  # type: ignore[arg-type]


def test_plans_are_kept_by_all_that_decides_them() -> None:
    plan.forget()
    dy, z = pair(32, 64)
    for _ in range(2):
        activation_backward(dy, z, "relu")
        activation_backward(dy, z, "silu")
        activation_backward(dy, z, "silu", sums=True)
        activation_backward(dy, z, "silu", out_dtype=torch.float32)
        activation_backward(dy, z.float(), "silu")
        activation_backward(dy, sums=True)
    assert len(plan.known) == 6


def test_a_call_is_explained_for_a_gpu_that_is_not_here() -> None:
    dy, z = (one.to("meta") for one in pair(8192, 4096))
    told = warploom.explain(activation_backward, dy, z, activation="gelu", sums=True, gpu="h200")
    assert told.kernel.startswith("activation_backward_sm90a_bf16_gelu_sums_256x256_")
    few, many = pair(8, 4096), pair(100, 64)
    for one in (few, many):
        told = warploom.explain(activation_backward, *one, activation="gelu", gpu="h200")
        assert "_256x64_" in told.kernel


def test_a_trial_holds_both_results() -> None:
    """The tuner would else take a kernel whose sums are wrong."""
    runtime = family("activation_backward")
    call = ActivationBackwardCall(*pair(40, 24), "gelu", sums=True)
    spec = call.draft(plan.targets.at_hand(-1)).choice.spec
    trial = runtime.trial(spec.operation, runtime_shape(40, 24), "cpu", 1)
    assert trial.error_share(spec) <= 1
    for name in ("out", "sums_out"):
        result = getattr(trial.sets[0], name)  # type: ignore[attr-defined]
        before = result.clone()
        result.flatten()[5] += 1
        assert trial.held_share() > 1
        result.copy_(before)


def runtime_shape(m: int, n: int) -> Any:  # noqa: ANN401 (of a family)
    from warploom.generator.families.activation_backward import ActivationBackwardShape

    return ActivationBackwardShape(m, n)


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"dy": [1.0]}, "must be a torch tensor"),
        ({"activation": "tanh"}, "must be one of relu, gelu, gelu_tanh, silu"),
        ({"activation": None}, "must be None without z"),
        ({"z": None}, "must be None without z"),
        ({"z": None, "activation": None}, "must have something to compute"),
        ({"z": None, "activation": None, "sums": True, "out_dtype": torch.half}, "dz is dy"),
        ({"z": torch.zeros(3)}, "must be of one shape"),
        ({"out": torch.zeros(1, 64)}, "must be of one shape"),
        ({"dy": torch.zeros(()), "z": torch.zeros(())}, r"must be \[.., m, n\] or \[n\]"),
        ({"z": torch.zeros(32, 64).double()}, "must be float16, bfloat16 or float32"),
        ({"out_dtype": torch.int8}, "must be a torch.dtype: one of torch.float16"),
        ({"out_dtype": "half"}, "must be a torch.dtype: one of torch.float16"),
        ({"out": torch.zeros(64, 32).mT}, "contiguous last dimension and one stride"),
        ({"out": torch.zeros(1, 64).expand(32, 64)}, "must have no two elements at one address"),
        ({"out": torch.zeros(32, 64), "out_dtype": torch.half}, "must be torch.float16"),
        ({"dy": torch.zeros(32, 64).requires_grad_()}, "not differentiable"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str) -> None:
    dy, z = pair(32, 64)
    with pytest.raises(ProblemError, match=rule):
        activation_backward(**{"dy": dy, "z": z, "activation": "gelu", **wrong})


@pytest.mark.parametrize("which", ["dy", "z"])
def test_a_result_that_shares_memory_with_what_is_read_is_refused(which: str) -> None:
    dy, z = pair(32, 64)
    given = {"dy": dy, "z": z}
    with pytest.raises(ProblemError, match="do not overlap"):
        activation_backward(dy, z, "gelu", out=given[which])


def test_dual_tensors_are_refused() -> None:
    from torch.autograd import forward_ad

    dy, z = pair(4, 8, dtype=torch.float32)
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="no forward-mode derivative"):
        activation_backward(forward_ad.make_dual(dy, dy), z, "relu")


# ---- The operator --------------------------------------------------------------------------------


@pytest.mark.parametrize("sums", [False, True])
def test_torch_finds_no_fault_with_the_operator(sums: bool) -> None:
    dy, z = pair(2, 5, 24)
    operator = torch.ops.warploom.activation_backward.default
    torch.library.opcheck(operator, (dy, z, "silu", sums, torch.float32, None))
    torch.library.opcheck(operator, (dy[0], None, None, True, None, None))


def test_compiled_code_calls_the_operator() -> None:
    def gradients(dy: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dz, sums = activation_backward(dy, z, "gelu", sums=True)
        _, again = activation_backward(dz, sums=True)
        assert dz is not None and sums is not None and again is not None
        return dz + 1, sums + again

    compiled = torch.compile(gradients, fullgraph=True, backend="aot_eager")
    for shape in ((6, 16), (3, 4, 16)):
        dy, z = pair(*shape)
        for found, expected in zip(compiled(dy, z), gradients(dy, z), strict=True):
            assert torch.equal(found, expected)


def test_fake_tensors_get_what_calls_return() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        dy, z = torch.empty(4, 6, 8).bfloat16(), torch.empty(4, 6, 8)
        dz, sums = activation_backward(dy, z, "relu", sums=True)
        assert dz is not None and sums is not None
        assert (dz.shape, dz.dtype, sums.shape) == (dy.shape, dy.dtype, (8,))
        assert activation_backward(dy, z, "relu")[1] is None
        assert activation_backward(dy, sums=True)[0] is None
