"""The arguments of an operator, said once: a named tuple is its schema and what its code takes."""

from __future__ import annotations

from typing import get_type_hints


def arguments(fields: type[tuple[object, ...]]) -> str:
    """The arguments of a torch.library schema that are the fields of a named tuple.

    Each field is Annotated with its type in the schema.
    """
    return ", ".join(
        f"{annotation.__metadata__[0]} {name}"
        for name, annotation in get_type_hints(fields, include_extras=True).items()
    )
