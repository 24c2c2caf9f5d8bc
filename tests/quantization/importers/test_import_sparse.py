"""2:4 weights of compressed-tensors, written here as its sparse-24-bitmask compressor does."""

from __future__ import annotations

import numpy
import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.quantization.importers import import_sparse

TYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)


def written(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A dense weight, and its tensors: the two largest of each four, their places packed by numpy.

    Of every third group one value that stays is a zero, as pruned weights have them.
    """
    torch.manual_seed(n + k)
    weight = (torch.randn(n, k) * 20).to(dtype)
    groups = weight.float().abs().view(n, -1, 4)
    mask = torch.zeros(groups.shape, dtype=torch.bool)
    mask.scatter_(-1, groups.topk(2, dim=-1).indices, True)
    mask = mask.view(n, k)
    raw = weight.view(torch.int8 if dtype.itemsize == 1 else torch.int16)
    raw[:, ::12] = 0
    raw[~mask] = 0
    bits = numpy.packbits(mask.numpy(), axis=-1, bitorder="little")
    tensors = {
        "compressed": raw[mask].view(n, k // 2).view(dtype),
        "bitmask": torch.from_numpy(bits),
        "shape": torch.tensor([n, k]),
    }
    return weight, tensors


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_weight_is_the_same_number_for_number(dtype: torch.dtype) -> None:
    weight, tensors = written(72, 96, dtype)
    found = import_sparse(tensors)
    assert isinstance(found, warploom.SparseWeight) and found.dtype == dtype
    assert torch.equal(found.dense().view(torch.uint8), weight.view(torch.uint8))


def test_a_layer_is_found_by_its_path() -> None:
    weight, tensors = written(8, 64, torch.bfloat16)
    whole = {f"model.up.{name}": one for name, one in tensors.items()}
    whole["model.down.compressed"] = torch.zeros(3)
    assert torch.equal(import_sparse(whole, name="model.up").dense(), weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bitmask": None}, "no tensor bitmask"),
        ({"compressed": torch.zeros(8, 32)}, "compressed is .* of float32"),
        ({"shape": torch.tensor([8, 128])}, r"compressed is \[8, 32\]: must be \[8, 64\]"),
        ({"shape": torch.tensor([8])}, "must be two numbers"),
        ({"shape": torch.tensor([-8, 64])}, "must be positive"),
        (
            {"bitmask": torch.full((8, 8), 0x37, dtype=torch.uint8)},
            r"bitmask with 3 bits at \[0, 0:4",
        ),
    ],
)
def test_what_is_not_24_is_named(change: dict[str, torch.Tensor | None], message: str) -> None:
    _, tensors = written(8, 64, torch.bfloat16)
    tensors = {name: one for name, one in {**tensors, **change}.items() if one is not None}
    with pytest.raises(ProblemError, match=message):
        import_sparse(tensors)
