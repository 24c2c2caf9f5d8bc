"""humming's product of a quantised weight: compiled by itself, tuned by its own rules for each M.

Rows of the weight are padded to what its tiles take. Scales multiply weights where activations are
bf16, sums where they are e4m3.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers._mixed_codes import Codes, four_bits, words
from benchmarks.peers._mixed_problem import Activations, Quantised
from benchmarks.peers._mixed_weights import Weight
from benchmarks.peers.libraries import imported

_WEIGHTS: dict[str, dict[str, Any]] = {
    "int4": {"dtype": "int4"},
    "uint4": {"dtype": "uint4", "has_zero_point": True},
    "e4m3": {"dtype": "float8e4m3"},
    "mxfp4": {"dtype": "float4e2m1", "scale_dtype": "float8e8m0"},
    "mxfp8": {"dtype": "float8e4m3", "scale_dtype": "float8e8m0"},
    "nvfp4": {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "scale_2_type": "tensor"},
    "int2": {"dtype": "int2"},
    "ternary": {"dtype": "int2"},
}
_ACTIVATIONS = {"e4m3": "float8e4m3", "int8": "int8"}
_ROWS = 128  # its tiles take multiples of so many rows of the weight


@dataclass(frozen=True)
class Humming(Weight):
    """`layer` is humming's own, with its tensors; `tensors` are (weight, scales, zeros, more)."""

    layer: Any

    @classmethod
    def of(cls, given: Quantised) -> Humming:
        """By humming's own layer, from the same numbers."""
        codes, module = given.codes, imported("humming", "humming.layer")
        weight = dict(_WEIGHTS[codes.format])
        if codes.group != codes.k:
            weight["group_size"] = codes.group
        eight = {"dtype": _ACTIVATIONS[given.kind.activations]} if given.kind.bits == 8 else None
        layer = module.HummingLayer(
            shape_n=codes.n,
            shape_k=codes.k,
            weight_config=weight,
            input_config=eight,
            pad_n_to_multiple=_ROWS,
            torch_dtype=torch.bfloat16,
        ).cuda()
        layer.load_from_tensors(humming_tensors(codes))
        layer.transform()
        names = ("weight", "weight_scale", "zero_point", "weight_scale_2")
        found = (getattr(layer, name, None) for name in names)
        return cls(tuple(None if one is None else one.data for one in found), layer)

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """As its rules say for this M."""
        config, (weight, factors, zeros, more) = self.layer.humming_config, self.tensors
        tuned = imported("humming", "humming.tune").get_heuristics_config(
            layer_config=config, shape_m=a.values.shape[0]
        )
        found: torch.Tensor = imported("humming", "humming.forward").humming_forward(
            config,
            inputs=a.values,
            weight=weight,
            weight_scale=factors,
            zero_point=zeros,
            weight_scale_2=more,
            outputs=out,
            input_scale=None if a.rows is None else a.rows[:, None],
            locks=self.layer.locks,
            tuning_config=json.dumps(tuned),
        )
        return found


def humming_tensors(found: Codes) -> dict[str, torch.Tensor]:
    """What a layer of humming loads: codes along k, zero points along n, scales as they are."""
    scales = found.scales
    if found.format in ("mxfp4", "mxfp8"):
        scales = scales.view(torch.float8_e8m0fnu)
    tensors = {"weight": words(found.codes, found.bits), "weight_scale": scales.contiguous()}
    if found.zeros is not None:
        zeros = four_bits("humming", found.zeros)
        tensors["zero_point"] = words(zeros.t().contiguous(), 4).t().contiguous()
    if found.global_scale is not None:
        tensors["weight_scale_2"] = found.global_scale.reshape(1)
    return tensors
