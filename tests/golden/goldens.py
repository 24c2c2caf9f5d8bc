"""Which of the sample kernels are kept as text in emitted/golden, and what is kept of the others.

Most kernels of a family share most of their lines, so that few of them show almost every line that
templates can emit. These few are kept as text, where a change is read as a diff; of the others
digests.txt has the SHA-256 of their text, which tells that it changed: tools/golden_diff.py shows
how.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path

from precompiled import render

from warploom.generator import names
from warploom.generator.configurations import smoke
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec

EMITTED = Path(__file__).parents[2] / "emitted"
GOLDEN = EMITTED / "golden"
DIGESTS = EMITTED / "digests.txt"
SPECS = {spec.name: spec for path in smoke() for spec in expand_file(path).specs}

COUNT = 44  # kernels whose text is kept
SHARE = 0.78  # of all distinct lines, without their numbers, that these show at least
FEATURES_SHARE = 0.8  # of the words of all names, family by family
FEATURE = 40  # lines that a feature weighs as much as, where kernels are chosen

# Words of kernels' names, each of which at least one of the kept kernels shows.
MECHANISMS = {
    *("swap", "pingpong", "split", "splitk", "stream", "promoted", "batched", "direct", "cluster"),
    *("wgmma", "mma", "overlap", "dynamic", "rows", "deterministic"),
    *("packed", "paged", "window", "causal", "softcap", "sinks", "dropout", "bias", "blocks"),
}


@cache
def texts() -> Mapping[str, str]:
    """The text of every sample kernel, by its name."""
    return {name: render(spec) for name, spec in SPECS.items()}


def features(spec: KernelSpec) -> Set[tuple[str, str]]:
    """The family of a kernel with each word of its name, without numbers."""
    shown = f"{names.short(spec.operation)}_{names.short(spec.schedule)}"
    return {(spec.operation.family, word) for word in re.sub(r"\d+", "", shown).split("_")}


def lines(text: str) -> Set[str]:
    """The distinct lines of a text, without numbers, indentation, and its own name and digest."""
    own = ("_sm90a_", "// Digest ")
    shown = (line.strip() for line in text.splitlines() if not any(one in line for one in own))
    return {re.sub(r"\d+", "0", line) for line in shown}


def chosen() -> list[str]:
    """Return the names of COUNT kernels that show the most lines and features, greedily."""
    left = {name: lines(text) for name, text in texts().items()}
    words = {name: features(spec) for name, spec in SPECS.items()}
    kept: list[str] = []
    while len(kept) < COUNT:
        best = max(left, key=lambda name: (len(left[name]) + FEATURE * len(words[name]), name))
        kept.append(best)
        shown, features_shown = left[best], words[best]
        left = {name: those - shown for name, those in left.items() if name != best}
        words = {name: those - features_shown for name, those in words.items() if name != best}
    return kept


def share(kept: Set[str]) -> float:
    """The share of all distinct lines that some kernels show."""
    every = set[str]().union(*map(lines, texts().values()))
    return len(set[str]().union(*(lines(texts()[name]) for name in kept))) / len(every)


def digest(name: str) -> str:
    """The SHA-256 of a sample kernel's text, in hex."""
    return hashlib.sha256(texts()[name].encode()).hexdigest()


def recorded() -> dict[str, str]:
    """The digests that are kept, by the kernels' names."""
    rows = (line.split(" ") for line in DIGESTS.read_text().splitlines())
    return dict(rows)


def renew() -> None:
    """Write the text of the chosen kernels and the digests of the others."""
    kept = chosen()
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for file in GOLDEN.iterdir():
        file.unlink()
    for name in kept:
        (GOLDEN / f"{name}.cu").write_text(texts()[name])
    others = sorted(SPECS.keys() - set(kept))
    DIGESTS.write_text("".join(f"{name} {digest(name)}\n" for name in others))
