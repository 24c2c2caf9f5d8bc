"""Variants of each format are read as the package that writes them reads them, or named."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import written_layers as written
from importer_cases import NAME
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization import PackedWeight
from warploom.quantization.importers import import_weight

Parts = dict[str, Tensor]


def require_exact(packed: PackedWeight, weight: Tensor) -> None:
    assert torch.equal(packed.dequantize(torch.float64), weight)


def named(tensors: Parts, name: str = NAME) -> Parts:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


# ---- auto-round ----------------------------------------------------------------------------------

AUTO_ROUND = {"bits": 4, "group_size": 64, "data_type": "int", "act_bits": 16}


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptq", 1),
        (None, 1),
        ("auto_round", 2),
        ("auto_round:gptqmodel", 2),
        ("auto_round:auto_awq", 0),
        ("auto_round:awq", 0),
    ],
)
def test_auto_rounds_packings_are_read(
    method: str, packing: str | None, version: int, symmetric: bool
) -> None:
    """Its own default is no name of a layout; its zero points are less 1 in some of them."""
    if version:
        made = written.gptq(16, 192, 64, symmetric=symmetric, version=version, g_idx=False)
    else:
        made = written.awq(16, 192, 64, symmetric=symmetric)
    config = {**AUTO_ROUND, "quant_method": method, "sym": symmetric, "packing_format": packing}
    require_exact(import_weight(named(made[0]), config, name=NAME), made[1])


EXTRA: list[tuple[dict[str, Any], int, int]] = [  # and the bits and group that they mean
    ({}, 4, 64),
    ({NAME: {"bits": 8}}, 8, 64),
    ({NAME: {"bits": 8, "group_size": 32, "act_bits": None}}, 8, 32),
    ({".*up_proj": {"bits": 8}}, 8, 64),
    ({"up_proj$": {"group_size": 32}}, 4, 32),  # found anywhere in the name
    ({".*up_proj": {"bits": 16}, NAME: {"group_size": 32}}, 4, 32),  # its own name goes first
    ({"model": {"bits": 8}, "model.layers.0.mlp.up": {"bits": 8}}, 4, 64),  # names, not patterns
    ({".*up.*": {}, ".*proj": {"bits": 8}}, 8, 64),
    ({".*down_proj": {"bits": 16}}, 4, 64),
]


@pytest.mark.parametrize(("extra", "bits", "size"), EXTRA)
def test_auto_rounds_extra_config_overrides(extra: dict[str, Any], bits: int, size: int) -> None:
    tensors, weight = written.gptq(16, 192, size, bits, symmetric=True, version=1)
    config = {**AUTO_ROUND, "quant_method": "auto-round", "sym": True, "extra_config": extra}
    require_exact(import_weight(named(tensors), config, name=NAME), weight)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "packing_format 'auto_round:llm_comp"),
        ({"packing_format": "mlx"}, "packing_format 'mlx': must be one of auto"),
        ({"data_type": "mx_fp"}, "data_type 'mx_fp': must be 'int'"),
        ({"act_bits": 8}, "act_bits 8: activations must not be quantized"),
        ({"rotation_config": {"block_size": 32}}, "rotation_config {'block_size': 32}"),
        ({"bits": 2}, "bits 2: must be 4 or 8"),
        ({"extra_config": {NAME: {"bits": 16}}}, "is not quantized: extra_config leaves it out"),
        ({"extra_config": {NAME: 4}}, "extra_config has 4: must be a mapping of fields"),
    ],
)
def test_what_auto_round_writes_beside_is_named(fields: dict[str, Any], message: str) -> None:
    tensors, _ = written.gptq(16, 192, 64, symmetric=True, version=1)
    config = {**AUTO_ROUND, "quant_method": "auto-round", **fields}
    with pytest.raises(ProblemError, match=message):
        import_weight(named(tensors), config, name=NAME)


# ---- GPTQ ----------------------------------------------------------------------------------------

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
LABELS = (None, "gptq", "gptq_v2")


@pytest.mark.parametrize(
    ("label", "bits", "version", "sym"), [*itertools.product(LABELS, (4, 8), (1, 2), (True, None))]
)
def test_symmetric_zero_points_tell_their_version(
    label: str | None, bits: int, version: int, sym: bool | None
) -> None:
    """Qwen3.5-27B-GPTQ-Int4 is v2 and labelled "gptq": its weights would all be off by a step."""
    tensors, weight = written.gptq(12, 192, 64, bits, symmetric=True, version=version)
    config = {**GPTQ, "bits": bits, "sym": sym, "checkpoint_format": label}
    require_exact(import_weight(tensors, config), weight)


@pytest.mark.parametrize("version", [1, 2])
def test_zero_points_that_may_be_any_are_as_the_label_says(version: int) -> None:
    """sym false: no number tells v1 from v2 there."""
    label = {1: "gptq", 2: "gptq_v2"}[version]
    tensors, _ = written.gptq(16, 192, 64, symmetric=False, version=version)
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x0888_8888).bitwise_or_(-(1 << 31))
    config = {**GPTQ, "sym": False, "checkpoint_format": label}
    packed = import_weight(tensors, config)
    assert (packed.metadata.format == "int4") == (version == 2)


DYNAMIC: list[tuple[dict[str, Any], int, int, bool]] = [
    ({}, 4, 64, True),
    ({r"+:.*\.mlp\..*": {"bits": 8}}, 8, 64, True),
    ({r".*\.mlp\..*": {"bits": 8, "group_size": 32}}, 8, 32, True),  # without a sign: positive
    ({r"+:.*up": {"group_size": 32}, r"+:.*": {"bits": 8}}, 4, 32, True),  # the first that fits
    ({r"+:up_proj": {"bits": 8}}, 4, 64, True),  # a name begins with the pattern
    ({r"+:^model\.layers\.0\.mlp\.up_proj$": {"sym": False, "bits": 4}}, 4, 64, False),
    ({r"-:.*down": {}, r"+:(?!.*down).*": {"bits": 8}}, 8, 64, True),
]


@pytest.mark.parametrize(("dynamic", "bits", "size", "symmetric"), DYNAMIC)
def test_gptqmodels_dynamic_overrides(
    dynamic: dict[str, Any], bits: int, size: int, symmetric: bool
) -> None:
    tensors, weight = written.gptq(16, 192, size, bits, symmetric=symmetric, version=1)
    config = {**GPTQ, "dynamic": dynamic}
    require_exact(import_weight(named(tensors), config, name=NAME), weight)


def test_dynamic_overrides_the_layout_of_a_layer() -> None:
    tensors, weight = written.gptq(16, 192, 64, symmetric=False, version=2)
    dynamic = {"+:.*up": {"sym": False, "format": "gptq_v2"}}
    config = {**GPTQ, "checkpoint_format": "gptq", "dynamic": dynamic}
    with pytest.raises(ProblemError, match="must be a mapping of fields"):
        import_weight(named(tensors), {**config, "dynamic": {"+:.*up": 8}}, name=NAME)
    require_exact(import_weight(named(tensors), config, name=NAME), weight)


@pytest.mark.parametrize("order", [1, -1])
def test_a_layer_that_dynamic_leaves_out_is_named(order: int) -> None:
    """Patterns that leave layers out go first, wherever they stand."""
    dynamic = dict([("-:.*up", {}), ("+:.*", {"bits": 8})][::order])
    tensors, _ = written.gptq(16, 192, 64, 8, symmetric=True, version=1)
    with pytest.raises(ProblemError, match="is not quantized: dynamic leaves it out"):
        import_weight(named(tensors), {**GPTQ, "dynamic": dynamic}, name=NAME)
    with pytest.raises(ProblemError, match="dynamic without the layer's name"):
        import_weight(tensors, {**GPTQ, "dynamic": dynamic})


# ---- AutoAWQ -------------------------------------------------------------------------------------

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}


@pytest.mark.parametrize(
    ("listed", "left"),
    [
        (["up_proj"], True),
        (["model.layers.0"], True),
        (["mlp.up_proj"], True),
        (["re:.*up"], True),
        (["up", "proj", "layers.1", "re:up"], False),
        (None, False),
        ([], False),
    ],
)
@pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
def test_modules_that_were_not_converted_are_named(
    field: str, listed: list[str] | None, left: bool
) -> None:
    tensors, weight = written.awq(16, 192, 64, symmetric=False)
    config = {**AWQ, field: listed}
    if not left:
        require_exact(import_weight(named(tensors), config, name=NAME), weight)
        return
    with pytest.raises(ProblemError, match=f"is not quantized: {field} leaves it out"):
        import_weight(named(tensors), config, name=NAME)


@pytest.mark.parametrize("field", ["version", "format", "checkpoint_format"])
@pytest.mark.parametrize("layout", ["gemv", "gemv_fast", "llm-awq", "marlin"])
def test_other_layouts_of_awq_are_named(field: str, layout: str) -> None:
    tensors, _ = written.awq(16, 192, 64, symmetric=False)
    config = {key: one for key, one in AWQ.items() if key != "version"}
    with pytest.raises(ProblemError, match=f"layout '{layout}': must be 'gemm'"):
        import_weight(tensors, {**config, field: layout})


# ---- compressed-tensors --------------------------------------------------------------------------


def scheme(*targets: str, layout: str | None = None, **weights: object) -> dict[str, Any]:
    fields = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    return {"targets": list(targets), "format": layout, "weights": {**fields, **weights}}


def compressed(*schemes: dict[str, Any], layout: str = "pack-quantized") -> dict[str, Any]:
    groups = {f"group_{i}": one for i, one in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


@pytest.mark.parametrize("layout", ["int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "size"), [("group", 128), ("group", 32), ("channel", 256)])
def test_four_bits_in_whole_bytes_are_read(
    layout: str, symmetric: bool, strategy: str, size: int
) -> None:
    """llm-compressor's W4A8 and W4AFP8: a byte for each code, from -8 to 7."""
    tensors, weight = written.whole_bytes(9, 256, size, symmetric=symmetric)
    fields = {"strategy": strategy, "symmetric": symmetric}
    if strategy == "group":
        fields["group_size"] = size
    config = compressed(scheme("Linear", **fields), layout=layout)
    packed = import_weight(tensors, config)
    assert packed.metadata.format == ("int4" if symmetric else "uint4")
    require_exact(packed, weight)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("size", [128, 256])
