"""Checkpoints' weights are the same, bit for bit, as the packages that wrote them say."""

from __future__ import annotations

import json

import pytest
import torch
from importer_cases import FIXTURES, NAME, SOURCES, Case, load
from torch import Tensor

from warploom.errors import ProblemError
from warploom.generator.formats import FORMATS
from warploom.quantization import PackedWeight
from warploom.quantization.importers import import_weight

CASES = {
    f"{source}: {case.label}": (source, case)
    for source in SOURCES
    for case in load(FIXTURES / f"{source}.safetensors")
}


def weights(source: str, case: Case, **given: object) -> list[tuple[PackedWeight, Tensor]]:
    """What is imported of a case, and what it must be: one weight, or each expert's."""
    made = {"name": NAME, "metadata": case.metadata, **given}
    if source != "mxfp4":
        return [(import_weight(case.tensors, case.config, **made), case.weight)]
    made.setdefault("activations", "e4m3")  # which take scales of all magnitudes
    return [
        (import_weight(case.tensors, case.config, expert=e, **made), case.weight[e])
        for e in range(len(case.weight))
    ]


def require_same(packed: PackedWeight, weight: Tensor) -> None:
    """Bits are compared: -0 is not 0."""
    found = packed.dequantize(weight.dtype).view(torch.uint8)
    assert packed.shape == tuple(weight.shape)
    assert torch.equal(found, weight.contiguous().view(torch.uint8))


@pytest.mark.parametrize("label", CASES)
def test_a_checkpoints_weight_is_that_of_its_package(label: str) -> None:
    """Else a row, a group or a nibble is taken for another, or a zero point is off by one."""
    for packed, weight in weights(*CASES[label]):
        require_same(packed, weight)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", [1, 2])
def test_fresh_weights_are_those_of_the_package(source: str, seed: int) -> None:
    """Fixtures were made once, by one release: another may write something else."""
    package, cases = SOURCES[source]
    pytest.importorskip(package)
    for case in cases(seed):
        for packed, weight in weights(source, case):
            require_same(packed, weight)


def test_fixtures_have_every_format_and_group() -> None:
    found = {
        (packed.metadata.format, packed.metadata.group)
        for source, case in CASES.values()
        for packed, _ in weights(source, case)
    }
    assert {format for format, _ in found} == set(FORMATS) - {"int2", "nvfp4", "mxfp8"}
    assert {group for format, group in found if format == "int4"} == {None, 32, 64, 128}
    assert {group for format, group in found if format == "uint4"} == {None, 32, 64, 128}


def test_activations_are_passed_on() -> None:
    source, case = CASES["compressed-tensors: int4 g128"]
    ((packed, weight),) = weights(source, case, activations="int8")
    assert packed.metadata.activations == "int8"
    require_same(packed, weight)


# ---- Whose it is ---------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [label for label in CASES if not label.startswith("gptq")])
def test_names_of_tensors_tell_who_wrote_them(label: str) -> None:
    """Without a configuration one package's layer would be read as another's, or not at all."""
    source, case = CASES[label]
    if source == "fp8" or label.endswith("block"):  # their blocks are in the configuration alone
        pytest.skip("blocks")
    if source == "bitnet":  # as is whether its scale divides: refused, see test_importers_refuse.py
        pytest.skip("scales")
    bare = Case(case.label, {}, case.tensors, case.weight, case.metadata)
    for packed, weight in weights(source, bare):
        require_same(packed, weight)


def test_tensors_may_be_called_as_in_their_layer() -> None:
    _, case = CASES["gptq: v1 g128"]
    short = {key.removeprefix(f"{NAME}."): one for key, one in case.tensors.items()}
    for config in (case.config, {"model_type": "llama", "quantization_config": case.config}):
        require_same(import_weight(short, config), case.weight)


def test_a_layer_is_found_among_others() -> None:
    """up_proj and up_proj_2 begin alike; so do the two weights of gpt-oss's experts."""
    _, case = CASES["awq: g128"]
    other = {key.replace(NAME, f"{NAME}_2"): one + 1 for key, one in case.tensors.items()}
    require_same(import_weight({**other, **case.tensors}, case.config, name=NAME), case.weight)
    _, case = CASES["mxfp4: three experts"]
    other = {key.replace(NAME, "model.layers.0.mlp.down_proj"): 255 - one
             for key, one in case.tensors.items()}  # fmt: skip
    both = {**other, **case.tensors}
    found = import_weight(both, case.config, name=NAME, expert=2, activations="e4m3")
    require_same(found, case.weight[2])
    with pytest.raises(ProblemError, match="must be of one weight"):
        import_weight(both, case.config, name="model.layers.0.mlp", expert=2)


