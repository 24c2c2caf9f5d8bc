"""humming's GEMMs with quantized weights: compiled by itself, tuned by its own rules for each M.

Rows of the weight are padded to what its tiles take. Scales multiply weights where activations are
bf16, accumulators where they are e4m3. Weights of experts are multiplied in two ways.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
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
_TENSORS = ("weight", "weight_scale", "zero_point", "weight_scale_2")
_ROWS = 128  # its tiles take multiples of so many rows of the weight


@dataclass(frozen=True)
class Humming(Weight):
    """`layer` is humming's own, with its tensors; `tensors` are (weight, scales, zeros, more)."""

    layer: Any

    @classmethod
    def of(cls, given: Quantised) -> Humming:
        """By humming's own layer, from the same numbers."""
        codes = given.codes
        eight = {"dtype": _ACTIVATIONS[given.kind.activations]} if given.kind.bits == 8 else None
        layer = _layer(codes, humming_tensors(codes), input_config=eight)
        found = (getattr(layer, name, None) for name in _TENSORS)
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


def _layer(codes: Codes, tensors: Mapping[str, torch.Tensor], **options: Any) -> Any:  # noqa: ANN401
    """humming's layer of these tensors, in its own layout."""
    weight = dict(_WEIGHTS[codes.format])
    if codes.group != codes.k:
        weight["group_size"] = codes.group
    layer = (
        imported("humming", "humming.layer")
        .HummingLayer(
            shape_n=codes.n,
            shape_k=codes.k,
            weight_config=weight,
            pad_n_to_multiple=_ROWS,
            torch_dtype=torch.bfloat16,
            **options,
        )
        .cuda()
    )
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer


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


# ---- Experts -------------------------------------------------------------------------------------

WAYS = ("grouped_contiguous", "indexed")


class HummingExperts:
    """The weights of experts as one layer of humming's; rows are sorted by experts beforehand."""

    def __init__(self, weights: Sequence[Codes]) -> None:
        each = [humming_tensors(one) for one in weights]
        stacked = {name: _stacked([one[name] for one in each]) for name in each[0]}
        self.count = len(weights)
        self._layer = _layer(weights[0], stacked, num_experts=self.count)

    def bound(
        self, way: str, rows: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
    ) -> Callable[[], object]:
        """A call for rows whose experts end at `ends`, in one of its ways: `out` [rows, n]."""
        layer, compute = self._layer, {"gemm_type": way}
        tuned = imported("humming", "humming.tune").get_heuristics_config(
            layer_config=layer.humming_config, shape_m=rows.shape[0], gemm_type=way
        )
        found = (getattr(layer, name, None) for name in _TENSORS)
        tensors = {
            name: None if one is None else one.data
            for name, one in zip(_TENSORS, found, strict=True)
        }
        if way == "indexed":
            tensors |= _blocks(ends, tuned["block_shape"][0])
        else:
            tensors["expert_layout"] = torch.cat((ends.new_zeros(1), ends)).long()
        return partial(
            imported("humming", "humming.forward").humming_forward,
            layer.humming_config,
            inputs=rows,
            outputs=out,
            locks=layer.locks,
            compute_config=json.dumps(compute),
            tuning_config=json.dumps(tuned),
            **tensors,
        )


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all, as bytes: torch need not know how to copy their type."""
    dtype = tensors[0].dtype
    return torch.stack([one.view(torch.uint8) for one in tensors]).view(dtype)


def _blocks(ends: torch.Tensor, size: int) -> dict[str, torch.Tensor]:
    """The rows of blocks of so many, each of one expert; a number past the last row where it is
    short.
    """
    offsets = [0, *ends.tolist()]
    rows, experts = [], []
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        blocks = -(-(end - begin) // size)
        own = torch.full((blocks * size,), offsets[-1], dtype=torch.int32)
        own[: end - begin] = torch.arange(begin, end)
        rows.append(own)
        experts += [expert] * blocks
    sorted_ids = torch.cat(rows)
    found = {
        "sorted_ids": sorted_ids,
        "expert_ids": torch.tensor(experts, dtype=torch.int32),
        "num_tokens_padded": torch.tensor(len(sorted_ids), dtype=torch.int32),
    }
    return {name: one.to(ends.device) for name, one in found.items()}