def test_packed_zero_points_of_few_rows_are_read(n: int, size: int) -> None:
    """A row of words has a stride that torch calls contiguous, and that no view takes."""
    tensors, weight = written.pack_quantized(n, 256, size, symmetric=False)
    config = compressed(scheme("Linear", symmetric=False, group_size=size))
    require_exact(import_weight(tensors, config), weight)


ZEROS = torch.zeros(9, 2, dtype=torch.int8)


@pytest.mark.parametrize(
    ("told", "points", "message"),
    [
        (True, ZEROS, None),
        (False, ZEROS, None),
        (None, ZEROS, None),
        (True, ZEROS + 1, "symmetric, yet a weight_zero_point"),
        (False, None, "no tensor weight_zero_point"),
        ("false", None, "symmetric is 'false': must be true or false"),
        (False, ZEROS[1:] + 1, r"weight_zero_point is \[8, 2\]: must be \[9, 2\]"),
        (False, ZEROS + 8, "weight_zero_point beyond 4 bits"),
    ],
)
def test_zero_points_and_what_is_told_of_them_agree(
    told: object, points: Tensor | None, message: str | None
) -> None:
    tensors, weight = written.whole_bytes(9, 256, 128, symmetric=True)
    tensors |= {} if points is None else {"weight_zero_point": points}
    config = compressed(scheme("Linear", symmetric=told, group_size=128), layout="int-quantized")
    if message is None:
        require_exact(import_weight(tensors, config), weight)
        return
    with pytest.raises(ProblemError, match=message):
        import_weight(tensors, config)


