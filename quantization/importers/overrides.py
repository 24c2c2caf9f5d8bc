"""What a checkpoint's configuration says of one layer: overrides, and layers left as they were.

Source: GPTQModel 7.7, quantization/config.py (dynamic); auto-round 0.16, inference/utils.py
(extra_config); transformers 5.23, quantizers/quantizers_utils.py (modules_to_not_convert).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from warploom.errors import ProblemError
from warploom.printable import brief
from warploom.quantization.importers.auto_round import METHODS
from warploom.quantization.importers.layer import Config, mapping, refused, strings, whole
from warploom.quantization.importers.patterns import first_match

UNQUANTIZED = ("modules_to_not_convert", "ignored_layers")
_SPECIAL = frozenset("*^$|()[]{}?+\\")  # what a name does not have


def of_layer(source: str, config: Config, name: str) -> Config:
    """Return `config` with what it overrides for the layer called `name`.

    Raises:
        ProblemError: the layer is not quantized, or has no name that overrides could go by.
    """
    for field in UNQUANTIZED:
        listed = strings(source, config, field)
        if name and not _parts(name).isdisjoint(listed):
            raise _unquantized(source, name, field)
        patterns = _after_re(tuple(listed))
        if first_match(source, patterns, name) is not None:
            raise _unquantized(source, name, field)
    if source not in OVERRIDES:
        return config
    field, override = OVERRIDES[source]
    if not (known := mapping(source, config, field)):
        return config
    if not name:
        raise refused(
            source,
            f"{field} without the layer's name",
            rule="must be passed with the name, by which the settings differ between layers",
            fix="pass name='model.layers.0.mlp.up_proj', for example",
        )
    more = dict(override(source, known, name))
    if "format" in more:
        more.setdefault("checkpoint_format", more["format"])
    return {**config, **more}


def _dynamic(source: str, dynamic: Config, name: str) -> Config:
    """GPTQModel's: the first pattern that the name begins with; "-:" ones, not quantized, first."""
    skipped, changed = _signed(tuple(dynamic))
    if first_match(source, skipped, name) is not None:
        raise _unquantized(source, name, "dynamic")
    found = first_match(source, changed, name)
    return {} if found is None else _fields(source, dynamic[changed[found]], "dynamic")


def _extra(source: str, extra: Config, name: str) -> Config:
    """auto-round's: the layer's own name, else the first pattern that is found in it."""
    if (key := name) not in extra:
        filled = (one for one in _expressions(tuple(extra)) if extra[one] != {})
        if (found := first_match(source, filled, name, "search")) is None:
            return {}
        key = found
    given = _fields(source, extra[key], "extra_config")
    found_fields = {field: value for field, value in given.items() if value is not None}
    if whole(source, found_fields, "bits", 4) > 8:
        raise _unquantized(source, name, "extra_config")
    return found_fields


def _fields(source: str, value: object, field: str) -> Config:
    if not isinstance(value, Mapping):
        raise refused(source, f"{field} has {brief(value)}", rule="must be a mapping of fields")
    return value


def _unquantized(source: str, name: str, field: str) -> ProblemError:
    return refused(
        source,
        f"{brief(name)} is not quantized",
        rule=f"{field} leaves it out",
        fix="read its weight as it is",
    )


def _parts(name: str) -> set[str]:
    """All runs of a path's parts: a list of "visual" leaves visual.blocks.0.qkv out."""
    parts = name.split(".")
    ends = range(1, len(parts) + 1)
    return {".".join(parts[first:end]) for end in ends for first in range(end)}


OVERRIDES: Mapping[str, tuple[str, Callable[[str, Config, str], Config]]] = {
    "gptq": ("dynamic", _dynamic),
    "awq": ("dynamic", _dynamic),
    **dict.fromkeys(METHODS, ("extra_config", _extra)),
}


# A checkpoint asks for each of its layers, so what is in a configuration is sorted out once.


@lru_cache(maxsize=16)
def _after_re(listed: tuple[str, ...]) -> list[str]:
    return [one.removeprefix("re:") for one in listed if one.startswith("re:")]


@lru_cache(maxsize=16)
def _signed(keys: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Patterns that leave layers out, and those that change them, with their keys."""
    skipped = [key.removeprefix("-:") for key in keys if key.startswith("-:")]
    changed: dict[str, str] = {}
    for key in keys:
        if not key.startswith("-:"):
            changed.setdefault(key.removeprefix("+:"), key)
    return skipped, changed


@lru_cache(maxsize=16)
def _expressions(keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if not _SPECIAL.isdisjoint(key)]