def test_one_of_torchaos_tensors_is_read_as_it_is() -> None:
    """A model in memory has no metadata of a file."""

    class Int4Tensor(torch.Tensor):
        tensor_data_names = ("qdata", "scale", "zero_point")
        tensor_attribute_names = ("block_size", "shape")

    _, case = CASES["torchao: Int4Tensor g128"]
    live = torch.empty(case.weight.shape).as_subclass(Int4Tensor)
    live.block_size = [1, 128]  # type: ignore[attr-defined]
    for key, tensor in case.tensors.items():
        setattr(live, key.rpartition("_weight_")[2], tensor)
    require_same(import_weight({"weight": live}), case.weight)


# ---- Layouts that no fixture can be made of here -------------------------------------------------


def tiled(codes: Tensor, pairs: int) -> Tensor:
    """Codes as torch's _convert_weight_to_int4pack lays them on a GPU, value by value.

    int4mm.cu: tiles of 8 of n and 16 of k, `pairs` of them a word each; lane l has row l / 4, and
    its word first the first of two neighbours of each half tile, then the second ones.
    """
    n, k = codes.shape
    words = torch.zeros(n // 8, k // (32 * pairs), 32, pairs, dtype=torch.int64)
    for row in range(n):
        for column in range(k):
            outer, inner = divmod(column, 32 * pairs)
            pair, within = divmod(inner, 32)
            half, (quarter, second) = within // 8, divmod(within % 8, 2)
            lane = row % 8 * 4 + quarter
            words[row // 8, outer, lane, pair] |= int(codes[row, column]) << 4 * (half + 4 * second)
    return words.to(torch.int32)


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_tiles_of_the_tensor_core_are_undone(pairs: int) -> None:
    """torchao pads n to 8 and k to 1024: neither is part of the weight."""
    draw = torch.Generator().manual_seed(pairs)
    codes = torch.randint(0, 16, (16, 256), generator=draw)
    scales = torch.rand(2, 16, generator=draw, dtype=torch.bfloat16) + 0.5
    both = torch.stack((scales, torch.zeros_like(scales)), dim=-1)
    tensors = {"_weight_qdata": tiled(codes, pairs), "_weight_scale_and_zero": both}
    data = {"block_size": [1, 128], "shape": [13, 192]}
    told = json.dumps({"_type": "Int4TilePackedTo4dTensor", "_data": data})
    packed = import_weight(tensors, metadata={"weight": told})
    weight = (codes - 8).to(torch.bfloat16) * scales.t().repeat_interleave(128, dim=1)
    require_same(packed, weight[:13, :192])


def test_zero_points_in_units_of_the_weight_are_whole_or_refused() -> None:
    """torchao adds zero points: rounded to whole ones they would move weights by half a step."""
    _, case = CASES["torchao: Int4Tensor g128"]
    scale, key = case.tensors[f"{NAME}._weight_scale"], f"{NAME}._weight_zero_point"
    whole = import_weight({**case.tensors, key: scale * 4}, name=NAME, metadata=case.metadata)
    offset = 4 * scale.t().double().repeat_interleave(128, dim=1)
    plain = import_weight(case.tensors, name=NAME, metadata=case.metadata)
    assert whole.metadata.format == "uint4"
    assert torch.equal(whole.dequantize(torch.float64), plain.dequantize(torch.float64) + offset)
    part = {**case.tensors, key: scale * 0.4}
    with pytest.raises(ProblemError, match="no whole multiples of the scale"):
        import_weight(part, name=NAME, metadata=case.metadata)
    near = import_weight(part, name=NAME, metadata=case.metadata, requantize="int8")
    exact = plain.dequantize(torch.float64).add(
        part[key].t().double().repeat_interleave(128, dim=1)
    )
    groups = (near.dequantize(torch.float64) - exact).reshape(9, 2, 128).abs().amax(dim=-1)
    assert (near.metadata.format, near.metadata.group) == ("int8", 128)
    assert bool((groups <= exact.reshape(9, 2, 128).abs().amax(dim=-1) / 128).all())
