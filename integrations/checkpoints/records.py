"""Which layers of a model are quantized and how, as config.json has it, and such layers, empty.

A record is a dict: `format`, `group`, `scale`, `activations` and `version` of Metadata, `bias`, and
`modules`, the names of the layers that are like that. N and K are those of the model's layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from warploom.errors import ProblemError
from warploom.integrations.bit_linear import BitLinear
from warploom.integrations.checkpoints.experts import PARTS, QuantizedExperts
from warploom.integrations.expert_layers import shape_of
from warploom.integrations.linear import Linear
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.printable import brief
from warploom.quantization import Metadata, PackedWeight

Record = dict[str, Any]
_KIND = ("format", "group", "scale", "activations", "version")
_RULE = "must be what save_pretrained wrote for a model of this class"


def records(model: torch.nn.Module) -> list[Record]:
    """Return the records of all quantized layers in a model.

    Raises:
        ProblemError: for a layer with an activation or a norm, which the model's class would make
            without.
    """
    found: dict[tuple[object, ...], Record] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, QuantizedLinear):
            continue
        told = "" if module.activation is None else f"activation {module.activation!r}"
        if isinstance(module, BitLinear) and module.rms_norm is not None:
            told = "a norm of its input"
        if told:
            raise ProblemError(
                f"{name}: a quantized layer with {told}",
                rule="must have none to be saved: from_pretrained would make the layer without",
                fix="keep model.state_dict(), and load it into a model that was made in the same "
                "way",
            )
        about = module.metadata.as_dict()
        kind = {**{key: about[key] for key in _KIND}, "bias": module.bias is not None}
        record = found.setdefault(tuple(kind.values()), {**kind, "modules": []})
        record["modules"].append(name)
    return list(found.values())


def place(model: torch.nn.Module, layers: object) -> None:
    """Put quantized layers without contents, on `meta`, where records say that a model has them.

    Raises:
        ProblemError: for records that are malformed, or name what the model has no layer for;
            the model is as it was then.
    """
    wanted = _kinds(layers)
    made: dict[str, torch.nn.Module] = {}
    experts: dict[str, dict[tuple[str, int], tuple[Record, str]]] = {}
    for given, record in wanted.items():
        name, module = _found(model, given)
        if module is not None:
            made[name] = _empty(name, record, module.weight.shape, module.weight.dtype)
            continue
        place, _, number = name.rpartition(".")
        parent, _, part = place.rpartition(".")
        if part not in PARTS or not number.isdecimal():
            raise _absent(model, given)
        experts.setdefault(parent, {})[part, int(number)] = record, given
    for parent, parts in experts.items():
        made[parent] = _empty_experts(model, parent, parts)
    for name, layer in made.items():
        model.set_submodule(name, layer)


def _kinds(layers: object) -> dict[str, Record]:
    """The record of each layer, by its name."""
    found: dict[str, Record] = {}
    for record in layers if isinstance(layers, list) else [layers]:
        about: dict[str, Any] = dict(record) if isinstance(record, Mapping) else {}
        names = about.get("modules")
        if not isinstance(names, list) or set(about) != {*_KIND, "bias", "modules"}:
            keys = ", ".join((*_KIND, "bias", "modules"))
            raise ProblemError(f"layers {brief(record)}", rule=f"must be a list of dicts of {keys}")
        for name in names:
            if not isinstance(name, str) or name in found:
                raise ProblemError(f"layers with {brief(name)}", rule="must name a layer once")
            found[name] = about
    return found


def _found(model: torch.nn.Module, name: str) -> tuple[str, torch.nn.Linear | None]:
    """The linear layer of that name, by which a part or the whole of a model may have saved it."""
    prefix = getattr(model, "base_model_prefix", "")
    own = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}."))
    for one in own:
        try:
            module = model.get_submodule(one)
        except AttributeError:
            continue
        if type(module) in (torch.nn.Linear, Linear):
            return one, cast("torch.nn.Linear", module)
    for one in own:
        parent = one.rpartition(".")[0].rpartition(".")[0]
        if parent in dict(model.named_modules()):
            return one, None
    raise _absent(model, name)


def _empty(name: str, record: Record, shape: Iterable[int], dtype: torch.dtype) -> QuantizedLinear:
    n, k = shape
    try:
        metadata = Metadata.from_dict({**{key: record[key] for key in _KIND}, "n": n, "k": k})
    except ProblemError as error:
        raise ProblemError(f"{name}: {error.value}", rule=error.rule, fix=error.fix) from error
    bias = torch.empty(n, dtype=dtype, device="meta") if record["bias"] else None
    kind = BitLinear if metadata.activations == BitLinear.PACKED_FOR else QuantizedLinear
    layer = kind.from_packed(PackedWeight.empty(metadata, "meta"), bias)
    layer.dtype = dtype
    return layer


def _empty_experts(
    model: torch.nn.Module, name: str, parts: Mapping[tuple[str, int], tuple[Record, str]]
) -> QuantizedExperts:
    from warploom.integrations.transformers_experts import gate_with_kernel

    module: Any = model.get_submodule(name)
    gate = gate_with_kernel(module)
    if gate is None:
        raise _absent(model, next(iter(parts.values()))[1])
    made = []
    for part in PARTS:
        values = getattr(module, part)
        count, shape = len(values), shape_of(module, part)
        if missing := [one for one in range(count) if (part, one) not in parts]:
            raise ProblemError(f"layers without {name}.{part}.{missing[0]}", rule=_RULE)
        kinds = [parts[part, one][0] for one in range(count)]
        made.append([_empty(f"{name}.{part}", kind, shape, values.dtype) for kind in kinds])
    if len(parts) != sum(map(len, made)):
        raise ProblemError(f"layers with more experts than {name} has", rule=_RULE)
    return QuantizedExperts.in_place_of(module, *made, gate=gate)


def _absent(model: torch.nn.Module, name: str) -> ProblemError:
    return ProblemError(
        f"a quantized layer {brief(name)}",
        rule=f"must be a torch.nn.Linear, or one of its experts, in {type(model).__name__}",
        fix="load the checkpoint with the class of model that it was saved from",
    )
