"""A packed weight passes through torch.compile, states, trees and devices, and says what it is."""

from __future__ import annotations

import copy

import pytest
import torch
from packed_samples import KINDS, packed, same
from torch.utils import _pytree

from warploom.errors import ProblemError
from warploom.generator.formats import FORMATS
from warploom.generator.slabs import SlabLayout
from warploom.quantization import Metadata, PackedWeight, quantize


def alike(one: PackedWeight, other: PackedWeight) -> bool:
    names = one.tensors().keys() == other.tensors().keys()
    tensors = zip(one.tensors().values(), other.tensors().values(), strict=True)
    return names and one.metadata == other.metadata and all(same(*pair) for pair in tensors)


@pytest.mark.parametrize(
    "kind", [("int4", 128, "bf16", "16-bit"), ("uint4", None, "fp16", "16-bit")]
)
def test_a_compiled_function_takes_one_and_returns_one(
    kind: tuple[str, int | None, str, int],
) -> None:
    """A layer's weight is an argument of every step that a model compiles."""
    weight = packed(*kind, 70, 256)

    def step(given: PackedWeight, x: torch.Tensor) -> tuple[PackedWeight, torch.Tensor]:
        y = x @ given.dequantize(torch.float32).t()
        made = PackedWeight(
            given.data.clone(), given.metadata, given.channel_scales, given.channel_zeros
        )
        return made, y * given.shape[1]

    x = torch.randn(3, 256)
    made, y = torch.compile(step, fullgraph=True, backend="eager")(weight, x)
    assert alike(made, weight)
    assert torch.equal(y, x @ weight.dequantize(torch.float32).t() * 256)


def test_it_is_a_node_of_trees() -> None:
    weight = packed("uint4", None, "bf16", "16-bit", 5, 40)
    doubled = _pytree.tree_map(lambda leaf: leaf, {"w": [weight]})["w"][0]
    assert doubled is not weight
    assert alike(doubled, weight)
    leaves, spec = _pytree.tree_flatten(weight)
    assert [leaf is getattr(weight, name) for leaf, name in zip(leaves, NAMES, strict=True)]
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec


NAMES = ("data", "channel_scales", "channel_zeros")


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_tensors_and_its_metadata(kind: tuple[str, int | None, str, int]) -> None:
    """A layer's state has the tensors as buffers and the metadata as plain data beside them."""
    weight = packed(*kind, 66, 160 if kind[1] == 32 else 256)
    plain = weight.metadata.as_dict()
    assert {type(value) for value in plain.values()} <= {int, str, type(None)}
    assert alike(PackedWeight.from_tensors(weight.tensors(), Metadata.from_dict(plain)), weight)
    assert weight.bits == 8 * sum(t.nbytes for t in weight.tensors().values()) / (
        weight.shape[0] * weight.shape[1]
    )