FITS, OTHER = {"group_size": 64}, {"group_size": 32}
CHOSEN = {
    "a name before a pattern": (scheme("re:.*up_proj", **OTHER), scheme(NAME, **FITS)),
    "a name before a class": (scheme("Linear", **OTHER), scheme(NAME, **FITS)),
    "a pattern before a class": (scheme("Linear", **OTHER), scheme("re:.*up_proj", **FITS)),
    "patterns in their order": (scheme("re:.*up.*", **OTHER), scheme("re:.*mlp.*", **FITS)),
    "the last of one target": (scheme("Linear", **OTHER), scheme("Linear", **FITS)),
    "one of several targets": (scheme("re:x", "re:.*up", **FITS), scheme("re:.*down", **OTHER)),
    "a pattern that the name begins with": (scheme("Linear", **FITS), scheme("re:up", **OTHER)),
}


@pytest.mark.parametrize("label", CHOSEN)
def test_the_group_of_a_layer_is_the_packages(label: str) -> None:
    tensors, weight = written.pack_quantized(9, 192, 64, symmetric=True)
    require_exact(import_weight(named(tensors), compressed(*CHOSEN[label]), name=NAME), weight)


@pytest.mark.parametrize("layout", ["pack-quantized", "mixed-precision"])
def test_the_format_of_a_group_goes_first(layout: str) -> None:
    tensors, weight = written.whole_bytes(9, 192, 64, symmetric=True)
    config = compressed(scheme("Linear", layout="int-quantized", **FITS), layout=layout)
    require_exact(import_weight(tensors, config), weight)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"actorder": "group"}, "act-order: actorder 'group'"),
        ({"actorder": "dynamic"}, "act-order: actorder 'dynamic'"),
        ({"actorder": True}, "act-order: actorder True"),
        ({"actorder": "sideways"}, "act-order: actorder 'sideways'"),
        ({"actorder": "static"}, None),
        ({"actorder": "weight"}, None),
        ({"actorder": False}, None),
        ({"strategy": "tensor_group"}, "strategy 'tensor_group'"),
        ({"num_bits": 3}, "3 bits of int: must be 4 or 8"),
        ({"type": "float"}, "4 bits of float"),
    ],
)
def test_fields_of_a_group_are_read_or_named(weights: dict[str, Any], message: str | None) -> None:
    tensors, weight = written.pack_quantized(9, 192, 64, symmetric=True)
    config = compressed(scheme("Linear", **{**FITS, **weights}))
    if message is None:
        require_exact(import_weight(tensors, config), weight)
        return
    with pytest.raises(ProblemError, match=message):
        import_weight(tensors, config)


