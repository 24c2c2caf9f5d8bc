"""A 2:4 weight: which values stay, the way back, and metadata as the instruction reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization.sparse_weight import TYPES, SparseWeight, sparsify

_SHAPES = [(1, 32), (64, 256), (70, 288), (130, 544)]


def _weight(n: int, k: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(n + k)
    if dtype == torch.int8:
        return torch.randint(-128, 128, (n, k)).to(torch.int8)
    return torch.randn(n, k).to(dtype)


def _pruned(weight: Tensor) -> Tensor:
    """Zero the two smallest of each group: counts of larger (or equal and earlier) neighbours."""
    groups = weight.double().abs().unflatten(1, (-1, 4))
    ours, others = groups.unsqueeze(-1), groups.unsqueeze(-2)
    place = torch.arange(4)
    earlier = place.unsqueeze(0) < place.unsqueeze(1)
    rank = ((others > ours) | ((others == ours) & earlier)).sum(-1)
    return weight.double() * (rank < 2).flatten(1)


def _expanded(weight: SparseWeight) -> Tensor:
    """Read W as `wgmma.mma_async.sp` does, word by word, after the figures of the PTX ISA."""
    n, k = weight.shape
    eight = weight.dtype.itemsize == 1
    step = 64 if eight else 32
    values, words = weight.values.double().tolist(), weight.metadata.tolist()
    full = torch.zeros(n, k, dtype=torch.float64)
    for row in range(n):
        in_warp = row % 16
        for group in range(k // 4):
            instruction = 4 * group // step
            chunk = 4 * group % step // 4
            if eight:
                lane = 4 * (in_warp % 8) + 2 * (chunk // 8) + in_warp // 8
                word, bit = instruction, 4 * (chunk % 8)
            else:
                selector = instruction % 2
                lane = 4 * (in_warp % 8) + 2 * selector + chunk // 4
                word, bit = instruction // 2, 16 * (in_warp // 8) + 4 * (chunk % 4)
            thread = 32 * (row % 64 // 16) + lane
            code = words[row // 64][word][thread] >> bit & 15
            first, second = code & 3, code >> 2
            assert first < second
            full[row, 4 * group + first] = values[row][2 * group]
            full[row, 4 * group + second] = values[row][2 * group + 1]
    return full


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), _SHAPES)
def test_the_instruction_reads_the_two_largest_of_each_four(
    n: int, k: int, dtype: torch.dtype
) -> None:
    weight = _weight(n, k, dtype)
    packed = sparsify(weight, "2:4", by="magnitude")
    assert packed.shape == (n, k)
    assert packed.values.shape == (n, k // 2)
    assert torch.equal(_expanded(packed), _pruned(weight))
    assert torch.equal(packed.dense().double(), _pruned(weight))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_weight_that_is_sparse_already_comes_back_unchanged(dtype: torch.dtype) -> None:
    exact = _pruned(_weight(70, 288, dtype))
    exact[3, 8:12] = 0
    exact[4, 8:12] = torch.tensor([0, 0, 0, 1.0])
    packed = SparseWeight.from_dense(exact.to(dtype))
    assert torch.equal(packed.dense().double(), exact)
    again = SparseWeight.from_tensors(packed.tensors())
    assert torch.equal(again.dense().double(), exact)


def test_torch_semi_structured_tensors_are_imported() -> None:
    exact = _pruned(_weight(64, 256, torch.bfloat16)).to(torch.bfloat16)
    from torch.sparse._semi_structured_conversions import (
        sparse_semi_structured_from_dense_cutlass,
    )

    values, meta = sparse_semi_structured_from_dense_cutlass(exact)
    tensor = torch.sparse.SparseSemiStructuredTensorCUTLASS(
        exact.shape, packed=values, meta=meta, packed_t=None, meta_t=None,
        compressed_swizzled_bitmask=None,
    )  # fmt: skip
    assert torch.equal(SparseWeight.from_torch(tensor).dense(), exact)
    with pytest.raises(ProblemError, match="weight of type Tensor"):
        SparseWeight.from_torch(exact)


def test_a_weight_that_torch_has_negated_is_packed_with_its_own_signs() -> None:
    weight = torch.randn(64, 64).bfloat16()
    dense = sparsify(weight).dense()
    assert torch.equal(sparsify(torch._neg_view(-weight)).dense(), dense)
    assert torch.equal(SparseWeight.from_dense(torch._neg_view(-dense)).dense(), dense)


def test_what_cannot_be_packed_is_named() -> None:
    dense = torch.ones(64, 64, dtype=torch.bfloat16)
    with pytest.raises(ProblemError, match=r"1024 groups .* the first at \[0, 0:4\]"):
        SparseWeight.from_dense(dense)
    with pytest.raises(ProblemError, match="weight of 24 columns"):
        sparsify(dense[:, :24])
    with pytest.raises(ProblemError, match=r"torch.float32 \[64, 64\]"):
        sparsify(dense.float())
    with pytest.raises(ProblemError, match="pattern='1:4'"):
        sparsify(dense, "1:4")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="by='random'"):
        sparsify(dense, by="random")  # type: ignore[arg-type]
    with pytest.raises(ProblemError, match="weight on the device meta: must have contents"):
        sparsify(dense.to("meta"))
    dense[5, 7] = float("nan")
    with pytest.raises(ProblemError, match=r"NaN at \[5, 7\]"):
        sparsify(dense)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"metadata": torch.zeros(1, 1, 128, 4, dtype=torch.int32)},
            r"metadata .* \[1, 1, 128, 4\]",
        ),
        ({"metadata": torch.zeros(1, 4, 128)}, "metadata torch.float32"),
        ({"values": torch.zeros(64, 128)}, "values torch.float32"),
        ({"scales": torch.zeros(1)}, "tensors metadata, scales, values"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Tensor], message: str) -> None:
    tensors = sparsify(torch.ones(64, 256, dtype=torch.bfloat16)).tensors()
    with pytest.raises(ProblemError, match=message):
        SparseWeight.from_tensors({**tensors, **change})
