"""Parameters that are never trained, and of any dtype: codes and scales of quantized weights."""

from __future__ import annotations

from typing import Any, Self

import torch


class FrozenParameter(torch.nn.Parameter):
    """A parameter that never requires grad, whatever a model that holds it is asked for.

    Torch raises where integers are to require grad, so `model.requires_grad_()` would fail for a
    model with quantized weights among others. Here both ways to ask for it change nothing.
    """

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False) -> Self:
        """Share the memory of `data`; `requires_grad` is what torch passes where it copies one."""
        return super().__new__(cls, data, False)

    @property
    def requires_grad(self) -> bool:
        """False."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Leave it False."""

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Leave it False."""
        return self

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle it as one of this class; torch's rebuilds a plain parameter."""
        return type(self), (self.data,)
