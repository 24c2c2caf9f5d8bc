"""What templates of attention are rendered with of modifiers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

from warploom.generator.elements import element
from warploom.generator.families._attention.modifiers import Modifier
from warploom.generator.families._attention.operation import Operation
from warploom.generator.wgmma import TemplateText


def context(modifiers: Sequence[Modifier]) -> dict[str, Any]:
    """What kernels of modifiers are rendered with.

    parts         the files of their C++: a template includes what it has for a place, see `render`
    formula       what scores are
    column        whether rows have a sum without a key
    notes         words for the first lines of a kernel of decoding
    scaling_part  the file of the factor of scores
    capped        the file of what bends scores; empty where nothing does
    extra_score   C++ of the score that rows have without a key, from the parameters and a head
    added         C++ of a score with what is added to it
    adds          whether anything is
    added_again   the same where sums are computed again
    """

    adding = [modifier for modifier in modifiers if modifier.adds]
    columns = [modifier for modifier in modifiers if modifier.column]

    capped = "".join(_files(modifier)[0] for modifier in modifiers if modifier.caps)

    def folded(method: str, among: Sequence[Modifier], score: str) -> TemplateText:
        return TemplateText(reduce(lambda text, one: getattr(one, method)(text), among, score))

    return {
        "parts": [file for modifier in modifiers for file in _files(modifier)],
        "formula": folded("formula", modifiers, "scale q k^T"),
        "column": bool(columns),
        "notes": [modifier.note for modifier in modifiers if modifier.note],
        "scaling_part": f"{capped}#scaling" if capped else "_attention/scaling_plain.cuh.jinja",
        "capped": capped,
        "extra_score": lambda p, head: TemplateText(columns[0].extra_score(p, head)),
        "added": partial(folded, "added", adding),
        "adds": bool(adding),
        "added_again": partial(folded, "added_again", adding),
    }


def of_scores(operation: Operation, *, leans: bool) -> dict[str, Any]:
    """What templates of both passes ask of scores, and of the bounds of what a row attends to.

    `leans`: whether kernels have Score::offset(), what all scores of a row have in common.
    """
    bounded = operation.mask != "none"
    adds = any(modifier.adds for modifier in operation.modifiers)
    return {
        "scored": operation.scored,
        "staged": operation.staged,
        "hides": operation.hides,
        "reads": operation.masked or operation.bias != "none",
        "leans": leans,
        # Whether kernels have Score::add(): what a bias and others add is Score::term().
        "adds_apart": adds and operation.bias == "none" and not leans,
        # Whether varlen sequences have their number.
        "numbered": operation.scored or operation.dropout or operation.eight,
        "bias_element": element(operation.element if operation.bias == "none" else operation.bias),
        "sequence_number": "number" if operation.lengths == "packed" else "batch",
        "bounds_left": operation.mask == "window",
        "bounds_right": bounded,
        # What bounds are relative to, beside a row.
        "diagonal": " + diagonal" if bounded and operation.lengths == "packed" else "",
    }


SEPARATE_BATCHES = "_attention/separate_batches.cuh.jinja"
"""The file of kernels whose batches share no bias: both passes take them one after the other."""


def options(folder: str, applies: dict[str, bool]) -> list[str]:
    """Return the files of those options of a family that apply."""
    return [f"{folder}/{name}.cuh.jinja" for name, has in applies.items() if has]


def _files(modifier: Modifier) -> list[str]:
    return [f"_attention/modifiers/{name}.cuh.jinja" for name in (modifier.name, *modifier.parts)]
