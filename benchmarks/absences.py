"""Why a baseline is missing, in words of a fixed table: what libraries raise stays in the JSON."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.families import CellJson, family_of
from benchmarks.wording import peer, share

REASONS = {  # the first whose pattern is in what a baseline raised
    "no module named|not installed|is in no folder|cannot open shared object|libtvm_ffi_testing": (
        "not installed"
    ),
    "workspace": "its workspace was too small",
    "out ?of ?memory|out_of_memory|alloc_failed|unable to allocate": "out of memory",
    "must be (a multiple|divisible)|not divisible|needs to be greater|no available kernel"
    "|head[ _]?dim|hdim|unsupported shape": "does not support this shape",
    "scalar type|data type|dtype": "does not support this dtype",
    "not (yet )?(supported|implemented)|(does not|doesn't) support|unsupported": (
        "does not support this operation"
    ),
    "sig(segv|abrt|bus|fpe|kill)|illegal memory access": "it crashed",
    "timed? ?out": "it took too long",
}
LONGEST = 60  # characters of a sentence that the table does not know
_PLACE = re.compile(  # of a source, a file or a byte in memory; and the class of an error
    r"^[\w.]*(?:Error|Exception|Warning):?$|[/\\]\w|\b0x[0-9a-fA-F]+|\.(?:py|h|hpp|cuh?|cpp|cc|so)\b"
)
_MARKUP = re.compile(r"[<>|`*\[\]$\\]+")  # of Markdown, HTML and TeX


def absences(cells: Sequence[CellJson]) -> str:
    """Say which baselines are missing in how many cases, and why; empty where none is."""
    found: Counter[tuple[str, str]] = Counter()
    for cell in cells:
        for entry in cell["entries"][1:]:
            if raised := entry["absent"]:
                why = reason(raised, family_of(cell).absences)
                found[peer(entry["contender"], family_of(cell)), why] += 1
    alike: dict[tuple[str, int], list[str]] = {}
    for (name, why), count in found.items():
        alike.setdefault((why, count), []).append(name)
    return "; ".join(
        f"{', '.join(names)} in {share(count, len(cells))} ({why})"
        for (why, count), names in alike.items()
    )


def reason(raised: str, known: Mapping[str, str]) -> str:
    """Say in a few words why a baseline is missing.

    Args:
        raised: What it raised, or why it was not asked, as the JSON has it.
        known: What some of its own words mean, which go before REASONS.
    """
    for part, words in known.items():
        if part in raised:
            return words
    for pattern, words in REASONS.items():
        if re.search(pattern, raised, re.IGNORECASE):
            return words
    return _refusal(raised)


def _refusal(raised: str) -> str:
    """The first sentence without its places, shortened."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in raised.splitlines()]
    told = [line for line in lines if line and not line.startswith(("Traceback", 'File "'))]
    clauses = re.split(r"(?<=[:;,])\s+", told[0] if told else "")
    clauses = [one for one in clauses if not _PLACE.search(one)]
    sentence = re.split(r"(?<=[.!?])\s", " ".join(clauses))[0]
    plain = " ".join(_MARKUP.sub(" ", sentence).split()).strip(" .:;,")
    plain = "".join(one for one in plain if one.isprintable())
    if len(plain) > LONGEST:
        plain = plain[:LONGEST].rpartition(" ")[0] or plain[:LONGEST]
        plain = f"{plain.rstrip(' .:;,')}…"
    return f"refused: {plain}" if plain else "refused"
