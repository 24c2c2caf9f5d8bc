"""Parameters that are never trained, and of any dtype: codes and scales of quantized weights."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch


class FrozenParameter(torch.nn.Parameter):
    """A parameter that never requires grad, whatever a model that holds it is asked for.

    Torch raises where integers are to require grad, so `model.requires_grad_()` would fail for a
    model with quantized weights among others. Here both ways to ask for it change nothing.

    `plain` is a torch.Tensor of the same memory. It is what calls read: of a subclass torch looks
    up `__torch_function__` for each property, and tracers by modes know no subclasses.
    """

    plain: torch.Tensor
    moves: ClassVar[list[int]] = [0]  # how often any of them took other memory

    def __new__(cls, data: torch.Tensor, requires_grad: bool = False, **attributes: object) -> Self:
        """Share the memory of `data`. What else torch and accelerate pass is that of a copy."""
        plain = data.detach()
        made = super().__new__(cls, plain, False)
        made.plain = plain
        return made

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

    @property
    def data(self) -> torch.Tensor:
        """The values, as torch has them."""
        found: torch.Tensor = _DATA.__get__(self)
        return found

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take other memory, as a module does that moves."""
        _DATA.__set__(self, value)
        self.plain = value.detach()
        self.moves[0] += 1

    def set_(self, *source: Any, **keywords: Any) -> Self:
        """Take other memory, as torch.Tensor.set_ does."""
        super().set_(*source, **keywords)
        self.plain = self.detach()
        self.moves[0] += 1
        return self

    def module_load(self, other: torch.Tensor, assign: bool = False) -> Self:
        """Return one of this class, which torch swaps with this one where it is to swap."""
        loaded: torch.Tensor = super().module_load(other, assign)  # type: ignore[no-untyped-call]
        return type(self)(loaded)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle it as one of this class; torch's rebuilds a plain parameter."""
        return type(self), (self.data,)


_DATA: Any = torch.Tensor.data
# What torch.save writes of parameters themselves (`state_dict(keep_vars=True)`) loads as theirs.
torch.serialization.add_safe_globals([FrozenParameter])
