"""JSON whose differences a person can read: each item of a list has a line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def dumps(document: Mapping[str, Any]) -> str:
    """Return a document as JSON with a line for each field, and for each item of its lists.

    Args:
        document: JSON values by their names. A field that is a list, such as the cases of a
            benchmark, has a line for each item, so that a difference shows which of them changed.

    Returns:
        The text, which ends in a line feed and is read by any parser of JSON.
    """
    fields = []
    for name, value in document.items():
        text = json.dumps(value)
        if isinstance(value, list | tuple) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"