@pytest.mark.parametrize("ignored", [NAME, "re:.*up_proj", "re:.*mlp"])
def test_ignored_layers_are_named(ignored: str) -> None:
    tensors, weight = written.pack_quantized(9, 192, 64, symmetric=True)
    config = compressed(scheme("Linear", **FITS))
    config["ignore"] = ["lm_head", "model.layers.0.mlp.up", "re:up_proj"]
    require_exact(import_weight(named(tensors), config, name=NAME), weight)
    config["ignore"].append(ignored)
    with pytest.raises(ProblemError, match="is ignored: it is not quantized"):
        import_weight(named(tensors), config, name=NAME)


# ---- fp8 -----------------------------------------------------------------------------------------


def fp8_scales() -> Iterator[tuple[str, Tensor, object, Tensor]]:
    """A label, scales, weight_block_size, and the scales of each value of [9, 160]."""
    one, rows = torch.tensor(0.37), torch.rand(9, generator=torch.Generator().manual_seed(1)) + 0.5
    for label, scale in (("a number", one), ("[1]", one[None]), ("[1, 1]", one[None, None])):
        yield label, scale, None, one.expand(9, 160)
    yield "[n]", rows, None, rows[:, None].expand(9, 160)
    yield "[n, 1]", rows[:, None], None, rows[:, None].expand(9, 160)
    yield "bf16", rows.bfloat16(), None, rows.bfloat16()[:, None].expand(9, 160)
    blocks = torch.tensor([[1.5, 2.0, 3.0], [0.25, 5.0, 6.0]])
    spread = blocks.repeat_interleave(8, 0)[:9].repeat_interleave(64, 1)[:, :160]
    yield "blocks", blocks, [8, 64], spread
    powers = torch.tensor([[1.0, 2.0, 4.0], [0.25, 8.0, 0.5]])
    spread = powers.repeat_interleave(8, 0)[:9].repeat_interleave(64, 1)[:, :160]
    yield "e8m0", powers.to(torch.float8_e8m0fnu), [8, 64], spread


FP8 = {label: rest for label, *rest in fp8_scales()}


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("label", FP8)
def test_scales_of_fp8_are_read(label: str, name: str) -> None:
    """Ministral 3 has weight_block_size null; vLLM's files call the scales weight_scale."""
    scale, block, spread = FP8[label]
    weight = torch.randn(9, 160, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": block}
    packed = import_weight({"weight": weight, name: scale, "input_scale": torch.ones(1)}, config)
    require_exact(packed, weight.double() * spread.double())


@pytest.mark.parametrize(
    ("scale", "block", "message"),
    [
        (torch.ones(3), None, r"weight_scale_inv is \[3\] without a weight_block_size"),
        (torch.ones(2, 3), None, r"\[2, 3\] without a weight_block_size: must be one scale, or"),
        (torch.ones(()), [8, 64], r"the scales is \[\]: must be \[2, 3\]"),
        (torch.ones(2, 3), [8], r"weight_block_size \[8\]: must be two positive sizes"),
        (torch.ones(2, 3), [0, 64], "must be two positive sizes"),
        (torch.ones(2, 3), ["8", "64"], "weight_block_size is '8': must be an integer"),
        (torch.ones(2, 3), "8x64", "weight_block_size '8x64': must be two"),
    ],
)
def test_other_scales_of_fp8_are_named(scale: Tensor, block: object, message: str) -> None:
    tensors = {"weight": torch.zeros(9, 160).to(torch.float8_e4m3fn), "weight_scale_inv": scale}
    with pytest.raises(ProblemError, match=message):
        import_weight(tensors, {"quant_method": "fp8", "weight_block_size": block})


def test_scales_of_fp8_under_two_names_are_refused() -> None:
    tensors = {"weight": torch.zeros(9, 160).to(torch.float8_e4m3fn)}
    tensors |= dict.fromkeys(("weight_scale_inv", "weight_scale"), torch.ones(1))
    with pytest.raises(ProblemError, match="weight_scale and weight_scale_inv: must be one"):
        import_weight(tensors, {"quant_method": "fp8"})
