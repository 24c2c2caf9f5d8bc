"""What is no exact weight here is refused by name: a wrong weight would be noticed by nobody."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from importer_cases import FIXTURES, NAME, SOURCES, load
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization import PackedWeight
from warploom.quantization.importers import import_weight

Parts = tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]  # tensors, configuration, metadata
Change = Callable[[Parts], None]
CASES = {
    f"{source}: {case.label}": case
    for source in SOURCES
    for case in load(FIXTURES / f"{source}.safetensors")
}


def parts(label: str) -> Parts:
    """A case's tensors by their names in the layer, its configuration, torchao's metadata."""
    case = CASES[label]
    tensors = {key.removeprefix(f"{NAME}."): one for key, one in case.tensors.items()}
    told = json.loads(case.metadata[f"{NAME}.weight"]) if case.metadata else {}
    return tensors, json.loads(json.dumps(case.config)), told


def imported(made: Parts, **given: object) -> PackedWeight:
    tensors, config, told = made
    return import_weight(
        {f"{NAME}.{key}": one for key, one in tensors.items()},
        config or None,
        name=NAME,
        metadata={f"{NAME}.weight": json.dumps(told)} if told else None,
        **given,
    )


def weights_of(config: dict[str, Any]) -> dict[str, Any]:
    return config["config_groups"]["group_0"]["weights"]


def configured(**fields: object) -> Change:
    return lambda made: made[1].update(fields)


def of_weights(**fields: object) -> Change:
    return lambda made: weights_of(made[1]).update(fields)


def described(**fields: object) -> Change:
    return lambda made: made[2]["_data"].update(fields)


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda made: made[0].update({name: change(made[0][name])})


def added(name: str, tensor: Tensor) -> Change:
    return lambda made: made[0].update({name: tensor})


def without(name: str) -> Change:
    def change(made: Parts) -> None:
        del made[0][name]

    return change


def cut(tensor: Tensor) -> Tensor:
    return tensor[1:]


def first(value: float) -> Callable[[Tensor], Tensor]:
    """The tensor with another value in its first place."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


