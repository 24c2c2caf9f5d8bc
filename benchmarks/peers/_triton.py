"""What torch's compiler writes in Triton, tunes and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Triton's templates alone, every one of them timed, as they are launched without CUDA graphs.
_TUNED: dict[str, Any] = {
    "max_autotune": True,
    "max_autotune_gemm_backends": "TRITON",
    "triton.cudagraphs": False,
}


def compiled(
    make: Callable[[], Callable[..., torch.Tensor]], *, tuned: bool = False
) -> Callable[..., torch.Tensor]:
    """What `make` returns, compiled at its first call; whatever fails is a RuntimeError."""
    found: list[Callable[..., torch.Tensor]] = []

    def call(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if not found:
            try:
                import triton  # noqa: F401
            except ImportError as error:
                raise RuntimeError("triton is not installed") from error
            torch._dynamo.reset()  # or it gives up after a few shapes
            options = _TUNED if tuned else None
            found.append(torch.compile(make(), options=options, dynamic=False))
        try:
            return found[0](*arguments, **keywords)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise RuntimeError(f"triton: {type(error).__name__}: {error}") from error

    return call
