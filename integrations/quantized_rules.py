"""What `warploom.nn.QuantizedLinear` is made of, and which of its products Warploom computes.

Torch computes the others. As in linear_rules.py, calls and `warploom.explain` ask the same
predicate, which reads no contents.
"""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.integrations.devices import unserved
from warploom.integrations.linear import Linear
from warploom.integrations.linear_rules import (
    EXTENT,
    PRODUCTS,
    extents,
    product_type,
    transformed,
)
from warploom.integrations.linear_sharing import check_module
from warploom.quantization import PackedWeight
from warploom.runtime.operator import is_distributed
from warploom.runtime.tensors import shown

INPUTS: Activations = "16-bit"  # what weights are packed for


def refusal(
    x: torch.Tensor,
    weight: PackedWeight,
    residual: torch.Tensor | None = None,
    *,
    named: bool = False,
) -> str | None:
    """Why torch computes x [.., k] times a packed weight [n, k], given back in 16 bits, if it does.

    Of a GPU that is `named` kernels exist, and the tensors may be anywhere.
    """
    found = None if named else unserved(x.get_device())
    if found is not None:
        return found
    kind = x.dtype
    if torch._C._is_any_autocast_enabled():
        kind = product_type(kind, "cuda" if named else x.device.type)
    if kind not in PRODUCTS:
        return f"x is {kind}; kernels take bfloat16 and float16"
    # An exported program is for any number of rows: a bound would be one of its dimensions.
    if not torch.compiler.is_exporting() and not 0 < x.numel() <= EXTENT:
        found = extents(x, weight.shape)
        if found is not None:
            return found
    if residual is not None and residual.dtype not in (*PRODUCTS, torch.float32):
        return f"the residual is {residual.dtype}; kernels add bfloat16, float16 and float32"
    return transformed(x, weight.slabs, sharded=False)


def check_whole(weight: PackedWeight) -> None:
    """Raise ProblemError for a weight that is sharded, or whose tensors were converted."""
    for name, (_, dtype) in weight.metadata.tensors().items():
        tensor = weight.tensors()[name]
        if is_distributed(tensor):
            raise ProblemError(
                f"{name}, a DTensor in the forward of a quantized layer",
                rule="must be gathered: tensor parallelism does not share a quantized weight out",
                fix="leave the layer out of parallelize_module's plan; fully_shard gathers it",
            )
        if tensor.dtype != dtype:
            raise ProblemError(
                f"{name} of {tensor.dtype}",
                rule=f"must be {dtype}, as it was quantized",
                fix="leave the layer out of what converts parameters, such as the param_dtype of "
                "FSDP's MixedPrecisionPolicy, or quantize it with scale_dtype of that type",
            )


def check_parts(
    weight: PackedWeight, bias: torch.Tensor | None, packed_for: Activations = INPUTS
) -> None:
    """Raise ProblemError for a weight and a bias that no layer has."""
    if not isinstance(weight, PackedWeight):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be a PackedWeight",
            fix="make one with warploom.quantize",
        )
    if weight.metadata.activations != packed_for:
        raise ProblemError(
            f"a weight that is quantized for {weight.metadata.activations} activations",
            rule=f"must be quantized for {packed_for} ones",
            fix="call warploom.mixed_gemm, or pack it anew",
        )
    n = weight.shape[0]
    if bias is None or (
        bias.shape == (n,) and bias.dtype.is_floating_point and bias.device == weight.device
    ):
        return
    raise ProblemError(
        f"bias {bias.dtype} {list(bias.shape)} on {bias.device}",
        rule=f"must be floating-point [{n}], on {weight.device} as the weight",
    )


def check_linear(linear: torch.nn.Linear) -> None:
    """Raise ProblemError for a layer whose weight is not all that there is to its product."""
    check_module(linear, Linear)
    if isinstance(linear, Linear) and (linear.recipe or linear.accumulate_into_main_grad):
        raise ProblemError(
            f"a Linear with recipe={linear.recipe!r}, accumulate_into_main_grad="
            f"{linear.accumulate_into_main_grad}",
            rule="must have neither: they train a weight of 16 or 32 bits",
            fix="set them to None and False first",
        )
    if "weight" not in linear._parameters:
        raise ProblemError(
            "a Linear whose weight is computed, as by pruning",
            rule="must have the weight as its parameter",
            fix="make it permanent, as by torch.nn.utils.prune.remove",
        )
