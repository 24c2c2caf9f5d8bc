"""Every element of y against float64, over extents that no tile divides."""

from __future__ import annotations

import pytest
import sparse_gemm_cases as cases
import torch
from rooms import assert_repeats
from sparse_gemm_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
EIGHT = [one for one in cases.EVERY if one.operation.element in ("e4m3", "int8")]
SPLIT = [one for one in cases.EVERY if one.schedule.split_k > 1]
# One row; k below a stage, of one and more; n of no vector; several waves.
EXTENTS = [
    (1, 64, 64),
    (3, 72, 16),
    (7, 1, 4112),
    (130, 1003, 96),
    (300, 520, 2080),
    (1031, 4096, 512),
]
# Rows and columns of a weight by which one tile of tokens is multiplied.
WHOLE = [(256, 128), (576, 1024), (1003, 2080)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_element_is_right(kernel: KernelSpec, extents: tuple[int, int, int]) -> None:
    m, n, k = extents
    cases.made(kernel, m, n, -(-k // 32) * 32 if kernel in EIGHT else k).verify()


@pytest.mark.parametrize(("pad", "shift"), [(8, 0), (16, 8), (1, 0), (13, 1), (0, 3)])
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_rows_of_any_pitch_and_address(kernel: KernelSpec, pad: int, shift: int) -> None:
    cases.made(kernel, 130, 200, 288, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("k", [64, 96, 192, 1056, 1120])  # stages: 1, 2, 3, 17 and 18
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_blocks_of_several_tiles(kernel: KernelSpec, k: int) -> None:
    m, n = 4099, 5003
    tokens, rows, _ = kernel.schedule.tile
    tiles = -(-m // tokens) * -(-n // rows)
    assert tiles > 2 * torch.cuda.get_device_properties(0).multi_processor_count
    cases.made(kernel, m, n, k).verify()


@pytest.mark.parametrize("extents", WHOLE, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_token_of_a_tile_is_summed_over_all_stages(
    kernel: KernelSpec, extents: tuple[int, int]
) -> None:
    """Long instructions still run when the next stage's metadata are loaded."""
    tokens, _, _ = kernel.schedule.tile
    cases.made(kernel, tokens, *extents).verify()


@pytest.mark.parametrize("kernel", cases.EVERY[:4], ids=short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 600, 1000, 1024)
    wanted = made.run().view(torch.int16).clone()
    assert_repeats(lambda: [made.run().view(torch.int16)], [wanted], [made.guarded], runs=100)


@pytest.mark.parametrize("k", [32, 64, 160, 448, 4128])  # stages: fewer than parts, and more
@pytest.mark.parametrize("kernel", SPLIT, ids=short)
def test_parts_of_k_are_added_up_in_one_order(kernel: KernelSpec, k: int) -> None:
    """Whichever CTA comes last: fewer stages than parts leave parts out, and bits never change."""
    made = cases.made(kernel, 70, 1003, k)
    made.verify()
    wanted = made.run().view(torch.int16).clone()
    assert_repeats(lambda: [made.run().view(torch.int16)], [wanted], [made.guarded], runs=50)


@pytest.mark.parametrize("kernel", SPLIT, ids=short)
def test_counters_are_zeros_for_the_next_launch_of_another_shape(kernel: KernelSpec) -> None:
    for m, n, k in [(300, 2000, 512), (5, 70, 96), (64, 4096, 4096), (300, 2000, 512)]:
        cases.made(kernel, m, n, k).verify()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_scales_of_tensors_and_of_rows(dtype: torch.dtype, per: str) -> None:
    """One scale is every row's; of several, none is another row's."""
    m, n, k = 77, 200, 288

    def drawn(*extents: int) -> torch.Tensor:
        return (torch.randn(extents, device="cuda") * 20).to(dtype)

    x, weight = drawn(m, k), warploom.sparsify(drawn(n, k))
    counts = (1, 1) if per == "tensor" else (m, n)
    scale_x, scale_weight = (torch.rand(one, device="cuda") / 64 + 1e-3 for one in counts)
    y = warploom.sparse_gemm(x, weight, scale_x=scale_x, scale_weight=scale_weight)
    exact = (x.double() @ weight.dense().double().mT) * scale_x.double().reshape(-1, 1)
    exact *= scale_weight.double()
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=float(exact.abs().max()) * 2**-9)


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "silu"])
def test_gradients_are_those_of_the_dense_weight(activation: str | None) -> None:
    weight = warploom.sparsify(torch.randn(200, 288, device="cuda").bfloat16() / 17)
    x = torch.randn(3, 50, 288, device="cuda").bfloat16().requires_grad_()
    bias = torch.randn(200, device="cuda").bfloat16().requires_grad_()
    y = warploom.sparse_gemm(x, weight, bias, activation)
    dy = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, bias), dy)
    function = {None: lambda z: z}.get(activation) or getattr(torch.nn.functional, str(activation))
    exact = function(x.double() @ weight.dense().double().mT + bias.double())
    wanted = torch.autograd.grad(exact, (x, bias), dy.double())
    for one, other in zip(found, wanted, strict=True):
        error = (one.double() - other.double()).abs().max()
        assert error <= 2**-6 * other.double().abs().max()


def test_a_graph_is_replayed_on_other_contents() -> None:
    weight = warploom.sparsify(torch.randn(512, 512, device="cuda").bfloat16())
    x = torch.randn(64, 512, device="cuda").bfloat16()
    out = warploom.sparse_gemm(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.sparse_gemm(x, weight, out=out)
    x.normal_()
    graph.replay()
    assert torch.equal(out, warploom.sparse_gemm(x, weight))


def test_columns_without_values_are_not_read() -> None:
    """NaN in places of x that no value of the weight stands for does not reach y."""
    dense = torch.zeros(64, 64, device="cuda").bfloat16()
    dense[:, 0:64:4] = dense[:, 2:64:4] = 1
    weight = warploom.SparseWeight.from_dense(dense)
    x = torch.full((8, 64), float("nan"), device="cuda").bfloat16()
    x[:, 0:64:4] = x[:, 2:64:4] = 1
    assert (warploom.sparse_gemm(x, weight) == 32).all()


def test_layers_of_a_patched_model_run_on_sparse_kernels() -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(288, 384), torch.nn.Linear(384, 288)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1]).cuda().bfloat16()
    with torch.no_grad():
        for one in layers:
            one.weight.copy_(warploom.sparsify(one.weight).dense())
    x = torch.randn(33, 288, device="cuda").bfloat16()
    exact = model.double()(x.double())
    warploom.patch(model.bfloat16(), attention=False, sparse="2:4")
    before = warploom.counters.launches
    y = model(x)
    assert warploom.counters.launches == before + 2
    error = (y.double() - exact).abs().max()
    assert error <= 2**-6 * exact.abs().max()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(model(x.float()), y)
