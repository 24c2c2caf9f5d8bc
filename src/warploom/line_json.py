"""JSON whose differences a person can read: each item of a list has a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

# What Python writes for floats that JSON has no word for, and other parsers do not read.
_WORDS = {"Infinity": sys.float_info.max, "-Infinity": -sys.float_info.max, "NaN": None}


def dumps(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with a line for each field, and for each item of its lists.

    Args:
        document: JSON values by their names. A field that is a list, such as the cases of a
            benchmark, has a line for each item, so that a difference shows which of them changed.

    Returns:
        The text, which ends in a line feed and is read by any parser of JSON.
    """
    fields = []
    for name, value in finite(document).items():
        text = json.dumps(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def finite(value: object, default: Callable[[Any], Any] | None = None) -> Any:  # noqa: ANN401
    """Return JSON values that any parser reads: infinity is the largest float, NaN is null.

    Args:
        value: JSON values, or what `default` makes some of.
        default: As json.dumps takes it.
    """
    return json.loads(json.dumps(value, default=default), parse_constant=_WORDS.get)
