"""The layers of models whose products are tuned, from benchmarks/cells.yaml."""

from __future__ import annotations

from warploom.errors import UnknownNameError
from warploom.generator import configurations, models


def layers(model: str, *, biased: bool = False) -> list[tuple[int, int]]:
    """The weights [n, k] of a model's layers, however they are kept.

    `model` is of that list, or the path of a config.json, which also tells what layers are
    `biased`: only these are wanted. UnknownNameError for neither.
    """
    if models.is_path(model):
        return models.read(model).weights(biased=biased)
    listed = configurations.cells()["gemm"]
    known = listed["models"]
    if model not in known:
        raise UnknownNameError(
            f"model {model!r}",
            rule=f"benchmarks/cells.yaml has {', '.join(known)}",
            fix="name one of them, or give the path of a config.json, or --shapes",
        )
    return [tuple(listed["weights"][index]) for index in known[model]]
