"""GEMMs of matrices that are sparse by blocks on the CPU: patterns, gradients, errors."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from host import build, definitions, needs_compiler
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Bias, Scale
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmShape, complete
from warploom.generator.families.gemm.launch import launches, workspaces
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.integrations import block_dropout
from warploom.nn import Linear
from warploom.runtime.dispatch import choose
from warploom.runtime.families.gemm.block_sparse import SPARSE
from warploom.runtime.families.gemm.family import FAMILY

BF16 = torch.bfloat16
SHAPES = [(128, 128, 128), (200, 333, 520), (384, 256, 640)]


def sparse_extents(sparse: str, m: int, n: int, k: int) -> tuple[int, int]:
    return {"a": (m, k), "b": (k, n), "out": (m, n)}[sparse]


def masked(matrix: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The matrix with zeros in the blocks that do not count."""
    each = mask.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return torch.where(each[: matrix.shape[0], : matrix.shape[1]], matrix, 0.0)


def drawn(sparse: str, shape: tuple[int, int, int], p: float = 0.5) -> torch.Tensor:
    rows, columns = sparse_extents(sparse, *shape)
    return torch.rand(-(-rows // 128), -(-columns // 128)) < p


def test_the_mask_of_the_lists_of_a_bsr_tensor_is_that_of_its_blocks() -> None:
    torch.manual_seed(0)
    for p in (0.0, 0.5, 1.0):
        mask = torch.rand(4, 6) < p
        bsr = masked(torch.ones(512, 768), mask).to_sparse_bsr((128, 128))
        found = warploom.functional.csr_block_mask(bsr.crow_indices(), bsr.col_indices(), 6)
        assert torch.equal(found, mask)


@pytest.mark.parametrize("column", [False, True], ids=["b row", "b col"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("sparse", SPARSE)
def test_blocks_that_count_are_multiplied_and_differentiated(
    sparse: str, shape: tuple[int, int, int], column: bool
) -> None:
    torch.manual_seed(sum(shape))
    (m, n, k), mask = shape, drawn(sparse, shape)
    a = torch.randn(m, k, dtype=BF16, requires_grad=True)
    b = torch.randn(n, k, dtype=BF16).t() if column else torch.randn(k, n, dtype=BF16)
    b.requires_grad_()
    bias = None if sparse == "out" else torch.randn(n, dtype=BF16, requires_grad=True)
    read = [one for one in (a, b, bias) if one is not None]
    d = warploom.block_sparse_gemm(a, b, mask, sparse=sparse, alpha=2.0, bias=bias)
    wide = [one.detach().double().requires_grad_() for one in read]
    left = masked(wide[0], mask) if sparse == "a" else wide[0]
    right = masked(wide[1], mask) if sparse == "b" else wide[1]
    exact = 2 * left @ right
    exact = masked(exact, mask) if sparse == "out" else exact + wide[2]
    assert (d.double() - exact).abs().max() <= 2**-8 * exact.abs().max() + 1e-3
    dd = torch.randn_like(d)
    found = torch.autograd.grad(d, read, dd)
    for one, of, wanted in zip(
        found, read, torch.autograd.grad(exact, wide, dd.double()), strict=True
    ):
        assert one.dtype == of.dtype
        assert (one.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("sparse", ["a", "b"])
def test_blocks_that_do_not_count_may_hold_anything(sparse: str) -> None:
    mask = torch.tensor([[True, False], [False, False]])
    a, b = torch.ones(256, 256, dtype=BF16), torch.ones(256, 256, dtype=BF16)
    nan = torch.where(masked(torch.ones(256, 256), mask) > 0, 1.0, float("nan")).to(BF16)
    a, b = (nan, b) if sparse == "a" else (a, nan)
    d = warploom.block_sparse_gemm(a, b, mask, sparse=sparse)
    d = d if sparse == "a" else d.t()
    assert (d[:128] == 128).all() and (d[128:] == 0).all()


def test_results_go_where_they_are_asked_for_in_their_type() -> None:
    a, b = torch.ones(128, 128, dtype=BF16), torch.ones(128, 64, dtype=BF16)
    mask = torch.ones(1, 1, dtype=torch.bool)
    out = torch.empty(128, 64)
    for _ in range(3):  # the second and third are recognised
        assert warploom.block_sparse_gemm(a, b, mask, out=out, alpha=0.5) is out
        assert (out == 64).all()
    assert warploom.block_sparse_gemm(a, b, mask, out_dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"mask": torch.ones(2, 2)}, r"must be bool \[2, 2\]"),
        ({"mask": torch.ones(2, 3) > 0}, r"mask \[2, 3\] torch.bool of a \[200, 256\]"),
        ({"mask": [[True]]}, "mask"),
        ({"sparse": "c"}, "must be one of a, b, out"),
        ({"sparse": ["a"]}, "must be one of a, b, out"),
        ({"alpha": float("nan")}, "nan"),
        ({"alpha": "x"}, "must be a number"),
        ({"sparse": "out", "bias": torch.ones(200)}, "bias with a sparse result"),
        ({"a": torch.ones(2, 200, 256, dtype=BF16)}, "must be matrices"),
        ({"a": torch.ones(200, 256)}, "element types of operands"),
        ({"spec": "gemm_sm90a_nothing"}, "gemm_sm90a_nothing"),
    ],
    ids=str,
)
def test_bad_calls_are_refused(change: dict[str, Any], told: str) -> None:
    call = {
        "a": torch.ones(200, 256, dtype=BF16),
        "b": torch.ones(256, 200, dtype=BF16),
        "mask": torch.ones(2, 2) > 0,
        **change,
    }
    with pytest.raises(warploom.WarploomError, match=told):
        warploom.block_sparse_gemm(call.pop("a"), call.pop("b"), call.pop("mask"), **call)


@pytest.mark.parametrize(
    ("offsets", "indices", "columns", "told"),
    [
        ([0], [], 2, "must have a row of blocks"),
        ([0, 1], [0], 0, "must have a row of blocks"),
        ([0, 1, 2], [0, 1], "2", "must be an int"),
        ([0, 3, 2], [0, 1], 2, "must ascend, from 0"),
        ([-1, 1, 2], [0, 1], 2, "must ascend, from 0"),
        ([0, 1, 3], [0, 1], 2, "must ascend, from 0"),
        ([0, 1, 2], [0, 2], 2, "of which there are 2"),
        ([0, 1, 2], [0, -1], 2, "of which there are 2"),
        ([0, 0, 2], [1, 0], 2, "each block counts once"),
        ([0, 0, 2], [1, 1], 2, "each block counts once"),
    ],
    ids=str,
)
def test_bad_lists_are_refused(
    offsets: list[int], indices: list[int], columns: int, told: str
) -> None:
    lists = [torch.tensor(one, dtype=torch.int32) for one in (offsets, indices)]
    with pytest.raises(ProblemError, match=told):
        warploom.functional.csr_block_mask(*lists, columns)


def test_lists_of_other_types_are_refused() -> None:
    for wrong in (torch.ones(2), torch.ones(2, 2, dtype=torch.int32), [0, 1]):
        with pytest.raises(ProblemError, match="must be an int32 or int64 tensor"):
            warploom.functional.csr_block_mask(wrong, torch.ones(1).int(), 2)  # type: ignore[arg-type]


# ---- Kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp16", "bf16", "e4m3", "int8"])
@pytest.mark.parametrize("sparse", ["a", "b", "d"])
@pytest.mark.parametrize("shape", [(8, 8, 8), (4096, 4096, 4096), (1000, 300, 20_000)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_the_table_has_a_kernel(
    sparse: str, kind: str, shape: tuple[int, int, int], biased: bool
) -> None:
    steps = (Scale("host"), Bias("bf16")) if biased and sparse != "d" else (Scale("host"),)
    operation = GemmOperation(
        *(kind, kind, "bf16", "row", "col", steps),  # type: ignore[arg-type]
        sparse=sparse,  # type: ignore[arg-type]
    )
    for requires in ("tma", "direct"):
        chosen = choose(operation, GemmShape(*shape), requires=requires)
        assert chosen.spec.operation == operation
    (call,) = FAMILY.calls(operation, GemmShape(*shape))
    drafted = call.draft(NO_GPU)
    assert drafted.choice.spec.operation == operation


@pytest.mark.parametrize(
    ("sparse", "fields", "told"),
    [
        ("a", {"tile": (64, 256, 64), "consumers": 1}, "tile m 64 with sparse a"),
        ("b", {"tile": (128, 256, 64)}, "tile n 256 with sparse b"),
        ("d", {"tile": (128, 256, 64)}, "tile n 256 with sparse d"),
        ("a", {"tile": (128, 128, 64), "cluster": (2, 1)}, "must be 1 along m"),
        ("b", {"tile": (128, 128, 64), "cluster": (1, 2)}, "must be 1 along n"),
        ("d", {"tile": (128, 128, 64), "raster": "along_n"}, "must be along_m"),
        ("a", {"tile": (128, 128, 64), "split_k": 2}, "lists differ in length"),
        ("a", {"tile": (128, 128, 64), "swap_ab": True}, "swap_ab with sparse a"),
    ],
)
def test_schedules_that_cannot_walk_lists_are_refused(
    sparse: str, fields: dict[str, Any], told: str
) -> None:
    operation = GemmOperation("bf16", "bf16", "bf16", epilogue=(Scale("host"),), sparse=sparse)  # type: ignore[arg-type]
    with pytest.raises(SpecificationError, match=told):
        KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))


def test_operations_that_lists_are_not_for_are_refused() -> None:
    plain: dict[str, Any] = {"a": "bf16", "b": "bf16", "d": "bf16", "sparse": "d"}
    schedule = complete("sm_90a", GemmOperation(**plain), {"tile": (128, 128, 64)})
    for change, told in (
        ({}, "must be a scale by host"),
        ({"epilogue": (Scale("host"), Bias("bf16"))}, "must be a scale by host"),
        ({"epilogue": (Scale("host"),), "batched": True}, "batched with sparse d"),
    ):
        with pytest.raises(SpecificationError, match=told):
            KernelSpec("sm_90a", GemmOperation(**{**plain, **change}), schedule)


_STUBS = """
using std::max, std::min;
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
#define __grid_constant__
#define __shared__ static
struct Threads { int x; };
static thread_local Threads threadIdx;
static Threads gridDim;
void __syncthreads();
uint32_t __ballot_sync(uint32_t, bool);
int __popc(uint32_t);
int __clz(uint32_t);
int __reduce_add_sync(uint32_t, int);
int __shfl_sync(uint32_t, int, int);
#define CUTE_UNROLL
"""
_HARNESS = Path(__file__).with_name("lists.cpp")
_WALKED: list[tuple[str, dict[str, Any]]] = [
    ("a", {"tile": (128, 256, 64), "cluster": (1, 2)}),
    ("a", {"tile": (128, 96, 64), "kernel_schedule": "pingpong", "raster": "along_n"}),
    ("b", {"tile": (256, 128, 64), "swizzle_size": 3}),
    ("b", {"tile": (128, 128, 64), "cluster": (2, 1), "raster": "along_n"}),
    ("d", {"tile": (128, 128, 64), "swizzle_size": 3}),
    ("d", {"tile": (128, 128, 64), "cluster": (1, 2), "kernel_schedule": "pingpong"}),
]


@needs_compiler
@pytest.mark.parametrize(("sparse", "fields"), _WALKED, ids=str)
def test_tiles_take_the_blocks_that_count_each_once(
    sparse: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    operation = GemmOperation("bf16", "bf16", "bf16", epilogue=(Scale("host"),), sparse=sparse)  # type: ignore[arg-type]
    spec = KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))
    source = render(spec)
    parts = definitions(source, "TileCoord", "Tiles", "ListedTiles", "KTiles")
    (making,) = re.findall(r'^extern "C"[^\n]*\n    \w+_lists\(.*?^\}', source, re.M | re.S)
    assert len(parts) == (3 if sparse == "d" else 4)
    making = re.sub(r"  wait_for_previous_grid[^\n]*\n", "", making)
    making = making.replace(f"{spec.name}_lists", "make_lists")
    m, n, k = fields["tile"]
    cluster_m, cluster_n = fields.get("cluster", (1, 1))
    pointers = "int* tiles;" if sparse == "d" else "int *lists, *entries;"
    setting = "p.tiles = entries;" if sparse == "d" else "p.lists = lists; p.entries = entries;"
    constants = f"""
constexpr int kTileM = {m}, kTileN = {n}, kTileK = {k}, kListThreads = 1024, kBlock = 128;
constexpr int kClusterM = {cluster_m}, kClusterN = {cluster_n};
constexpr int kClusterSize = kClusterM * kClusterN;
constexpr int kSwizzle = {fields.get("swizzle_size", 8)};
constexpr char kSparse = '{sparse}';
struct Parameters {{
  int m, n, k;
  const uint8_t* mask;
  int64_t mask_row, mask_column;
  {pointers}
}};
static void set(Parameters& p, int* lists, int* entries) {{ {setting} }}
"""
    text = (_STUBS, constants, *parts, making, f'#line 1 "{_HARNESS}"', _HARNESS.read_text())
    program = build("\n".join(text), tmp_path)
    shapes = [(8, 8, 8), (128, 128, 128), (300, 392, 520), (4224, 2100, 136), (1000, 5000, 4200)]
    cases = [
        f"{' '.join(map(str, shape))} {clusters} {percent} {transposed}"
        for shape in shapes
        for clusters, percent, transposed in ((1, 50, 0), (7, 30, 1), (132, 60, 0), (5, 0, 1))
    ]
    done = subprocess.run(
        [program], input="\n".join(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout or "a sum beyond 32 bits"


def test_a_call_makes_its_lists_and_then_walks_them() -> None:
    for sparse, sides, sizes in (
        ("a", "mk", {"lists": 4 * 3 * 3, "entries": 4 * 3 * 5}),
        ("b", "nk", {"lists": 4 * 3 * 4, "entries": 4 * 4 * 5}),
        ("d", "mn", {"tiles": 4 * 3 * (4 + 1)}),
    ):
        operation = GemmOperation("bf16", "bf16", "bf16", epilogue=(Scale("host"),), sparse=sparse)  # type: ignore[arg-type]
        spec = KernelSpec(
            "sm_90a", operation, complete("sm_90a", operation, {"tile": (128, 128, 64)})
        )
        problem = GemmProblem(300, 400, 520, 520, 520, 400, mask_strides=(5, 1))
        first, second = launches(spec, problem, DeviceLimits(132))
        assert (first.entry, first.grid) == (f"{spec.name}_lists", 1)
        assert (second.entry, second.grid) == (spec.name, 12)
        assert {one.tensor: one.bytes for one in workspaces(spec, problem)} == sizes
        huge = replace(problem, **dict.fromkeys(sides, 2**30))
        with pytest.raises(ProblemError, match="blocks" if sparse != "d" else "tiles"):
            launches(spec, huge, DeviceLimits(132))


# ---- Structured dropout --------------------------------------------------------------------------


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers on the CPU go the way of those that kernels compute."""
    monkeypatch.setattr(block_dropout, "refusal", lambda *read: None)


def test_a_layer_drops_blocks_alike_by_torch_and_by_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer = Linear(300, 200, dropout_blocks=0.5, dtype=BF16)
    x = torch.randn(2, 200, 300, dtype=BF16, requires_grad=True)
    read = (x, layer.weight, layer.bias)

    def ran() -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        y = layer(x)
        return (y, *torch.autograd.grad(y.float().square().sum(), read))

    by_torch = ran()
    monkeypatch.setattr(block_dropout, "refusal", lambda *read: None)
    for one, other in zip(ran(), by_torch, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).abs().max() <= 2**-6 * other.float().abs().max()
    dropped = (by_torch[1] == 0).float().mean()
    assert 0.2 < dropped < 0.8


@pytest.mark.usefixtures("by_kernels")
def test_a_checkpoint_drops_the_same_blocks_again() -> None:
    layer = Linear(512, 128, dropout_blocks=0.5, dtype=BF16)
    x = torch.randn(512, 512, dtype=BF16, requires_grad=True)
    found = []
    for run_layer in (layer, lambda one: checkpoint(layer, one, use_reentrant=False)):
        torch.manual_seed(3)
        found.append(torch.autograd.grad(run_layer(x).sum(), (x, layer.weight)))
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("by_kernels")
def test_a_compiled_layer_drops_blocks() -> None:
    layer = Linear(512, 128, dropout_blocks=0.5, dtype=BF16, bias=False)
    x = torch.ones(512, 512, dtype=BF16, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    (dx,) = torch.autograd.grad(compiled(x).sum(), x)
    blocks = (dx == 0).view(4, 128, 4, 128)
    assert (blocks == blocks[:, :1, :, :1]).all()
    assert 0 < blocks.float().mean() < 1


def test_an_explanation_is_of_the_kernel_that_drops_blocks() -> None:
    layer = Linear(512, 128, dropout_blocks=0.5, dtype=BF16)
    x = torch.empty(4, 512, 512, dtype=BF16)
    assert "sparse_a" in warploom.explain(layer, x, gpu="NVIDIA H200").kernel
    assert "sparse" not in warploom.explain(layer.eval(), x, gpu="NVIDIA H200").kernel
    assert warploom.explain(layer.train(), x).torch  # on the CPU


def test_evaluation_and_a_probability_of_0_drop_nothing() -> None:
    layer = Linear(300, 200, dropout_blocks=0.5)
    x = torch.randn(4, 300)
    exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer.eval()(x), exact)
    drop = warploom.functional.block_dropout_linear
    torch.testing.assert_close(drop(x, layer.weight, layer.bias, p=0.0), exact)
    torch.testing.assert_close(drop(x, layer.weight, layer.bias, training=False), exact)


@pytest.mark.parametrize("p", [1, 1.5, -0.1, float("nan"), True, "half"], ids=str)
def test_what_is_no_probability_below_1_is_refused(p: object) -> None:
    with pytest.raises(ProblemError, match="from 0 to below 1"):
        Linear(8, 8, dropout_blocks=p)  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="from 0 to below 1"):
        warploom.functional.block_dropout_linear(torch.ones(8, 8), torch.ones(8, 8), p=p)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"recipe": "rowwise"}, {"accumulate_into_main_grad": True}])
def test_options_beside_which_blocks_are_not_dropped_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ProblemError, match="must be without both"):
        Linear(8, 8, dropout_blocks=0.5, **options)
