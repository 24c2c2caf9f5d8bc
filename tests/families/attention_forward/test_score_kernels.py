"""Which kernels calls get whose scores are changed, and what of them is copied."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import SpecificationError
from warploom.generator.families import family
from warploom.generator.families._attention import DIMS
from warploom.runtime.dispatch import choose
from warploom.runtime.families._attention.mask import Band, shape
from warploom.runtime.families._attention.problem import Extents

H200: Any = {"gpu": "NVIDIA H200"}


def meta(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=kind, device="meta")


def test_the_kernels_are_those_of_what_is_given() -> None:
    q = meta(1, 8, 512, 128).requires_grad_()
    told: dict[str, Any] = {
        "mask": meta(512, 512, kind=torch.bool),
        "alibi_slopes": meta(8).float(),
    }
    added = meta(1, 8, 512, 512)
    kept = warploom.explain(q, q, q, bias=added, **told, **H200)
    wanted = warploom.explain(q, q, q, bias=added.requires_grad_(), **told, **H200)
    assert "_alibi_bias_bf16_masked_" in kept.kernel
    assert kept.kernel == wanted.kernel
    assert "_alibi_bias_bf16_masked_" in str(kept.backward)
    assert "bias_gradient" not in str(kept.backward)
    assert "bias_gradient" in str(wanted.backward)


@pytest.mark.parametrize(
    "keywords",
    [{"alibi_slopes": meta(8).float()}, {"bias": meta(1, 8192)}, {"mask": meta(1, 8192).bool()}],
    ids=str,
)
def test_few_rows_by_many_keys_whose_scores_are_changed_are_no_decoding(
    keywords: dict[str, Any],
) -> None:
    q, k = meta(1, 8, 1, 128), meta(1, 2, 8192, 128)
    assert warploom.explain(q, k, k, **H200).kernel.startswith("attention_decode")
    kernel = warploom.explain(q, k, k, **keywords, **H200).kernel
    assert kernel.startswith("attention_forward")


@pytest.mark.parametrize(
    ("given", "copied"),
    [
        ({"bias": meta(1, 8, 64, 64)}, False),
        ({"bias": meta(64, 128)[:, :64]}, False),
        ({"bias": meta(8, 1, 64).expand(8, 64, 64)}, False),
        ({"mask": meta(2, 1, 1, 64).bool()}, False),
        ({"bias": meta(64, 1)}, True),  # columns are broadcast
        ({"bias": meta(64, 64).mT}, True),
        ({"bias": meta(64, 68)[:, :64]}, True),  # rows begin at multiples of 8 bytes
        ({"mask": meta(64, 72)[:, :64].bool().as_strided((64, 64), (72, 1))}, True),
    ],
    ids=str,
)
def test_what_kernels_cannot_read_in_place_is_copied_and_told(
    given: dict[str, Any], copied: bool
) -> None:
    q = meta(2, 8, 64, 64)
    found = warploom.explain(q, q, q, **given, **H200)
    assert (tuple(found.copies) == tuple(given)) == copied


# All at once that has no kernel: of the smallest tile one register is missing.
NONE = ("attention_forward", 256, "packed", True, "window", "softcap")


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dropout", [False, True])
def test_all_that_changes_scores_at_once_has_kernels(dropout: bool, dim: int, lengths: str) -> None:
    sizes = Extents(1, 1, 1, 4096, 4096, dim, 4096, 4096, lengths == "packed")
    every = {"sinks": "fp32", "alibi": True, "bias": "fp32", "masked": True, "lengths": lengths}
    every["dropout"] = dropout
    for name, masked in product(("attention_forward", "attention_backward"), ("none", "window")):
        for further in ({"softcap": True}, {"bias_gradient": True, "deterministic": True}):
            if name == "attention_forward":
                further = {field: one for field, one in further.items() if field == "softcap"}
            operation = family(name).operation(
                element="bf16", dim=dim, mask=masked, **every, **further
            )
            if (name, dim, lengths, dropout, masked, *further) == NONE:
                with pytest.raises(SpecificationError, match="256 registers expected, 255"):
                    choose(operation, shape(sizes, Band()))
                continue
            assert choose(operation, shape(sizes, Band())).spec.operation == operation
