"""What templates of attention are rendered with of modifiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from warploom.generator.families._attention.modifiers import Modifier
from warploom.generator.wgmma import TemplateText


def context(modifiers: Sequence[Modifier]) -> dict[str, Any]:
    """What kernels of modifiers are rendered with.

    parts         the files of their C++: a template includes what it has for a place, see `render`
    formula       what scores are
    column        whether rows have a sum without a key
    notes         words for the first lines of a kernel of decoding
    capped        the file of what bends scores; empty where nothing does
    extra_score   C++ of the score that rows have without a key, from the parameters and a head
    added         C++ of a score with what is added to it
    added_again   the same where sums are computed again
    """

    def extra_score(p: str, head: str) -> TemplateText:
        (column,) = (modifier for modifier in modifiers if modifier.column)
        return TemplateText(column.extra_score(p, head))

    adding = [modifier for modifier in modifiers if modifier.adds]

    def added(score: str) -> TemplateText:
        return TemplateText(reduce(lambda text, modifier: modifier.added(text), adding, score))

    def added_again(score: str) -> TemplateText:
        return TemplateText(
            reduce(lambda text, modifier: modifier.added_again(text), adding, score)
        )

    formula = reduce(lambda text, modifier: modifier.formula(text), modifiers, "scale q k^T")
    return {
        "parts": [_file(modifier) for modifier in modifiers],
        "formula": TemplateText(formula),
        "column": any(modifier.column for modifier in modifiers),
        "notes": [modifier.note for modifier in modifiers if modifier.note],
        "capped": "".join(_file(modifier) for modifier in modifiers if modifier.caps),
        "extra_score": extra_score,
        "added": added,
        "added_again": added_again,
    }


def _file(modifier: Modifier) -> str:
    return f"_attention/modifiers/{modifier.name}.cuh"
