"""What templates of attention are rendered with of modifiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
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
    adds          whether anything is
    added_again   the same where sums are computed again
    """

    adding = [modifier for modifier in modifiers if modifier.adds]
    columns = [modifier for modifier in modifiers if modifier.column]

    def folded(method: str, among: Sequence[Modifier], score: str) -> TemplateText:
        return TemplateText(reduce(lambda text, one: getattr(one, method)(text), among, score))

    return {
        "parts": [_file(modifier) for modifier in modifiers],
        "formula": folded("formula", modifiers, "scale q k^T"),
        "column": bool(columns),
        "notes": [modifier.note for modifier in modifiers if modifier.note],
        "capped": "".join(_file(modifier) for modifier in modifiers if modifier.caps),
        "extra_score": lambda p, head: TemplateText(columns[0].extra_score(p, head)),
        "added": partial(folded, "added", adding),
        "adds": bool(adding),
        "added_again": partial(folded, "added_again", adding),
    }


def _file(modifier: Modifier) -> str:
    return f"_attention/modifiers/{modifier.name}.cuh.jinja"
