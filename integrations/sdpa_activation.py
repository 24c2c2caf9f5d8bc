"""Torch's registry of attentions has one active: this makes it Warploom's, and undoes that."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import Any, Self

import torch
from torch.nn import attention

from warploom.errors import ProblemError
from warploom.integrations.sdpa_override import OPERATORS, Override

PROVIDER = "warploom"
_KEY = "CUDA"
_NEEDED = (  # of torch 2.11
    (torch.library, "get_kernel"),
    (attention, "activate_flash_attention_impl"),
    (attention, "current_flash_attention_impl"),
    (attention, "register_flash_attention_impl"),
    (attention, "restore_flash_attention_impl"),
)


class Activation:
    """Warploom's kernels in torch's attention, until `remove()` or the end of a `with` block."""

    def __init__(self) -> None:
        kernels = torch_kernels()
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEY))
        self._restoring = False
        self._library: Any = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():  # it is what is wanted
                warnings.filterwarnings("ignore", r"[\s\S]*Overriding a previously registered")
                for operator, run in Override(kernels, keys).implementations().items():
                    name = operator.removeprefix("aten::")
                    self._library.impl(name, run, _KEY)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.remove()
            if not isinstance(error, RuntimeError):
                raise
            raise ProblemError(
                f"an attention of torch that other Python code has overridden: {error}",
                rule="must be torch's own when Warploom is activated",
                fix="undo what the other code registered with torch.library",
            ) from error

    def remove(self) -> None:
        """Give torch's attention back to torch's own kernels. A second time does nothing.

        One that was interrupted is finished by another call.
        """
        if self._library is None or self._restoring:
            return
        self._library._destroy()
        if attention.current_flash_attention_impl() == PROVIDER:
            try:
                self._restoring = True  # torch's registry calls this again
                attention.restore_flash_attention_impl()
            finally:
                self._restoring = False
        self._library = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


def activate() -> Activation:
    """Activate Warploom in torch's registry of attentions: see `warploom.sdpa.activate`."""
    if not all(hasattr(place, name) for place, name in _NEEDED):
        raise ProblemError(
            f"torch {torch.__version__}",
            rule="must be 2.11 or later, whose kernels can be called when they are overridden",
            fix="upgrade torch, or call warploom.sdpa in place of torch's function",
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


def torch_kernels() -> dict[str, Any]:
    """The kernels that torch itself has for what is overridden, to be taken before it is."""
    try:
        return {name: torch.library.get_kernel(name, _KEY) for name in OPERATORS}
    except RuntimeError as error:
        raise ProblemError(
            f"torch {torch.__version__} without fused attention on {_KEY}",
            rule="must be a build of torch for CUDA",
            fix="install one, or call warploom.sdpa, which runs anywhere",
        ) from error
