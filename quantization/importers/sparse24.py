"""compressed-tensors' 2:4 weights: values, and a bit for each place of the dense weight.

Source: compressed-tensors, compressors/sparse_compressors/sparse_24_bitmask.py. The format is
"sparse-24-bitmask" of `sparsity_config`; later versions of the library only read it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization.importers.layer import Tensors, refused, required, shaped
from warploom.quantization.sparse_weight import TYPES, SparseWeight

SOURCE = "compressed-tensors 2:4"
NAMES = ("compressed", "bitmask", "shape")


def import_sparse(tensors: Tensors, *, name: str = "") -> SparseWeight:
    """Return one layer's 2:4 weight of a checkpoint of compressed-tensors, number for number.

    Args:
        tensors: `compressed` [N, K / 2] in bf16, fp16, e4m3 or int8: the values that stay, row by
            row; `bitmask` uint8 [N, K / 8]: bit i of a byte is set where place i of eight has one;
            `shape`: N and K. Either the layer's own, or those of a whole checkpoint. Scales of
            8-bit values are tensors of their own, `weight_scale`.
        name: The layer's path in the checkpoint, such as model.layers.0.mlp.up_proj.

    Returns:
        The packed weight, on the tensors' device.

    Raises:
        ProblemError: A tensor is missing or of another shape or type, or the mask has a group of
            four with more or less than two bits.

    Example:
        >>> tensors = safetensors.torch.load_file("model.safetensors")
        >>> weight = import_sparse(tensors, name="model.layers.0.mlp.up_proj")
    """
    prefix = f"{name}." if name else ""
    layer = {one: tensors[prefix + one] for one in NAMES if prefix + one in tensors}
    values = required(SOURCE, layer, "compressed", rank=2, types=TYPES)
    mask = required(SOURCE, layer, "bitmask", rank=2, types=[torch.uint8])
    size = required(SOURCE, layer, "shape", rank=(1, 2), types=[torch.int64, torch.int32])
    if size.numel() != 2:
        raise refused(SOURCE, f"shape is {list(size.shape)}", rule="must be two numbers, N and K")
    n, k = (int(one) for one in size.flatten())
    of = f"shape [{n}, {k}]"
    if n < 1 or k < 4 or k % 4:
        raise refused(SOURCE, of, rule="must be positive, and K a multiple of 4")
    shaped(SOURCE, "compressed", values, (n, k // 2), of)
    shaped(SOURCE, "bitmask", mask, (n, -(-k // 8)), of)
    return SparseWeight.from_dense(_dense(values, mask, k))


def _dense(values: Tensor, mask: Tensor, k: int) -> Tensor:
    """The weight with its zeros, [n, k]."""
    bits = torch.arange(8, dtype=torch.uint8, device=mask.device)
    kept = (mask[..., None] >> bits & 1).bool().flatten(1)[:, :k]
    counts = kept.view(len(kept), -1, 4).sum(-1)
    if bool((counts != 2).any()):
        row, group = (int(one) for one in (counts != 2).nonzero()[0])
        raise ProblemError(
            f"{SOURCE}: bitmask with {int(counts[row, group])} bits at [{row}, {4 * group}:"
            f"{4 * group + 4}]",
            rule="must have two of each four: the pattern is 2:4",
            fix="read the checkpoint with the version of compressed-tensors that wrote it",
        )
    carrier = torch.int8 if values.dtype.itemsize == 1 else torch.int16
    dense = torch.zeros(kept.shape, dtype=carrier, device=values.device)
    dense[kept] = values.contiguous().view(carrier).flatten()
    return dense.view(values.dtype)
