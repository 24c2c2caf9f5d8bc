"""Operators of torch that run Warploom's kernels until they are given back to torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from warploom.errors import ProblemError


class Overridden:
    """Some operators of torch, overridden until `remove()` or the end of a `with` block."""

    def __init__(
        self, what: str, implementations: Mapping[str, Callable[..., Any]], key: str
    ) -> None:
        """Override operators; where one cannot be, none is.

        Args:
            what: What they are, as "a matmul of torch", for an error.
            implementations: What runs for each operator, by names such as "aten::mm.out".
            key: The dispatch key of the tensors that they run for.

        Raises:
            ProblemError: where other code has overridden one.
        """
        self._library: Any = torch.library.Library("aten", "IMPL", key)  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():  # it is what is wanted
                warnings.filterwarnings("ignore", r"[\s\S]*Overriding a previously registered")
                for operator, run in implementations.items():
                    name = operator.removeprefix("aten::")
                    self._library.impl(name, run, key)  # type: ignore[no-untyped-call]
        except BaseException as error:
            self.remove()
            if not isinstance(error, RuntimeError):
                raise
            raise ProblemError(
                f"{what} that other Python code has overridden: {error}",
                rule="must be torch's own when Warploom is activated",
                fix="undo what the other code registered with torch.library",
            ) from error

    @property
    def active(self) -> bool:
        """Whether the operators are still overridden."""
        return self._library is not None

    def remove(self) -> None:
        """Give the operators back to torch's own kernels. A second time does nothing."""
        if self._library is not None:
            self._library._destroy()
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


def torch_kernels(what: str, operators: Iterable[str], key: str, fix: str) -> dict[str, Any]:
    """Return the kernels that torch itself has for operators, to be taken before these change.

    Args:
        what: What the operators are, as "matmuls", for an error.
        operators: Their names, such as "aten::mm.out".
        key: The dispatch key of the tensors that they run for.
        fix: What to do without them.

    Raises:
        ProblemError: for a torch that is too old, or has no such kernels.
    """
    if not hasattr(torch.library, "get_kernel"):
        raise ProblemError(
            f"torch {torch.__version__}",
            rule="must be 2.11 or later, whose kernels can be called when they are overridden",
            fix=f"upgrade torch, or {fix}",
        )
    try:
        return {name: torch.library.get_kernel(name, key) for name in operators}
    except RuntimeError as error:
        raise ProblemError(
            f"torch {torch.__version__} without {what} on {key}",
            rule="must be a build of torch for CUDA",
            fix=f"install one, or {fix}",
        ) from error


def key_set(key: str) -> torch._C.DispatchKeySet:
    """Return the dispatch key as the set that torch's kernels are called with."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
