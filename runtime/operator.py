"""Operators of torch.library: a family says what one takes and does, and it is registered here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import torch

_LIBRARY: Any = torch.library.Library("warploom", "FRAGMENT")  # type: ignore[no-untyped-call]
_NOTHING: Mapping[str, str] = {}


def register(
    name: str,
    *fields: type[tuple[object, ...]] | str,
    returns: str,
    run: Callable[..., object],
    fake: Callable[..., object],
    written: Mapping[str, str] = _NOTHING,
    refuse: Callable[..., None] | None = None,
    backward: Callable[..., object] | None = None,
    save: Callable[..., None] | None = None,
    vmap: Callable[..., object] | None = None,
) -> None:
    """Register `warploom::name`, whose arguments are the fields of named tuples, one after another.

    Each field is Annotated with its type in the schema, and what follows its name there: "=None".
    A text is a part of the schema as it stands.

    returns   the schema's types of results
    run       what it does, on a GPU and on the CPU
    fake      its results without data
    written   keywords that it writes to, with their types; those that end in `?` may be left out
    refuse    raises where autograd expects a graph; it takes what `run` takes
    backward, save   its derivative and what is kept for that, as torch.library.register_autograd
              has them
    vmap      what torch.func.vmap makes of it, as torch.library.register_vmap has it
    """
    declared = _arguments(fields)
    if written:
        keywords = (f"{kind} {key}" + "=None" * kind.endswith("?") for key, kind in written.items())
        declared = ", ".join((declared, "*", *keywords))
    _LIBRARY.define(f"{name}({declared}) -> {returns}")
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"warploom::{name}", fake, lib=_LIBRARY)
    if refuse is not None:
        _LIBRARY.impl(name, _refusing(name, refuse), "Autograd")
    if backward is not None:
        torch.library.register_autograd(
            f"warploom::{name}", backward, setup_context=save, lib=_LIBRARY
        )
    if vmap is not None:
        torch.library.register_vmap(f"warploom::{name}", vmap, lib=_LIBRARY)


def _arguments(fields: tuple[type[Any] | str, ...]) -> str:
    return ", ".join(part if isinstance(part, str) else _of_tuple(part) for part in fields)


def _of_tuple(part: type[Any]) -> str:
    return ", ".join(
        f"{annotation.__metadata__[0]} {name}" + "".join(annotation.__metadata__[1:])
        for name, annotation in get_type_hints(part, include_extras=True).items()
    )


def _refusing(name: str, refuse: Callable[..., None]) -> Callable[..., object]:
    """What runs an operator below autograd, once that was refused what it must not expect."""

    def checked(*given: Any, **written: torch.Tensor | None) -> object:
        refuse(*given, **written)
        with torch._C._AutoDispatchBelowAutograd():
            result: object = getattr(torch.ops.warploom, name)(*given, **written)
        return result

    return checked


def is_distributed(tensor: torch.Tensor) -> bool:
    """True for one of torch's distributed tensors, whose class few programs ever import."""
    return type(tensor).__name__ == "DTensor"


def no_gradient(given: object) -> object:
    """What `backward` returns for an argument without one: of lists of tensors there is a list."""
    listing = isinstance(given, list | tuple)
    if listing and all(isinstance(one, torch.Tensor) for one in given):  # type: ignore[attr-defined]
        return [None for _ in given]  # type: ignore[attr-defined]
    return None
