"""Torch's registry of attentions has one active: this makes it Warploom's, and undoes that."""

from __future__ import annotations

import torch
from torch.nn import attention

from warploom.errors import ProblemError
from warploom.integrations.sdpa_override import OPERATORS, Override
from warploom.integrations.torch_operators import Overridden, key_set, torch_kernels

PROVIDER = "warploom"
_KEY = "CUDA"
_FIX = "call warploom.sdpa, which runs anywhere"
_NEEDED = (  # of torch 2.11
    (torch.library, "get_kernel"),
    (attention, "activate_flash_attention_impl"),
    (attention, "current_flash_attention_impl"),
    (attention, "register_flash_attention_impl"),
    (attention, "restore_flash_attention_impl"),
)


class Activation(Overridden):
    """Warploom's kernels in torch's attention, until `remove()` or the end of a `with` block."""

    def __init__(self) -> None:
        kernels = torch_kernels("fused attention", OPERATORS, _KEY, _FIX)
        overriding = Override(kernels, key_set(_KEY)).implementations()
        self._restoring = False
        super().__init__("an attention of torch", overriding, _KEY)

    def remove(self) -> None:
        """Give torch's attention back to torch's own kernels. A second time does nothing.

        One that was interrupted is finished by another call.
        """
        if not self.active or self._restoring:
            return
        self._library._destroy()
        if attention.current_flash_attention_impl() == PROVIDER:
            try:
                self._restoring = True  # torch's registry calls this again
                attention.restore_flash_attention_impl()
            finally:
                self._restoring = False
        self._library = None


def activate() -> Activation:
    """Activate Warploom in torch's registry of attentions: see `warploom.sdpa.activate`."""
    if not all(hasattr(place, name) for place, name in _NEEDED):
        raise ProblemError(
            f"torch {torch.__version__}",
            rule="must be 2.11 or later: its own kernels can still be called after an override",
            fix="upgrade torch, or call warploom.sdpa instead of torch's function",
        )
    active = attention.current_flash_attention_impl()
    if active is not None:
        raise ProblemError(
            f"{active}, which is torch's active attention",
            rule="torch has one at a time",
            fix="undo it first: torch.nn.attention.restore_flash_attention_impl()",
        )
    made: list[Activation] = []

    def register() -> Activation:
        made.append(Activation())
        return made[-1]

    try:
        attention.register_flash_attention_impl(PROVIDER, register_fn=register)
        attention.activate_flash_attention_impl(PROVIDER)
        return made[0]
    except BaseException:
        for activation in made:
            activation.remove()
        raise
