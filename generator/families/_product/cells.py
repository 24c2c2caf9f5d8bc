"""The layers of models whose products are tuned, from benchmarks/cells.yaml."""

from __future__ import annotations

from warploom.errors import UnknownNameError
from warploom.generator import configurations


def layers(model: str) -> list[tuple[int, int]]:
    """The weights [n, k] of a model's layers, however they are kept.

    UnknownNameError for a model that the list has none of.
    """
    listed = configurations.cells()["gemm"]
    models = listed["models"]
    if model not in models:
        raise UnknownNameError(
            f"model {model!r}",
            rule=f"benchmarks/cells.yaml has {', '.join(models)}",
            fix="name one of them, or give --shapes",
        )
    return [tuple(listed["weights"][index]) for index in models[model]]
