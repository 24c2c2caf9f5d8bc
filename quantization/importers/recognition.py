"""Which package wrote a checkpoint's layer, and that layer as a PackedWeight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from safetensors import safe_open
from torch import Tensor

from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.printable import brief, cut
from warploom.quantization.importers import (
    auto_round,
    awq,
    bitnet,
    compressed_tensors,
    fp8,
    gptq,
    mxfp4,
    nvfp4,
    overrides,
    torchao,
)
from warploom.quantization.importers.checkpoint import layer_of
from warploom.quantization.importers.layer import BlockScaled, Config, Layer, Tensors
from warploom.quantization.packed_weight import PackedWeight
from warploom.suggestions import suggestion

SOURCES = (
    *("compressed-tensors", "gptq", "awq", "mxfp4", "fp8", "torchao", "bitnet", nvfp4.MODELOPT),
    *auto_round.METHODS,
)
LONGEST = 400  # characters of a part of an error: files of others may say megabytes


def import_weight(
    tensors: Tensors | safe_open,
    config: Config | None = None,
    *,
    name: str = "",
    metadata: Mapping[str, str] | None = None,
    expert: int | None = None,
    requantize: str | None = None,
    activations: Activations = "16-bit",
) -> PackedWeight:
    """Return one layer's weight of a quantized checkpoint, the same number for number.

    Args:
        tensors: the layer's, by their names in it (`qweight`), or a whole checkpoint's: a mapping,
            or what `safetensors.safe_open` gives. Only those of the layer are read.
        config: `quantization_config` of the checkpoint's config.json, or all of that file. Without
            it the tensors tell who wrote them; GPTQ's cannot.
        name: the layer's path in the checkpoint (`model.layers.0.mlp.up_proj`), by which its
            tensors are found in a whole one, and what the configuration says of it: its group,
            overrides, and whether it is quantized at all.
        metadata: of the safetensors file, which torchao's tensors need.
        expert: which one, of tensors that have several (gpt-oss's).
        requantize: the format in which to quantize anew, in groups of the same k, what no format
            has exactly: torchao's int4 with zero points that are no whole multiples of the scale.
            In int8 no value moves by more than a 128th of the largest of its group; the error of
            Gaussian weights (groups of 128, root mean square) goes from 10.05 % to 10.06 %, in
            uint4 to 14.3 %.
        activations: what it will be multiplied by, "16-bit" (fp16, bf16), "e4m3" or "int8".

    Raises:
        ProblemError: nobody known wrote it, or it is nothing that a packed weight could be:
            act-order, other bits, layouts or shapes, activations that are transformed first, zero
            points that are no whole multiples of the scale (most of torchao's int4); or the
            configuration is malformed, or has patterns that take too long.
    """
    with _brief_errors(name):
        read = _layer(tensors, config, name, metadata=metadata, expert=expert)
        return read.packed(activations, requantize)


def import_gate_up(
    tensors: Sequence[Tensors],
    config: Config,
    names: Sequence[str],
    requantize: str | None = None,
) -> PackedWeight | None:
    """Return gate and up of an expert as one weight for activations of 16 bits: rows take turns.

    Args are those of `import_weight`, for gate and for up. None: the two differ in format, group or
    dtype of scales.
    """
    layers = []
    for one, name in zip(tensors, names, strict=True):
        with _brief_errors(name):
            layers.append(_layer(one, config, name, metadata=None, expert=None))
    with _brief_errors(f"{' and '.join(names)}, whose rows take turns"):
        both = layers[0].interleaved(layers[1])
        return None if both is None else both.packed("16-bit", requantize)


def import_block_scaled(
    tensors: Tensors | safe_open, config: Config | None = None, *, name: str = ""
) -> BlockScaled:
    """Return one layer's e4m3 weight and its scales of 128x128, as a checkpoint has them.

    `warploom.nn.Float8Linear.from_tensors` takes both; nothing is copied but scales that are not
    fp32.

    Args:
        tensors: as `import_weight` takes them.
        config: the same.
        name: the same.

    Raises:
        ProblemError: what `import_weight` raises, and for a weight of another type, or whose scales
            are not of 128x128.
    """
    with _brief_errors(name):
        read = _layer(tensors, config, name, metadata=None, expert=None)
        if read.blocks is None:
            raise ProblemError(
                f"{read.format} with scales of {read.group or 'rows'}",
                rule="must be e4m3 with a scale for each 128x128",
                fix="import_weight reads it as a quantized weight",
            )
        return read.blocks


@contextmanager
def _brief_errors(name: object) -> Iterator[None]:
    """Errors begin with the layer's name, and say little of what a file may have megabytes of."""
    try:
        yield
    except ProblemError as error:
        where = f"{cut(name, 120)}: " if isinstance(name, str) and name else ""
        parts = (where + error.value, error.rule, error.fix)
        value, rule, fix = (cut(one.replace("\n", "\\n"), LONGEST) for one in parts)
        raise ProblemError(value, rule=rule, fix=fix) from error


def _layer(
    tensors: Tensors | safe_open,
    config: Config | None,
    name: str,
    *,
    metadata: Mapping[str, str] | None,
    expert: int | None,
) -> Layer:
    if not isinstance(name, str):
        raise ProblemError(f"name {brief(name)}", rule="must be a string")
    settings = _settings(config)
    layer = layer_of(tensors, name)
    source = _source(settings, layer)
    settings = overrides.of_layer(source, settings, name)
    if source in auto_round.METHODS:
        source, settings = auto_round.resolved(settings)
    if expert is not None and source != "mxfp4":
        raise ProblemError(f"{source}: expert={brief(expert)}", rule="the layer must have experts")
    known = {} if metadata is None else metadata
    return _read(source, layer, settings, name=name, metadata=known, expert=expert)


def _read(
    source: str,
    layer: Tensors,
    config: Config,
    *,
    name: str,
    metadata: Mapping[str, str],
    expert: int | None,
) -> Layer:
    match source:
        case "compressed-tensors":
            return compressed_tensors.read(layer, config, name)
        case "gptq":
            return gptq.read(layer, config)
        case "awq":
            return awq.read(layer, config)
        case "mxfp4":
            return mxfp4.read(layer, expert)
        case "fp8":
            return fp8.read(layer, config)
        case nvfp4.MODELOPT:
            return nvfp4.modelopt(layer, config, name)
        case "bitnet":
            return bitnet.read(layer, config)
        case _:
            return torchao.read(*_described(layer, name, metadata))


def _settings(config: Config | None) -> Config:
    """`quantization_config`, which may lie in the configuration of the model; empty without."""
    if config is None:
        return {}
    for field in ("quantization_config", "compression_config"):  # the former name of some
        if isinstance(config, Mapping) and "quant_method" not in config and field in config:
            config = config[field]  # type: ignore[assignment]
    if not isinstance(config, Mapping):
        raise ProblemError(
            f"quantization_config of type {type(config).__name__}",
            rule="must be a dictionary",
            fix="of transformers' configurations pass config.quantization_config.to_dict()",
        )
    return config


def _source(config: Config, layer: Tensors) -> str:
    """Who wrote the layer: as the configuration says, else as its tensors are called."""
    method = config.get("quant_method")
    if method is None:
        return _by_names(layer)
    if isinstance(method, str) and method in SOURCES:
        return method
    raise ProblemError(
        f"quant_method {brief(method)}",
        rule=f"must be one of {', '.join(SOURCES)}",
        fix=suggestion(method[:80], SOURCES) if isinstance(method, str) else "",
    )


def _by_names(layer: Tensors) -> str:
    if "blocks" in layer:
        return "mxfp4"
    if "qdata" in layer or _is_subclass(layer.get("weight")):
        return "torchao"
    if "weight_scale_inv" in layer:
        return "fp8"
    if "weight_scale_2" in layer:
        return nvfp4.MODELOPT
    weight = layer.get("weight")
    if isinstance(weight, Tensor) and weight.dtype == torch.uint8:
        raise ProblemError(
            "a weight of uint8 without a configuration",
            rule="linear_class must be known: by its name scales of BitNet divide or multiply",
            fix="pass quantization_config of the checkpoint's config.json",
        )
    if "weight_packed" in layer or "weight_scale" in layer:
        return "compressed-tensors"
    if {"qweight", "qzeros", "scales"} <= set(layer) and "g_idx" not in layer:
        words, scales = layer["qweight"], layer["scales"]
        if not isinstance(words, Tensor) or not isinstance(scales, Tensor):
            raise ProblemError("qweight and scales", rule="must be tensors")
        if words.dim() == 2 and scales.dim() == 2 and words.shape[1] * 8 == scales.shape[1]:
            return "awq"
    if "qweight" in layer:
        raise ProblemError(
            "qweight without a configuration",
            rule="quant_method and checkpoint_format must be known",
            fix="pass quantization_config of the checkpoint's config.json",
        )
    if isinstance(weight, Tensor) and weight.dtype in (
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ):
        raise ProblemError(
            f"a weight of {str(weight.dtype).removeprefix('torch.')}",
            rule="must be quantized",
            fix="warploom.quantization.quantize(weight) does that",
        )
    raise ProblemError(
        f"tensors {cut(', '.join(sorted(layer)), 120) or 'none'}",
        rule=f"must be those of {', '.join(SOURCES)}",
    )


def _described(layer: Tensors, name: str, metadata: Mapping[str, str]) -> tuple[Tensors, Config]:
    """torchao's tensors and what there is to know of them, of a tensor or of a file."""
    weight = layer.get("weight")
    if weight is not None and _is_subclass(weight):
        return torchao.flattened(weight)
    key = f"{name}.weight" if name else "weight"
    if not isinstance(metadata, Mapping) or key not in metadata:
        raise ProblemError(
            f"torchao: no metadata of {cut(key, 120)}",
            rule="needs the metadata of the safetensors file",
            fix="pass metadata=safetensors.safe_open(file, 'pt').metadata()",
        )
    return layer, torchao.described(metadata[key])


def _is_subclass(weight: object) -> bool:
    """Whether it is a tensor of somebody's own class, as torchao's are."""
    return isinstance(weight, Tensor) and type(weight) not in (Tensor, torch.nn.Parameter)
