"""SparseWeight: a 2:4 sparse weight, its metadata ordered as `wgmma.mma_async.sp` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization.checks import require_tensor, resolved

Pattern = Literal["2:4"]
Criterion = Literal["magnitude"]

TYPES: Final = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
ROWS: Final = 64
"""Rows of one instruction, whose metadata 128 threads hold."""
COLUMNS: Final = 64
"""Columns of the weight whose metadata is one word of each of these threads."""
_PADDING: Final = 0b0100
"""Positions 0 and 1: the metadata of groups that are past the weight's end."""


class SparseWeight:
    """W [N, K] of which two of each four neighbours along k may differ from zero.

    `values` [N, K / 2] are those two, in their order; `metadata` int32 [N / 64, K / 64, 128], both
    quotients rounded up, says where they stand: for 64 rows and 64 columns a word of each thread of
    a warpgroup, as the instruction takes it.
    Made by `sparsify`, `from_dense`, `from_torch` or `from_tensors`; never changed in place.
    """

    __slots__ = ("metadata", "values")

    def __init__(self, values: Tensor, metadata: Tensor) -> None:
        self.values = values
        self.metadata = metadata

    @classmethod
    def from_dense(cls, weight: Tensor) -> SparseWeight:
        """Pack a weight that is 2:4 already, without changing a value.

        Args:
            weight: [N, K] in bf16, fp16, e4m3 or int8, with at most two nonzeros in each group of
                four neighbours along k.

        Returns:
            The sparse weight, on the same device.

        Raises:
            ProblemError: The weight has another shape or type, or a group with three nonzeros.
        """
        weight = _required(weight)
        crowded = (weight.float() != 0).reshape(weight.shape[0], -1, 4).sum(-1) > 2
        if bool(crowded.any()):
            row, group = (int(index) for index in crowded.nonzero()[0])
            raise ProblemError(
                f"weight {list(weight.shape)} with {int(crowded.sum())} groups of more than two "
                f"nonzeros, the first at [{row}, {4 * group}:{4 * group + 4}]",
                rule='must be 2:4 sparse; sparsify(weight, "2:4") sets the smaller values to zero',
            )
        return _pack(weight)

    @classmethod
    def from_torch(cls, weight: Tensor) -> SparseWeight:
        """Pack a weight that torch holds as a semi-structured tensor.

        Args:
            weight: A `torch.sparse.SparseSemiStructuredTensor`, of the CUTLASS or of the cuSPARSELt
                form.

        Returns:
            The sparse weight, on the same device.

        Raises:
            ProblemError: The tensor is of another class, or has a shape or type without kernels.
        """
        if not isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
            raise ProblemError(
                f"weight of type {type(weight).__name__}",
                rule="must be a torch.sparse.SparseSemiStructuredTensor; from_dense takes others",
            )
        # cuSPARSELt's metadata is opaque: torch multiplies by the identity, which is exact.
        return cls.from_dense(weight.to_dense())  # type: ignore[no-untyped-call]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SparseWeight:
        """Take the tensors that `tensors()` gave, as they are.

        Args:
            tensors: `values` and `metadata`.

        Returns:
            The weight of these tensors, which are not copied.

        Raises:
            ProblemError: One is missing or unknown, or of another shape, type or device.
        """
        if set(tensors) != {"values", "metadata"}:
            raise ProblemError(
                f"tensors {', '.join(sorted(tensors)) or 'none'} of a sparse weight",
                rule="must be values, metadata",
            )
        values, metadata = tensors["values"], tensors["metadata"]
        if values.dim() != 2 or values.dtype not in TYPES or not values.is_contiguous():
            raise ProblemError(
                f"values {values.dtype} {list(values.shape)}",
                rule=f"must be contiguous [N, K / 2] of {_names()}",
            )
        n, k = values.shape[0], 2 * values.shape[1]
        _require_columns(k, values.dtype)
        shape = _metadata_shape(n, k)
        fits = f"must be contiguous torch.int32 {list(shape)} for values {list(values.shape)}"
        layout = (tuple(metadata.shape), metadata.dtype, metadata.is_contiguous())
        if layout != (shape, torch.int32, True):
            raise ProblemError(
                f"metadata {metadata.dtype} {list(metadata.shape)}",
                rule=fits,
            )
        if values.device != metadata.device:
            raise ProblemError(
                f"values on {values.device} and metadata on {metadata.device}",
                rule="must be on one device",
            )
        return cls(values, metadata)

    @classmethod
    def empty(cls, n: int, k: int, dtype: torch.dtype, device: torch.device | str) -> SparseWeight:
        """Return a weight [n, k] whose tensors have no contents yet."""
        values = torch.empty(n, k // 2, dtype=dtype, device=device)
        shape = _metadata_shape(n, k)
        return cls(values, torch.empty(shape, dtype=torch.int32, device=device))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight before it was halved."""
        return self.values.shape[0], 2 * self.values.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the values."""
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        """The device of both tensors."""
        return self.values.device

    def tensors(self) -> dict[str, Tensor]:
        """Return both tensors by name, to be saved: `from_tensors` takes them."""
        return {"values": self.values, "metadata": self.metadata}

    def to(self, device: torch.device | str) -> SparseWeight:
        """Return the weight on another device.

        Args:
            device: The device.
        """
        return SparseWeight(self.values.to(device), self.metadata.to(device))

    def dense(self) -> Tensor:
        """Return W [N, K] in its own dtype, zeros included."""
        n, k = self.shape
        codes = _codes(self.metadata, n, k, self.dtype)
        places = torch.stack((codes & 3, codes >> 2), -1).long()
        # Bits are moved as integers: scatter has no 8-bit floats.
        carrier = {1: torch.int8, 2: torch.int16}.get(self.dtype.itemsize, self.dtype)
        pairs = self.values.view(carrier).view(n, k // 4, 2)
        groups = torch.zeros(n, k // 4, 4, dtype=carrier, device=self.device)
        return groups.scatter_(-1, places, pairs).flatten(1).view(self.dtype)

    def __repr__(self) -> str:
        n, k = self.shape
        return f"SparseWeight([{n}, {k}], 2:4, {self.dtype}, {self.device})"


def sparsify(
    weight: Tensor, pattern: Pattern = "2:4", *, by: Criterion = "magnitude"
) -> SparseWeight:
    """Set two of each four neighbours along k to zero, and pack the rest.

    Args:
        weight: [N, K] in bf16, fp16, e4m3 or int8.
        pattern: "2:4", the pattern that the tensor cores multiply.
        by: "magnitude": the two largest absolute values stay, of equal ones the first.

    Returns:
        The sparse weight, on the same device.

    Raises:
        ProblemError: A choice is unknown, the weight has another shape or type, or holds NaN.

    Example:
        >>> weight = warploom.sparsify(torch.randn(64, 128).bfloat16())
        >>> (weight.dense() == 0).float().mean()
        tensor(0.5000)
    """
    for name, value, choices in (("pattern", pattern, Pattern), ("by", by, Criterion)):
        if value not in get_args(choices):
            raise ProblemError(f"{name}={value!r}", rule=f"must be {get_args(choices)[0]!r}")
    return _pack(_required(weight))


def _required(weight: Tensor) -> Tensor:
    """The weight as it is read; ProblemError for what cannot be packed."""
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.dtype not in TYPES:
        what = (
            f"{weight.dtype} {list(weight.shape)}"
            if isinstance(weight, Tensor)
            else type(weight).__name__
        )
        raise ProblemError(f"weight {what}", rule=f"must be a tensor [N, K] of {_names()}")
    require_tensor("weight", weight)
    _require_columns(weight.shape[1], weight.dtype)
    if weight.shape[0] == 0:
        raise ProblemError("weight without rows", rule="must have at least one")
    weight = resolved("weight", weight)
    nans = weight.float().isnan()
    if bool(nans.any()):
        row, column = (int(index) for index in nans.nonzero()[0])
        raise ProblemError(f"weight with NaN at [{row}, {column}]", rule="must be a number")
    return weight


def _require_columns(k: int, dtype: torch.dtype) -> None:
    """Refuse rows whose stored half is not a multiple of 16 bytes, as TMA reads them."""
    multiple = 32 // dtype.itemsize
    if k == 0 or k % multiple:
        raise ProblemError(
            f"weight of {k} columns", rule=f"must have a multiple of {multiple} in {dtype}"
        )


def _names() -> str:
    return ", ".join(str(dtype) for dtype in TYPES)


def _pack(weight: Tensor) -> SparseWeight:
    """Keep the two largest of each group: of a 2:4 weight, all nonzeros and zeros beside them."""
    groups = weight.reshape(weight.shape[0], -1, 4)
    order = groups.float().abs().sort(dim=-1, descending=True, stable=True).indices
    # The instruction wants the smaller position first.
    places = order[..., :2].sort(-1).values
    carrier = torch.int8 if weight.dtype.itemsize == 1 else torch.int16
    values = groups.contiguous().view(carrier).gather(-1, places).flatten(1).view(weight.dtype)
    codes = (places[..., 0] | places[..., 1] << 2).to(torch.int32)
    return SparseWeight(values, _words(codes, weight.dtype))


# ---- The order of the metadata -------------------------------------------------------------------
#
# A group of four has a code of 4 bits: the position of its first value, and above it that of its
# second. Thread 32 w + 4 r + 2 h + l of a warpgroup gives a word of eight codes:
# - 16 bits, k32: l chooses the upper 16 columns of the instruction's 32; the codes of row 16 w + r
#   are the lower half of the word, those of row 16 w + r + 8 the upper half. Only the threads whose
#   h is the instruction's selector are read, so h chooses one of two neighbouring instructions.
# - 8 bits, k64: l chooses row 16 w + r or 16 w + r + 8, and h the upper 32 columns of 64.


def _metadata_shape(n: int, k: int) -> tuple[int, int, int]:
    return -(-n // ROWS), -(-k // COLUMNS), 128


def _words(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Order codes [N, K / 4] as threads give them."""
    n, groups = codes.shape
    blocks, tiles, threads = _metadata_shape(n, 4 * groups)
    padded = codes.new_full((blocks * ROWS, tiles * COLUMNS // 4), _PADDING)
    padded[:n, :groups] = codes
    if dtype.itemsize == 2:
        # [block, warp, half of the word, r, tile, h, l, code]
        parts = padded.view(blocks, 4, 2, 8, tiles, 2, 2, 4)
        ordered = parts.permute(0, 4, 1, 3, 5, 6, 2, 7)
    else:
        # [block, warp, l, r, tile, h, code]
        parts = padded.view(blocks, 4, 2, 8, tiles, 2, 8)
        ordered = parts.permute(0, 4, 1, 3, 5, 2, 6)
    shifts = torch.arange(0, 32, 4, dtype=torch.int64, device=codes.device)
    whole = (ordered.reshape(blocks, tiles, threads, 8).long() << shifts).sum(-1)
    # The bits of a word, whose highest is the sign of int32.
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def _codes(metadata: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return codes [N, K / 4], from the order of `_words`."""
    blocks, tiles, _ = metadata.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=metadata.device)
    codes = metadata.unsqueeze(-1) >> shifts & 15
    if dtype.itemsize > 1:  # a layer that was converted has its 16-bit values in fp32
        parts = codes.view(blocks, tiles, 4, 8, 2, 2, 2, 4)
        rows = parts.permute(0, 2, 6, 3, 1, 4, 5, 7)
    else:
        parts = codes.view(blocks, tiles, 4, 8, 2, 2, 8)
        rows = parts.permute(0, 2, 5, 3, 1, 4, 6)
    return rows.reshape(blocks * ROWS, -1)[:n, : k // 4]