class Layer(torch.nn.Module):
    """A weight in a layer's state: tensors as buffers, metadata as extra state."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.metadata = weight.metadata
        for name, tensor in weight.tensors().items():
            self.register_buffer(name, tensor)

    def get_extra_state(self) -> dict[str, int | str | None]:
        return self.metadata.as_dict()

    def set_extra_state(self, state: dict[str, int | str | None]) -> None:
        self.metadata = Metadata.from_dict(state)

    def packed(self) -> PackedWeight:
        return PackedWeight.from_tensors(dict(self.named_buffers()), self.metadata)


def test_a_layers_state_brings_it_back() -> None:
    made = [packed("uint4", None, "fp16", "16-bit", 66, 256, seed) for seed in (0, 1)]
    layer, other = map(Layer, made)
    assert not alike(layer.packed(), other.packed())
    other.load_state_dict(layer.state_dict())
    assert alike(layer.packed(), other.packed())


def test_a_state_of_other_sizes_is_refused_by_name() -> None:
    weight = packed("int4", None, "bf16", "16-bit", 66, 256)
    tensors = weight.tensors()
    with pytest.raises(
        ProblemError, match=r"^tensors data of a quantized weight: must be data, chan"
    ):
        PackedWeight.from_tensors({"data": tensors["data"]}, weight.metadata)
    short = tensors | {"data": tensors["data"][:1]}
    with pytest.raises(ProblemError, match=r"^data torch.uint8 \[1, 2, 4096\]: must be .*\[2, 2, "):
        PackedWeight.from_tensors(short, weight.metadata)
    cast = tensors | {"channel_scales": tensors["channel_scales"].float()}
    with pytest.raises(ProblemError, match=r"^channel_scales torch.float32 \[128\]: must be torch"):
        PackedWeight.from_tensors(cast, weight.metadata)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"version": 1},
            r"quantized weight of version 1: must be of version 2: pack the weight aga",
        ),
        ({"n": 0}, r"n 0: must be a positive integer"),
        ({"k": 1.5}, r"k 1.5: must be a positive integer"),
        ({"format": "int3"}, r"weight format 'int3': must be one of int4"),
        ({"scale": "e8m0"}, r"scale 'e8m0' of format int4: must be one of bf16, fp16, fp32"),
        ({"k": 100}, r"group 32: must divide k, which is 100: groups of int4 that do: None"),
        (
            {"more": 1},
            r"metadata of a quantized weight .*: must have activations, format, group, k",
        ),
    ],
)
def test_metadata_of_another_kind_is_refused(changes: dict[str, object], message: str) -> None:
    plain = packed("int4", 32, "bf16", "16-bit", 1, 32).metadata.as_dict()
    with pytest.raises(ProblemError, match=message):
        Metadata.from_dict({**plain, **changes})


def test_it_moves_and_keeps_its_types() -> None:
    weight = packed("int4", None, "bf16", "16-bit", 3, 50)
    assert weight.to("cpu") is weight
    moved = weight.to("meta")
    assert {str(tensor.device) for tensor in moved.tensors().values()} == {"meta"}
    assert moved.metadata == weight.metadata
    with pytest.raises(
        ProblemError, match=r"^a quantized weight to torch.float16: must keep its types"
    ):
        weight.to(torch.float16)  # type: ignore[arg-type]
    assert alike(copy.deepcopy(weight), weight)


def test_it_says_what_it_is() -> None:
    weight = packed("int4", 128, "bf16", "16-bit", 64, 256)
    assert weight.shape == (64, 256)
    assert repr(weight) == (
        "PackedWeight(shape=(64, 256), format='int4', group=128, scale='bf16', "
        "activations='16-bit', bits=4.125, device='cpu')"
    )


@pytest.mark.parametrize("format", FORMATS)
def test_slabs_are_what_bulk_copies_take(format: str) -> None:
    """They copy multiples of 16 bytes to addresses that are such multiples."""
    row = FORMATS[format]
    for group in row.groups:
        for scale in row.scales:
            layout = SlabLayout(format, group, scale, "16-bit")
            parts = (layout.codes_bytes, layout.scales_bytes, layout.zeros_bytes)
            assert layout.bytes == sum(parts)
            assert [part % 16 for part in parts] == [0, 0, 0]
    assert SlabLayout("int4", 128, "bf16", "16-bit").bytes == 4224


@pytest.mark.parametrize(
    ("format", "group"),
    [("int4", None), ("int4", 32), ("int8", None), ("e4m3", None), ("mxfp4", 32)],
)
def test_a_transposed_weight_is_quantized(format: str, group: int | None) -> None:
    """Torch views codes of wider elements only where the last dimension is contiguous."""
    weight = torch.randn(32, 96).bfloat16()
    made = quantize(weight, format, group)
    assert same(made.data, quantize(weight.t().contiguous().t(), format, group).data)


def test_one_slab_is_read_where_it_lies_between_others() -> None:
    """Its strides of size 1 are no multiples of what it is viewed as."""
    weight = quantize(torch.randn(1, 32).bfloat16(), "int4", group=32)
    assert weight.data.shape[:2] == (1, 1)
    room = torch.empty(weight.data.shape[-1] + 3, dtype=torch.uint8)
    size = weight.data.shape[-1]
    data = room.as_strided(weight.data.shape, (size + 1, size + 1, 1)).copy_(weight.data)
    moved = PackedWeight.from_tensors({"data": data}, weight.metadata)
    assert torch.equal(moved.dequantize(), weight.dequantize())
