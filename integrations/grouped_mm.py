"""`warploom.grouped_mm`: torch's grouped matrix multiply, by Warploom's kernels where they fit."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from warploom.errors import ProblemError
from warploom.generator.families.gemm import MOST_GROUPS
from warploom.integrations.devices import unserved
from warploom.integrations.linear_rules import PRODUCTS
from warploom.integrations.torch_operators import Overridden, key_set, torch_kernels
from warploom.runtime.families.gemm.grouped import grouped_gemm

_KEY = "CUDA"
_OPERATOR = "aten::_grouped_mm"
_FIX = "call warploom.grouped_mm in place of torch's function"
_RESULTS = (None, *PRODUCTS, torch.float32)


def refusal(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> str | None:
    """Why torch computes a call, if it does."""
    given = (mat_a, mat_b, *(one for one in (offs, bias) if one is not None))
    if not all(isinstance(one, torch.Tensor) for one in given):
        return "arguments that are no tensors, which torch refuses"
    reason = unserved(mat_a.get_device())
    if reason is not None:
        return reason
    if mat_a.dtype not in PRODUCTS or mat_b.dtype != mat_a.dtype:
        return f"{mat_a.dtype} by {mat_b.dtype}: kernels are for bf16 and fp16"
    if out_dtype not in _RESULTS:
        return f"out_dtype {out_dtype}: kernels have bf16, fp16 and fp32"
    if bias is not None:
        return "bias: torch has its own rules for it; warploom.grouped_gemm takes one"
    if (mat_a.dim(), mat_b.dim()) not in ((2, 2), (2, 3), (3, 3)):
        return "groups of columns: torch lays the result out by rows"
    if (offs is None) != (mat_a.dim() == 3):
        return "offs of batches, or groups without offs, which torch refuses"
    if offs is not None:
        if offs.dtype != torch.int32 or offs.dim() != 1 or not offs.is_contiguous():
            return "offs: kernels read contiguous int32 [G]"
        if offs.shape[0] > MOST_GROUPS:
            return f"{offs.shape[0]} groups: kernels have up to {MOST_GROUPS}"
        if mat_b.dim() == 3 and mat_b.shape[0] != offs.shape[0]:
            return "another number of offsets than of matrices, which torch refuses"
    batches = offs is None and mat_a.shape[0] != mat_b.shape[0]
    if batches or mat_a.shape[-1] != mat_b.shape[-2]:
        return "matrices that do not fit each other, which torch refuses"
    return None


def _by_kernels(
    mat_a: torch.Tensor, mat_b: torch.Tensor, offs: torch.Tensor | None, **result: Any
) -> torch.Tensor:
    """The product in its own types under autocast, too, which leaves torch's function alone."""
    if not torch._C._is_any_autocast_enabled():
        return grouped_gemm(mat_a, mat_b, offs=offs, **result)
    with torch.autocast(mat_a.device.type, enabled=False):
        return grouped_gemm(mat_a, mat_b, offs=offs, **result)


def _multiplied(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The result, whose rows start at multiples of 16 bytes, as compilers expect torch's to."""
    kind, m, n = out_dtype or mat_a.dtype, mat_a.shape[-2], mat_b.shape[-1]
    pitch = -(-n * kind.itemsize // 16) * 16 // kind.itemsize
    if mat_a.dim() == 2 and mat_b.dim() == 3:
        out = mat_a.new_empty_strided((m, n), (pitch, 1), dtype=kind)
    else:
        groups = mat_a.shape[0] if offs is None else offs.shape[0]
        out = mat_a.new_empty_strided((groups, m, n), (m * pitch, pitch, 1), dtype=kind)
    return _by_kernels(mat_a, mat_b, offs, out=out)


class Activation(Overridden):
    """Warploom's kernels in torch's operator, until `remove()` or the end of a `with` block."""

    def __init__(self) -> None:
        self._kernel = torch_kernels("grouped_mm", [_OPERATOR], _KEY, _FIX)[_OPERATOR]
        self._keys = key_set(_KEY)
        super().__init__(_OPERATOR, {_OPERATOR: self._run}, _KEY)

    def _run(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if refusal(mat_a, mat_b, offs, bias, out_dtype):
            given = (mat_a, mat_b, offs, bias, out_dtype)
            by_torch: torch.Tensor = self._kernel.call_boxed(self._keys, *given)
            return by_torch
        with torch.no_grad():
            return _multiplied(mat_a, mat_b, offs, out_dtype)


class GroupedMM:
    """The function `warploom.grouped_mm`; an object, so that torch's can be replaced by it."""

    __name__ = "grouped_mm"

    def __init__(self) -> None:
        self._active: Activation | None = None

    def __call__(
        self,
        mat_a: torch.Tensor,
        mat_b: torch.Tensor,
        *,
        offs: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Compute a grouped GEMM with the signature of torch.nn.functional.grouped_mm.

        Args:
            mat_a: [S, K], [M, S] or [G, M, K], bf16 or fp16.
            mat_b: [G, K, N] or [S, N], of the dtype of mat_a.
            offs: int32 [G], where groups end; None for batches.
            bias: As torch takes it.
            out_dtype: The dtype of the result; None: that of mat_a.

        Returns:
            The result, as of `warploom.grouped_gemm`.

        Raises:
            RuntimeError: As torch's own function, which gets every call that kernels do not
                compute.

        Example:
            >>> tokens, experts = torch.randn(8, 64).bfloat16(), torch.randn(2, 64, 32).bfloat16()
            >>> ends = torch.tensor([3, 8], dtype=torch.int32)
            >>> warploom.grouped_mm(tokens, experts, offs=ends).shape
            torch.Size([8, 32])
        """
        if refusal(mat_a, mat_b, offs, bias, out_dtype):
            return functional.grouped_mm(mat_a, mat_b, offs=offs, bias=bias, out_dtype=out_dtype)
        return _by_kernels(mat_a, mat_b, offs, out_dtype=out_dtype)

    def activate(self) -> Activation:
        """Let torch's own grouped_mm run Warploom's kernels, in all code, gradients too.

        It implements torch's operator on CUDA. What kernels do not compute stays with torch's own.

        Returns:
            What undoes it, by `remove()` or as a context manager, as `deactivate()` does.

        Raises:
            ProblemError: For a torch without that operator, and where it is active already.
        """
        if self._active is not None and self._active.active:
            raise ProblemError(
                "grouped_mm, which is active",
                rule="must be activated once",
                fix="call warploom.grouped_mm.deactivate() first",
            )
        self._active = Activation()
        return self._active

    def deactivate(self) -> None:
        """Give torch's operator back to torch's own kernel; where it is not active do nothing."""
        if self._active is not None:
            self._active.remove()
            self._active = None

    def __repr__(self) -> str:
        return "<function warploom.grouped_mm>"


grouped_mm = GroupedMM()
grouped_mm.__doc__ = GroupedMM.__call__.__doc__
