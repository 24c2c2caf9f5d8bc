"""RMSNorm through two epilogues: no kernel of its own between the linear layers around a norm.

In x = x + h O^T; y = norm(x) W^T, with norm(x) = g x / sqrt(mean(x^2) + eps), the factor of a row
scales a row of the second product, and g columns of W. So the first product stores the mean of
squares of each row, in shares, the second scales its rows, and g is multiplied into W beforehand.
"""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import GateLayout
from warploom.quantization import PackedWeight
from warploom.runtime.families._product.epilogue import items
from warploom.runtime.families._product.steps.rms import groups_of
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.mixed_gemm.api import mixed_gemm
from warploom.runtime.tensors import shown


def fold_rms_norm(weight: torch.Tensor, norm_weight: torch.Tensor) -> torch.Tensor:
    """Return a linear layer's weight with the weight of the norm before it multiplied in.

    It is computed in fp32 and rounded once, to the type of `weight`. torch instead rounds x times
    the norm's weight, to the type of x. To quantize the layer, quantize the result.

    Args:
        weight: [N, K] of a linear layer.
        norm_weight: [K] of the RMSNorm before it; of one that is centred at zero, as Gemma's,
            1 + its weight.

    Returns:
        A new tensor of the shape and type of `weight`.

    Raises:
        ProblemError: for a quantized weight, and for sizes that do not fit.

    Example:
        >>> warploom.functional.fold_rms_norm(torch.ones(2, 3), torch.tensor([1.0, 2.0, 3.0]))
        tensor([[1., 2., 3.],
                [1., 2., 3.]])
    """
    if isinstance(weight, PackedWeight):
        raise ProblemError(
            f"a quantized weight {[weight.metadata.n, weight.metadata.k]}",
            rule="must be a tensor: codes cannot be multiplied by a norm's weight",
            fix="multiply before warploom.quantize, as in quantize(fold_rms_norm(weight, norm))",
        )
    if weight.dim() != 2 or norm_weight.shape != weight.shape[1:]:
        raise ProblemError(
            f"norm_weight {list(norm_weight.shape)} with weight {list(weight.shape)}",
            rule="must be [K], the weight being [N, K] as torch.nn.Linear has it",
            fix="pass the weights of the norm and of the linear layer that follows it",
        )
    return (weight.detach().float() * norm_weight.detach().float()).to(weight.dtype)


def linear_add(
    h: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual + h W^T + bias, and the shares of its rows' means of squares, by one kernel.

    For inference: gradients are refused. Arguments after `residual` may be left out.

    Args:
        h: [.., K] in fp16 or bf16, of two dimensions or more.
        weight: [N, K], as torch.nn.Linear has it, or a quantized weight.
        residual: [.., N], the residual stream.
        bias: [N].
        out: where the sum goes; it may be the residual itself.

    Returns:
        The sum [.., N] and the shares, fp32 [rows, ceil(N / 16)], which `rms_norm_linear` takes.

    Raises:
        ProblemError: for what `warploom.gemm` or `warploom.mixed_gemm` refuse.

    Example:
        >>> h, x, o = torch.randn(3, 64, 64).bfloat16()
        >>> x, shares = warploom.functional.linear_add(h, o, x)
    """
    _require_weight(weight)
    n = weight.metadata.n if isinstance(weight, PackedWeight) else weight.shape[0]
    rows = h.shape[:-1].numel()
    shares = torch.empty(rows, groups_of(n), dtype=torch.float32, device=h.device)
    steps: list[Item] = [] if bias is None else [("bias", bias)]
    steps += [("residual", residual, 1.0), ("mean_square", shares)]
    return _product(h, weight, steps, out), shares


def rms_norm_linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    shares: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
    gate: str | None = None,
    gate_layout: GateLayout = "halves",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x W^T / sqrt(mean(x^2) + eps) + bias of each row of x, by one kernel.

    That is a linear layer of the RMS norm of x, where W is `fold_rms_norm` of its weight. For
    inference: gradients are refused.

    Args:
        x: [.., K] in fp16 or bf16, the first result of `linear_add`.
        weight: [N, K] with the norm's weight multiplied in, or a quantized weight of that.
        shares: the second result of `linear_add`.
        bias: [N].
        eps: of the norm.
        gate: the function of the columns of the gate, which those of up are multiplied by, as
            `warploom.gemm` has it.
        gate_layout: "halves" where W has all rows of the gate before all rows of up;
            "interleaved" where they alternate, as they must in a quantized weight: quantize
            `torch.stack((gate, up), 1).flatten(0, 1)`.
        out: where the result goes.

    Returns:
        [.., N], or half the columns behind a gate.

    Raises:
        ProblemError: for what `warploom.gemm` or `warploom.mixed_gemm` refuse.

    Example:
        >>> o, up = torch.randn(64, 64).bfloat16(), torch.randn(128, 64).bfloat16()
        >>> folded = warploom.functional.fold_rms_norm(up, torch.ones(64))
        >>> h, x = torch.randn(2, 4, 64).bfloat16()
        >>> x, shares = warploom.functional.linear_add(h, o, x)
        >>> warploom.functional.rms_norm_linear(x, folded, shares).shape
        torch.Size([4, 128])
        >>> packed = warploom.quantize(folded, "int4", group=64)  # rows of gate and up in turn
        >>> warploom.functional.rms_norm_linear(
        ...     x, packed, shares, gate="silu", gate_layout="interleaved"
        ... ).shape
        torch.Size([4, 64])
    """
    gated = items(bias=bias, gate=gate, gate_layout=gate_layout)
    if gate is not None and gate_layout == "halves" and isinstance(weight, PackedWeight):
        raise ProblemError(
            "gate_layout halves with a quantized weight",
            rule="must be interleaved: a kernel reads gate and up of a column from one tile of it",
            fix="quantize torch.stack((gate, up), 1).flatten(0, 1), and pass "
            'gate_layout="interleaved"',
        )
    return _product(x, weight, [("rms_scale", shares, eps), *gated], out)


def _product(
    a: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    steps: list[Item],
    out: torch.Tensor | None,
) -> torch.Tensor:
    _require_weight(weight)
    if isinstance(weight, PackedWeight):
        return mixed_gemm(a, weight, epilogue=steps, out=out)
    return gemm(a, weight.t(), epilogue=steps, out=out)


def _require_weight(weight: object) -> None:
    """Raise ProblemError for what is no weight of a linear layer."""
    is_matrix = isinstance(weight, torch.Tensor) and weight.dim() == 2
    if not is_matrix and not isinstance(weight, PackedWeight):
        raise ProblemError(
            f"weight {shown(weight)}",
            rule="must be [N, K], as torch.nn.Linear has it, or a PackedWeight",
            fix="pass layer.weight",
        )
