"""How exact attention in 8 bits is: relative errors of Warploom and of other libraries.

`python -m benchmarks.attention_errors` quantizes operands of bf16 as each contender takes them and
prints two errors of each result, against float64: of the operands in bf16, and of the quantized
ones. The second one is what a kernel adds. A library that is not installed is absent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import click
import torch

import warploom
from benchmarks import machine
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._attention_quantized import SCALES, Quantized, by_cast
from benchmarks.peers._libraries import EIGHT_BITS
from benchmarks.peers.libraries import refusing
from warploom.atomic_file import replace_file
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families.attention_forward.eight_bit_call import EightBitCall, Sums
from warploom.runtime.families.attention_forward.trial import Operands

HEADS, ROWS = 16, 2048  # enough tiles for every SM, so that no library divides the keys
CHECKED_ROWS = 256  # of each head, held against float64
BARS = (  # a contender, a case, and the most of FlashAttention-3's error that it may have
    ("e4m3, promoted", "mean-shifted", 1 / 20),
    ("e4m3, promoted", "sharp", 1.0),
    ("int8, smoothed", "mean-shifted", 1 / 20),
    ("int8, smoothed", "sharp", 1 / 2),
)
NEEDLE = 0.01  # the most error of a kernel where one key of all has half of the weight
FLASH3 = EIGHT_BITS["fa3_8bit"][0]


@dataclass(frozen=True, slots=True)
class Case:
    """Normal operands: what q is multiplied by, the mean of v, and whether k has outliers.

    Outliers are a tenth of the columns of k, each with a bias of deviation 4. A needle is one key
    that has about half of the weight of every row.
    """

    name: str
    keys: int = 131072
    spread: float = 1.0
    mean: float = 0.0
    outliers: bool = False
    needle: bool = False


CASES = (
    Case("centred"),
    Case("mean-shifted", mean=1.0),
    Case("sharp", spread=4.0, mean=0.3, outliers=True),
    Case("needle", mean=1.0, needle=True),
)


def operands(case: Case, dim: int, heads: int, rows: int, device: str) -> Operands:
    """q, k and v of bf16 [1, heads, rows or keys, dim], as a model has them in memory."""
    random = torch.Generator(device).manual_seed(41)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random, device=device)

    q, k, v = normal(rows, heads, dim), normal(case.keys, heads, dim), normal(case.keys, heads, dim)
    q, v = q * case.spread, v + case.mean
    if case.outliers:
        chosen = torch.rand((heads, dim), generator=random, device=device) < 0.1
        k += 4 * normal(heads, dim) * chosen
    if case.needle:  # rows are much alike: exp(score of the needle) is the sum of all others
        direction = normal(heads, dim)
        q = direction + 0.3 * q
        sum_of_others = math.log(case.keys) + direction.square().sum(-1, keepdim=True) / (2 * dim)
        size = direction.square().sum(-1, keepdim=True)
        k[case.keys // 2 + 3] = direction * sum_of_others * dim**0.5 / size
    q, k, v = (one.bfloat16()[None].transpose(1, 2) for one in (q, k, v))
    return Operands(q, k, v, torch.full_like(q, torch.nan), {})


@dataclass
class Inputs:
    """Operands of a case, also in e4m3 with a scale of each tensor, and results in float64."""

    wide: Operands
    cast: Quantized

    @classmethod
    def of(cls, case: Case, dim: int, heads: int, rows: int, device: str) -> Inputs:
        """Draw and quantize them."""
        wide = operands(case, dim, heads, rows, device)
        sizes = Attention(case.name, 1, heads, heads, rows, dim, seq_k=case.keys)
        return cls(wide, by_cast(sizes, wide))

    @cached_property
    def exact(self) -> torch.Tensor:
        """The last rows, of the operands in bf16."""
        return self.exactly(Arguments(self.wide.q, self.wide.k, self.wide.v))

    @cached_property
    def exact_of_cast(self) -> torch.Tensor:
        """The last rows, of those in e4m3."""
        return self.exactly(self.cast.call().dequantized())

    def exactly(self, call: Arguments) -> torch.Tensor:
        """The last rows of a call on operands like these, in float64."""
        wide = Arguments(_last(self.wide.q), self.wide.k, self.wide.v)
        part = Arguments(_last(call.q), call.k, call.v)
        return reference.of_call(part, band(wide, extents(wide)), reference.exact)[0]


def _last(rows: torch.Tensor) -> torch.Tensor:
    return rows[:, :, -CHECKED_ROWS:]


# ---- Contenders: what each computes, and float64 of what it was given ----------------------------

Pair = tuple[torch.Tensor, torch.Tensor]


def _of_cast(inputs: Inputs, *, sums: Sums | None = None, wide_v: bool = False) -> Pair:
    """Ours, of e4m3 with the scales that FlashAttention-3 has."""
    one = inputs.cast
    scales: dict[str, Any] = {name: getattr(one, name) for name in SCALES}
    if not wide_v:
        out = warploom.attention(one.q, one.k, one.v, sums=sums, **scales)
        return out, inputs.exact_of_cast
    del scales["v_descale"]
    call = EightBitCall(one.q, one.k, inputs.wide.v, **scales)
    out = warploom.attention(one.q, one.k, inputs.wide.v, **scales)
    return out, inputs.exactly(call.dequantized())


def _smoothed(inputs: Inputs, *, scores: str) -> Pair:
    """Ours, of operands that attention_quantize makes."""
    wide = inputs.wide
    whole = warploom.attention_quantize(wide.q, wide.k, wide.v, scores=scores)
    scales: dict[str, Any] = {name: getattr(whole, name) for name in SCALES}
    scales["v_layout"] = "dim_major"
    out = warploom.attention(whole.q, whole.k, whole.v, **scales)
    call = EightBitCall(whole.q, whole.k, whole.v, **scales)
    return out, inputs.exactly(call.dequantized())


def _bf16(inputs: Inputs) -> Pair:
    return warploom.attention(inputs.wide.q, inputs.wide.k, inputs.wide.v), inputs.exact


def _library(inputs: Inputs, *, word: str) -> Pair:
    name, bind = EIGHT_BITS[word]
    bound = refusing(name, bind)(inputs.cast)
    bound.call()
    return bound.result(), inputs.exact_of_cast


CONTENDERS: dict[str, Callable[[Inputs], Pair]] = {
    "bf16": _bf16,
    "int8, smoothed": partial(_smoothed, scores="int8"),
    "e4m3, smoothed": partial(_smoothed, scores="e4m3"),
    "e4m3, promoted": partial(_of_cast, sums="promoted"),
    "e4m3, fast": partial(_of_cast, sums="fast"),
    "e4m3, v in bf16": partial(_of_cast, wide_v=True),
    **{name: partial(_library, word=word) for word, (name, _) in EIGHT_BITS.items()},
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Two relative errors of a contender in a case: norms over norms, of all checked rows."""

    case: str
    dim: int
    contender: str
    error: float | None = None  # of the operands in bf16
    of_quantized: float | None = None  # of what it was given
    absent: str = ""  # why there is none


