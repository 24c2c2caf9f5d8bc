"""What `wgmma.sp` multiplies, by the layouts that CuTe states its operands in, is the weight."""

from __future__ import annotations

import pytest
import torch

from warploom.quantization.sparse_weight import sparsify

# cute/atom/mma_traits_sm90_gmma_sparse.hpp, ELayout_64x32 and ELayout_64x64: extents and strides of
# threads and of the logical elements that a thread's word is about; an index is row + 64 column.
LAYOUTS = {
    torch.bfloat16: (
        32,
        ((2, 1024), (2, 0), (8, 1), (4, 16)),
        ((16, 64), (2, 8)),
    ),
    torch.int8: (
        64,
        ((2, 8), (2, 2048), (8, 1), (4, 16)),
        ((32, 64),),
    ),
}


def index(at: int, modes: tuple[tuple[int, int], ...]) -> int:
    """A CuTe layout of one coordinate."""
    found = 0
    for extent, stride in modes:
        found += at % extent * stride
        at //= extent
    return found


@pytest.mark.parametrize("dtype", LAYOUTS, ids=str)
def test_the_elements_of_each_word_are_those_of_cutes_layout(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, k = 64, 128
    step, threads, elements = LAYOUTS[dtype]
    drawn = torch.randint(1, 100, (n, k)).to(dtype)
    weight = sparsify(drawn)
    values, words = weight.values.double().tolist(), weight.metadata[0].tolist()
    full = torch.full((n, k), float("nan"), dtype=torch.float64)
    for instruction in range(k // step):
        # In 16 bits two instructions share words: the second takes those of odd pairs of threads.
        tile, selector = (instruction // 2, instruction % 2) if step == 32 else (instruction, None)
        for thread in range(128):
            if selector is not None and thread // 2 % 2 != selector:
                continue
            word = words[tile][thread]
            for element in range(0, 32, 4):  # a code of 4 bits is of 4 elements
                at = index(thread, threads) + index(element, elements)
                row, column = at % 64, at // 64 + instruction * step
                code = word >> element & 15
                for half, place in enumerate((code & 3, code >> 2)):
                    full[row, column + place] = values[row][column // 2 + half]
    dense = weight.dense().double()
    assert torch.equal(full.nan_to_num(0.0), dense)
    assert int(full.isnan().sum()) == n * k // 2  # each word is read once
