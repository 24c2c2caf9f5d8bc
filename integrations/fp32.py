"""`warploom.fp32`: torch's fp32 matmuls on tensor cores, as exact as torch's own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from math import isfinite, prod
from typing import Any, Literal

import torch

from warploom.errors import ProblemError
from warploom.integrations import devices
from warploom.integrations.torch_operators import Overridden, key_set, torch_kernels
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.tensors import shown

Only = Literal["highest", "high"]

LEAST = 512**3
"""Products of elements, m n k, below which torch's kernels run: launches decide the time there."""

LEAST_SIDE = 64
"""Each of m, n and k is at least that."""

PRECISIONS = {"highest": "fp32", "high": "bf16x3"}
"""What runs for each value of torch.get_float32_matmul_precision(); "medium" is left to torch."""

_KEY = "CUDA"
_running = threading.local()
_OPERATORS = tuple(f"aten::{name}{out}" for name in ("mm", "bmm", "addmm") for out in ("", ".out"))
_FIX = 'call warploom.gemm(precision="fp32"), which runs anywhere'


def activate(only: Only | None = None) -> Activation:
    """Run torch's fp32 matmuls on tensor cores, until `remove()` or the end of a `with`.

    torch's mm, addmm and bmm, and what calls them (matmul, linear, einsum, their gradients, code of
    torch.compile that calls cuBLAS), run `warploom.gemm(precision=...)` for fp32 CUDA tensors of at
    least `LEAST` multiplications. torch.get_float32_matmul_precision() decides, at each call:
    under "highest", torch's default, "fp32" runs, which is as exact as torch's matmuls for any
    values; under "high" "bf16x3" runs; "medium" is left to torch, and so is everything on GPUs
    that Warploom has no kernels for.

    Args:
        only: "high" or "highest": leave the other to torch. None: neither.

    Returns:
        What undoes it. Its `ran` counts, by operator and precision, what ran, and "torch" what was
        left to torch.

    Raises:
        ProblemError: Where torch is too old or not built for CUDA, or for another word.

    Example:
        >>> with warploom.fp32.activate() as activation:
        ...     loss = model(x).sum()
        ...     loss.backward()
        >>> activation.ran
        Counter({('mm', 'fp32'): 24, ('addmm', 'fp32'): 12, ('mm', 'torch'): 2})
    """
    return Activation(only)


class Activation(Overridden):
    """Warploom's kernels in torch's fp32 matmuls: see `activate`."""

    def __init__(self, only: Only | None = None) -> None:
        if only not in (None, *PRECISIONS):
            raise ProblemError(
                f"only {shown(only)}",
                rule=f"must be None or one of {', '.join(PRECISIONS)}",
                fix="leave it out for both",
            )
        self.ran: Counter[tuple[str, str]] = Counter()
        self._only = only
        self._kernels = torch_kernels("matmuls", _OPERATORS, _KEY, _FIX)
        self._keys = key_set(_KEY)
        runs: dict[str, Callable[..., torch.Tensor | None]]
        runs = {"mm": self._mm, "bmm": self._bmm, "addmm": self._addmm}
        overriding = {name: self._overriding(name, runs[_short(name)]) for name in _OPERATORS}
        super().__init__("a matmul of torch", overriding, _KEY)

    def _overriding(self, name: str, run: Callable[..., torch.Tensor | None]) -> Callable[..., Any]:
        """What torch calls in place of an operator: its own kernel, where `run` returns None."""
        torchs, short = self._kernels[name], _short(name)

        def overriding(*given: Any, **keywords: Any) -> Any:  # noqa: ANN401
            if getattr(_running, "inside", False):
                return torchs.call_boxed(self._keys, *given, **keywords)
            precision = precision_of(self._only)
            if precision is not None:
                _running.inside = True  # products of references are torch's
                try:
                    with torch.no_grad():
                        # Detached, nothing of a parameter is kept: code that knows nothing of it
                        # may write to `.data`, or by a CUDA graph, which no version tells.
                        d = run(precision, *map(torch.Tensor.detach, given), **keywords)
                finally:
                    _running.inside = False
                if d is not None:
                    self.ran[short, precision] += 1
                    return d
            self.ran[short, "torch"] += 1
            return torchs.call_boxed(self._keys, *given, **keywords)

        return overriding

    def _mm(
        self, precision: str, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if not takes(a, b, 2) or not _fits(out, (a.shape[0], b.shape[1])):
            return None
        return gemm(a, b, out=out, precision=precision)

    def _bmm(
        self, precision: str, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        if not takes(a, b, 3) or not _fits(out, (*a.shape[:2], b.shape[2])):
            return None
        return gemm(a, b, out=out, precision=precision)

    def _addmm(
        self,
        precision: str,
        added: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: float = 1,
        alpha: float = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if alpha != 1 or not isfinite(beta) or not takes(a, b, 2) or added.dtype != torch.float32:
            return None
        shape = (a.shape[0], b.shape[1])
        if not _fits(out, shape) or added.device != a.device:
            return None
        if beta == 1 and added.dim() == 1 and added.shape[0] == shape[1] and added.stride(0) == 1:
            return gemm(a, b, bias=added, out=out, precision=precision)
        if added.shape != shape or added.stride(1) != 1:
            return None
        return gemm(a, b, residual=added, beta=float(beta), out=out, precision=precision)


def precision_of(only: Only | None = None) -> str | None:
    """The precision that torch's setting stands for now; None where torch's kernels are to run."""
    try:
        setting = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's newer setting differs from it, and is what its kernels follow
        setting = "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"
    return PRECISIONS.get(setting) if only in (None, setting) else None


def takes(a: torch.Tensor, b: torch.Tensor, dimensions: int) -> bool:
    """Whether Warploom's kernels compute a product of torch's: fp32, on a GPU, of some size."""
    return (
        a.dtype == b.dtype == torch.float32
        and a.dim() == b.dim() == dimensions
        and a.device == b.device
        and a.shape[-1] == b.shape[-2]
        and a.shape[:-2] == b.shape[:-2]
        and prod(a.shape) * b.shape[-1] >= LEAST
        and min(*a.shape[-2:], b.shape[-1]) >= LEAST_SIDE
        and devices.unserved(a.get_device()) is None
    )


def _fits(out: torch.Tensor | None, shape: tuple[int, ...]) -> bool:
    """Whether kernels can write a result where it is stored; without one they make it."""
    if out is None:
        return True
    dense = out.stride(-1) == 1 and (out.dim() == 2 or out.is_contiguous())
    return out.shape == shape and out.dtype == torch.float32 and dense


def _short(operator: str) -> str:
    """The name of an operator's function."""
    return operator.removeprefix("aten::").removesuffix(".out")