def measured(case: Case, dim: int, heads: int, rows: int, device: str) -> Iterator[Measured]:
    """The errors of all contenders in a case."""
    inputs = Inputs.of(case, dim, heads, rows, device)
    for name, compute in CONTENDERS.items():
        try:
            out, given = compute(inputs)
        except (RuntimeError, ValueError) as error:
            yield Measured(case.name, dim, name, absent=str(error).split("\n")[0])
            continue
        found = _last(out).double()
        whole, own = (float((found - one).norm() / one.norm()) for one in (inputs.exact, given))
        yield Measured(case.name, dim, name, whole, own)


def _prepare(dim: int, device: str) -> None:
    """Compile all kernels at a time, by calls of the sizes that are measured."""
    inputs = Inputs.of(CASES[0], dim, HEADS, ROWS, device)

    def call(compute: Callable[[Inputs], Pair]) -> None:
        with suppress(RuntimeError, ValueError):  # which are told where it is measured
            compute(inputs)

    with ThreadPoolExecutor() as pool:
        list(pool.map(call, CONTENDERS.values()))


def table(found: list[Measured]) -> Iterator[str]:
    """Lines: a contender each, with both errors in every case; then the bars."""
    cases = list(dict.fromkeys(one.case for one in found))
    by_name = {(one.contender, one.case): one for one in found}
    yield "relative error against the operands in bf16, and against the quantized ones"
    yield " " * 24 + "".join(f"{case:>18s}" for case in cases)
    for name in dict.fromkeys(one.contender for one in found):
        cells = (by_name[name, case] for case in cases)
        yield f"{name:24s}" + "".join(
            f"{'absent':>18s}" if one.error is None else f"{one.error:9.4f} {one.of_quantized:8.4f}"
            for one in cells
        )
    for one in found:
        if one.absent and one.case == cases[0]:
            yield f"{one.contender} is absent: {one.absent}"
    for name, case, most in BARS:
        ours, theirs = by_name.get((name, case)), by_name.get((FLASH3, case))
        if ours and theirs and ours.error and theirs.error:
            share = ours.error / theirs.error
            verdict = "met" if share <= most else "missed"
            yield f"{name}, {case}: {share:.4f} of {FLASH3}'s error (at most {most:g}): {verdict}"
    for name in dict.fromkeys(name for name, *_ in BARS):
        needle = by_name.get((name, "needle"))
        if needle and (error := needle.of_quantized):
            verdict = "met" if error <= NEEDLE else "missed"
            yield f"{name}, needle: {error:.4f} (at most {NEEDLE}): {verdict}"


@click.command()
@click.option("--dims", default="128", help="Head dimensions, separated by commas.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Where every error goes.")
def main(dims: str, path: Path | None) -> None:
    """Measure the errors, print a table for each head dimension, and write JSON lines."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = [{"machine": machine.machine()}]
    for dim in map(int, dims.split(",")):
        _prepare(dim, device)
        found = [one for case in CASES for one in measured(case, dim, HEADS, ROWS, device)]
        click.echo(f"head dimension {dim}")
        for line in table(found):
            click.echo(line)
        about += [asdict(one) for one in found]
        if path:
            replace_file(path, "".join(json.dumps(one) + "\n" for one in about))


if __name__ == "__main__":
    with torch.no_grad():
        main()
