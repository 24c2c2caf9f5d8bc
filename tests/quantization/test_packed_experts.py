"""PackedExperts: the weights of all experts are those of each, in one piece of memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree

import warploom
from warploom.errors import ProblemError
from warploom.quantization import PackedExperts


def weights() -> torch.Tensor:
    return torch.randn(3, 96, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize(
    "options",
    [{"format": "mxfp4"}, {"format": "int4", "group": 32}, {"format": "uint4", "group": None}],
    ids=str,
)
def test_each_expert_is_its_weight_quantized(options: dict[str, Any]) -> None:
    w = weights()
    packed = PackedExperts.quantize(w, **options)
    assert (packed.shape, len(packed), packed.device) == ((3, 96, 64), 3, w.device)
    for expert, one in enumerate(packed):
        alone = warploom.quantize(w[expert], **options)
        assert one.metadata == alone.metadata
        for name, tensor in alone.tensors().items():
            own = one.tensors()[name]
            assert torch.equal(own.view(torch.uint8), tensor.view(torch.uint8))
            assert own.untyped_storage().data_ptr() == packed.tensors()[name].data_ptr()
            assert own.data_ptr() % 16 == 0
    assert torch.equal(packed.dequantize()[2], packed[2].dequantize())
    again = PackedExperts.stack(packed)
    assert torch.equal(again.slabs, packed.slabs)
    leaves, tree = _pytree.tree_flatten(again)
    assert _pytree.tree_unflatten(leaves, tree).shape == packed.shape
    assert PackedExperts.from_tensors(packed.tensors(), packed.metadata)[1].shape == (96, 64)
    assert packed.to("cpu") is packed and packed.to("meta").device.type == "meta"


def test_weights_that_differ_are_refused() -> None:
    packed = PackedExperts.quantize(weights(), "mxfp4")
    other = warploom.quantize(weights()[0], "int4", group=32)
    slabs, metadata = packed.slabs, packed.metadata
    for call, told in (
        (lambda: PackedExperts.stack([]), "one expert at least"),
        (lambda: PackedExperts.stack([packed[0], other]), "expert 1.*must have the format"),
        (lambda: PackedExperts.quantize(weights()[0]), r"must be a tensor \[E, N, K\]"),
        (lambda: PackedExperts.quantize(weights()[:0]), r"must be a tensor \[E, N, K\]"),
        (lambda: PackedExperts.from_tensors({}, metadata), "contiguous"),
        (lambda: PackedExperts.from_tensors({"data": slabs.mT}, metadata), "contiguous"),
        (lambda: PackedExperts.from_tensors({"data": slabs[:, :, :-1]}, metadata), "contiguous"),
    ):
        with pytest.raises(ProblemError, match=told):
            call()


def test_what_is_no_expert_is_refused_in_a_sentence() -> None:
    """A slice gave a weight that said it was of one expert, and had the bytes of several."""
    w = weights()
    packed = PackedExperts.quantize(w, "uint4", None)
    scales = {**packed.tensors(), "channel_scales": torch.tensor(1.0)}
    calls: tuple[tuple[Any, str], ...] = (
        (lambda: packed[1:], "must be an integer"),
        (lambda: packed[torch.tensor([0, 1])], "must be an integer"),
        (lambda: packed.put(slice(0, 2), packed[0]), "must be an integer"),  # type: ignore[arg-type]
        (lambda: packed.put(0, w[0]), "must be a PackedWeight"),  # type: ignore[arg-type]
        (lambda: PackedExperts.stack([w[0]]), "must be a PackedWeight"),  # type: ignore[list-item]
        (lambda: PackedExperts.from_tensors(scales, packed.metadata), "contiguous"),
        (lambda: PackedExperts.from_tensors({"data": [1]}, packed.metadata), "must be a tensor"),  # type: ignore[dict-item]
    )
    for call, told in calls:
        with pytest.raises(ProblemError, match=told):
            call()
    assert packed[torch.tensor(1)].shape == packed[-1].shape == (96, 64)