CT, AO = "compressed-tensors: ", "torchao: "
PACKED, INTX = CT + "int4 g128", AO + "int4 g64"
V1, AWQ = "gptq: v1 g64 zeros", "awq: g128"
BITNET = "bitnet: bitlinear"
ROW = torch.arange(256)
# What is done to a case, and what is said of it.
REFUSED: dict[str, tuple[str, str, *tuple[Change, ...]]] = {
    # Values of k that lie in another order than their groups.
    "g_idx": (V1, "act-order: g_idx is not k", changed("g_idx", lambda one: one.flip(0))),
    "no g_idx": (V1, "desc_act without g_idx", configured(desc_act=True), without("g_idx")),
    "weight_g_idx": (PACKED, "act-order: a weight_g_idx", added("weight_g_idx", ROW)),
    "actorder": (PACKED, "act-order: actorder 'group'", of_weights(actorder="group")),
    # Bits.
    "gptq 3 bits": (V1, "GPTQ: bits 3: must be 4 or 8", configured(bits=3)),
    "gptq bits in words": (V1, "bits is '4': must be an integer", configured(bits="4")),
    "awq 8 bits": (AWQ, "AutoAWQ: bits 8: must be 4", configured(bits=8)),
    "packed 3 bits": (PACKED, "3 bits of int: must be 4 or 8", of_weights(num_bits=3)),
    "packed floats": (PACKED, "4 bits of float", of_weights(type="float")),
    "int2": (INTX, "target_dtype torch.int2", described(target_dtype="torch.int2")),
    "gptq 8 bits with zeros": (
        "gptq: v1 g64 8 bits",
        "8 bits with zero points",
        configured(sym=False),
        changed("qzeros", first(0)),
    ),
    "int8 with zeros": (
        AO + "int8 channel",
        "8 bits with zero points",
        changed("_weight_zero_point", first(1)),
    ),
    # Layouts and versions.
    "gptq marlin": (V1, "checkpoint_format 'marlin'", configured(checkpoint_format="marlin")),
    "gptq marlin, a flag": (V1, "checkpoint_format 'marlin'", configured(is_marlin_format=True)),
    "gptq words": (V1, "pack_dtype 'int64'", configured(pack_dtype="int64")),
    "awq gemv": (AWQ, "layout 'GEMV': must be 'gemm'", configured(version="GEMV")),
    "marlin-24": (PACKED, "format 'marlin-24'", configured(format="marlin-24")),
    "nvfp4": (CT + "mxfp4", "no tensor weight_glob", configured(format="nvfp4-pack-quantized")),
    "strategy": (PACKED, "strategy 'tensor_group'", of_weights(strategy="tensor_group")),
    "sparse": (PACKED, "sparsity_config", configured(sparsity_config={"format": "sparse-24"})),
    "another kind": (
        INTX,
        "class X: must be one of Int4Tensor",
        lambda made: made[2].update(_type="X"),
    ),
    "no metadata": (INTX, "no metadata of", lambda made: made[2].clear()),
    # Activations that are transformed first.
    "rotated": (PACKED, "transform_config", configured(transform_config={"config_groups": {}})),
    "scaled": (INTX, "act_pre_scale: activ", added("_weight_act_pre_scale", torch.ones(192))),
    # Zero points that packages read as different numbers, and one version taken for the other.
    "gptq v1 of 0": (
        V1,
        "v1 with a stored zero point of 15",
        configured(meta=None),
        changed("qzeros", first(-1)),
    ),
    "gptq of no version": (
        "gptq: v2 g128",
        "sym, yet zero points from 8 to 9: must all be 8",
        changed("qzeros", first(0x7777_7777)),
        configured(checkpoint_format="gptq"),
    ),
    # Whose it is.
    "bitsandbytes": (AWQ, "quant_method 'bitsandbytes'", configured(quant_method="bitsandbytes")),
    "ignored": (PACKED, "it is not quantized", configured(ignore=["re:.*up_proj"])),
    "no group for it": (
        PACKED,
        "no group of config_groups is for model.layers.0.mlp.up_proj",
        configured(config_groups={"group_0": {"targets": ["re:.*k_proj", "Embedding"]}}),
    ),
    "gptq alone": (V1, "qweight without a configuration", lambda made: made[1].clear()),
    # Shapes and types.
    "gptq group": (V1, "act-order", configured(group_size=32)),
    "gptq scales": (V1, r"scales is \[2, 16\]: must be \[3, 16\]", changed("scales", cut)),
    "gptq zeros": (V1, r"qzeros is \[2, 2\]: must be \[3, 2\]", changed("qzeros", cut)),
    "gptq weight": (V1, r"qweight is \[23, 16\]: must be \[24", changed("qweight", cut)),
    "awq scales": (AWQ, r"scales is \[1, 32\]: must be \[2, 32\]", changed("scales", cut)),
    "awq no zeros": (AWQ, "no tensor qzeros: the layer has qweight, sc", without("qzeros")),
    "packed": (PACKED, "weight_packed is", added("weight_shape", torch.tensor([9, 384]))),
    "packed scales": (PACKED, "of int32: must be", changed("weight_scale", Tensor.int)),
    "packed zeros": (
        CT + "int4 g32 zeros",
        r"weight_zero_point is \[1, 3\]: must be \[2, 3\]",
        changed("weight_zero_point", cut),
    ),
    "plain scales": (CT + "int8 channel", "a row for each of n = 9", changed("weight_scale", cut)),
    "blocks": (CT + "e4m3 block", r"the scales is \[1, 3\]", changed("weight_scale", cut)),
    "added zeros": (
        AO + "Int4Tensor g128",
        r"zero_point is \[1, 9\]: must be \[2, 9\]",
        changed("_weight_zero_point", cut),
    ),
    "groups of 48": (
        CT + "int4 channel",
        "groups of 48 of k = 100: one of 32, 64 and 128 must divide",
        of_weights(strategy="group", group_size=48),
        changed("weight_scale", lambda one: one.expand(17, 3)),
    ),
    # Values.
    "nan": (AWQ, "scale nan of row 0, group 0: must be fi", changed("scales", first(math.nan))),
    "mxfp4 nan": (CT + "mxfp4", "scale 255 of row 0", changed("weight_scale", first(255))),
    "e4m3 scale": (
        CT + "e4m3 channel",
        CT + r"weight_scale -1 at \[0, 0\]: must be finite and not negative",
        changed("weight_scale", first(-1.0)),
    ),
    "e4m3 scale of torchao": (
        AO + "e4m3 row",
        AO + r"scale inf at \[0, 0\]: must be finite and not negative",
        changed("_weight_scale", first(math.inf)),
    ),
    "e4m3 nan": (CT + "e4m3 channel", "is NaN as e4m3", changed("weight", first(math.nan))),
    "ternary 3": (
        BITNET,
        "bitnet: code 3 of row 12, k 0: must be 0, 1 or 2",
        changed("weight", first(0x30)),
    ),
    "ternary nan": (BITNET, "weight_scale nan: must be", changed("weight_scale", first(math.nan))),
    "ternary 0": (BITNET, "weight_scale 0: must be fin", changed("weight_scale", first(0))),
    "ternary class": (BITNET, "linear_class 'bitlin': must be", configured(linear_class="bitlin")),
    "ternary online": (BITNET, "'online': must be 'off", configured(quantization_mode="online")),
    "ternary norm": (BITNET, "normalised first: warploom", configured(use_rms_norm=True)),
    "ternary scales": (
        BITNET,
        r"weight_scale is \[2\]: must be one number",
        changed("weight_scale", lambda one: one.repeat(2)),
    ),
    "ternary by itself": (BITNET, "linear_class must be known", lambda made: made[1].clear()),
    "codes": (INTX, "code 8 of row 0", changed("_weight_qdata", first(8))),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_exact_weight_is_named(what: str) -> None:
    label, message, *changes = REFUSED[what]
    made = parts(label)
    imported(made)  # as it was, it can be
    for change in changes:
        change(made)
    with pytest.raises(ProblemError, match=message):
        imported(made)


def test_zero_points_of_0_in_v1_are_given_back_to_gptqmodels() -> None:
    """GPTQModel from 0.9 on takes 1 off whole words, so that a 0 borrows from its neighbour."""
    tensors, config, told = parts("gptq: v2 g64 zeros")
    words = tensors["qzeros"].clone()
    words[0, 0] = 0x0F00_0120
    expected = imported(({**tensors, "qzeros": words}, config, told))
    config["checkpoint_format"] = "gptq"
    stored = {**tensors, "qzeros": words - 0x1111_1111}
    found = imported((stored, config, told))
    assert torch.equal(found.data, expected.data)
    for quantizer in ("gptqmodel:0.8.9", "auto-round:0.9.1", ["optimum:1.9"], None, 10**5000):
        config["meta"] = {"quantizer": quantizer}
        with pytest.raises(ProblemError, match="packages read it as different numbers"):
            imported((stored, config, told))


def test_experts_are_asked_for_one_by_one() -> None:
    case = CASES["mxfp4: three experts"]
    for expert in (None, 3, -1):
        with pytest.raises(ProblemError, match=f"3 experts, expert={expert}"):
            import_weight(case.tensors, case.config, name=NAME, expert=expert)
    with pytest.raises(ProblemError, match="awq: expert=0: the layer must have experts"):
        imported(parts(AWQ), expert=0)


def test_a_tensor_of_another_class_is_named() -> None:
    """torchao's of former releases have a type of 16 bits, like weights that are not quantized."""

    class AffineQuantizedTensor(torch.Tensor):
        pass

    weight = torch.zeros(8, 8).as_subclass(AffineQuantizedTensor)
    for config in (None, {"quant_method": "torchao"}):
        with pytest.raises(ProblemError, match="torchao: a tensor of class AffineQuantizedTensor"):
            import_weight({"weight": weight}, config)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "tensors none: must be those of compressed-tensors, gptq"),
        ({"weight": torch.zeros(8, 8)}, "a weight of float32: must be quantized"),
        ({"a.b.qweight": torch.zeros(8, 8)}, "a checkpoint's tensors and no name"),
        ([torch.zeros(8, 8)], "tensors of type list: must be a dictionary"),
    ],
)
def test_tensors_of_nobody_known_are_named(tensors: object, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        import_weight(tensors)  # type: ignore[arg-type]


def test_a_name_that_no_tensor_has_is_named() -> None:
    case = CASES[AWQ]
    with pytest.raises(ProblemError, match=r"layers\.7: no tensors of the layer 'layers\.7'"):
        import_weight(case.tensors, case.config, name="layers.7")


def test_a_configuration_of_another_class_is_named() -> None:
    """transformers' own have no keys."""
    with pytest.raises(ProblemError, match="of type object: must be a dictionary"):
        import_weight(CASES[AWQ].tensors, object(), name=NAME)  # type: ignore[arg-type]
