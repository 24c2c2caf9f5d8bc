"""The problems of both passes of attention, their operands, and what pages say of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.families import Asked, Case, CellJson, Family, Problem
from benchmarks.peers._attention_drawn import attentions
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._options_problem import KINDS, WITHOUT
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.runtime.alone import alone
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.problem import Arguments, extents

LISTED = cells()["attention"]


# ---- Cells ---------------------------------------------------------------------------------------


def _words(dim: int, causal: bool, seq: int) -> str:
    return f"d{dim} {'causal' if causal else 'full'} {seq}"


def squares() -> list[Attention]:
    """As many heads of k and v as of q, and as many tokens at every length."""
    tokens, hidden = LISTED["tokens"], LISTED["hidden"]
    return [
        Attention(_words(dim, causal, seq), tokens // seq, *(hidden // dim,) * 2, seq, dim, causal)
        for dim in LISTED["dim"]
        for causal in LISTED["causal"]
        for seq in LISTED["seq"]
    ]


def grouped() -> list[Attention]:
    """Several heads of q for each of k and v."""
    return [
        Attention(
            f"{_words(dim, causal, seq)} {heads}/{kv_heads} heads x {batch}",
            *(batch, heads, kv_heads, seq, dim, causal),
        )
        for batch, heads, kv_heads, seq, dim, causal in LISTED["grouped"]
    ]


def windows() -> list[Attention]:
    """A causal window at growing lengths, each beside the same length without one."""
    width = LISTED["window"]["width"]
    return [
        Attention(f"d128 {kind} {seq}", 1, 16, 16, seq, 128, causal=True, window=window)
        for seq in LISTED["window"]["seq"]
        for kind, window in ((f"window {width}", width - 1), ("causal", None))
    ]


def packed() -> list[Attention]:
    """Sequences whose lengths follow Zipf's law, with grouped queries."""
    given = LISTED["packed"]
    heads, kv_heads, dim = (given[name] for name in ("heads", "kv_heads", "dim"))
    lengths = zipf(given["tokens"], random.Random(0))  # noqa: S311 (lengths, no secret)
    name = f"d{dim} causal packed, {len(lengths)} sequences, {heads}/{kv_heads} heads"
    sizes = len(lengths), heads, kv_heads, max(lengths), dim
    return [Attention(name, *sizes, causal=True, lengths=tuple(lengths))]


def zipf(total: int, source: random.Random) -> list[int]:
    """Draw lengths with probability 1 / length ** exponent until they add up to total."""
    given = LISTED["packed"]
    choices = range(given["shortest"], given["longest"] + 1)
    weights = [length ** -given["exponent"] for length in choices]
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, source.choices(choices, weights)[0]))
    return lengths


def two_dims() -> list[Attention]:
    """v of another head dimension: as many tokens of few heads, and one sequence of many."""
    listed, tokens = LISTED["two_dims"], LISTED["tokens"]
    return [
        Attention(
            f"d{dim}x{dim_v} {'causal' if causal else 'full'} {seq} {heads} heads",
            max(1, tokens * listed["heads"][0] // (seq * heads)),
            *(heads, heads, seq, dim, causal),
            dim_v=dim_v,
        )
        for dim, dim_v in listed["dims"]
        for heads in listed["heads"]
        for causal in LISTED["causal"]
        for seq in listed["seq"]
    ]


GROUPS: dict[str, Callable[[], Iterable[Attention]]] = {
    "square": squares,
    "grouped": grouped,
    "window": windows,
    "packed": packed,
    "two_dims": two_dims,
}
GRID = ("square", "grouped")
TITLES = {
    "square": "{kind}",
    "grouped": "{kind}",
    "window": f"{{kind}}, in a causal window of {LISTED['window']['width']}",
    "packed": "{kind}, variable-length sequences",
    "two_dims": "{kind}, v with another head dimension than q and k",
}
ABOUT = {"square": "16k tokens", "grouped": "grouped queries"}
DIMENSION = "{kind}, head dimension {dim}"  # a row of the README


# ---- Operands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operands:
    """Random q, k, v, and an output full of NaN; packed: offsets of the sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lengths: dict[str, Any]

    @property
    def turned(self) -> list[torch.Tensor]:
        """q, k and v as FlashAttention takes them: [batch, seq, heads, dim], packed as they are."""
        return [t if self.lengths else t.transpose(1, 2) for t in (self.q, self.k, self.v)]


def sets(problem: Attention, device: str, *, once: bool = False) -> list[Operands]:
    """As many sets of operands as outlast the GPU's L2 cache when used in turn, or one."""
    if once:
        return [operands(problem, device)]
    return rotated(lambda: operands(problem, device), problem.moved, device)


def operands(problem: Attention, device: str) -> Operands:
    """Make operands as a model has them: [batch, seq, heads, dim] in memory, seen transposed."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[problem.element]
    lengths_k = problem.lengths_k or problem.lengths

    dims = problem.dim, problem.dim_v or problem.dim  # of k, and of v

    def tensor(heads: int, seq: int, lengths: Sequence[int], dim: int) -> torch.Tensor:
        lead = (sum(lengths),) if lengths else (problem.batch, seq)
        made = torch.randn((*lead, heads, dim), device=device).to(dtype)
        return made if lengths else made.transpose(1, 2)

    q = tensor(problem.heads, problem.seq, problem.lengths, problem.dim)
    k, v = (tensor(problem.kv_heads, problem.columns, lengths_k, dim) for dim in dims)
    out = q.new_full((*q.shape[:-1], dims[1]), torch.nan) if problem.dim_v else None
    given: dict[str, Any] = {}
    if problem.lengths:
        offsets = _offsets(problem.lengths, device)
        offsets_k = _offsets(lengths_k, device) if problem.lengths_k else offsets
        given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets_k}
        given |= {"max_seqlen_q": max(problem.lengths), "max_seqlen_k": max(lengths_k)}
    return Operands(q, k, v, torch.full_like(q, torch.nan) if out is None else out, given)


def _offsets(lengths: Sequence[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


# ---- Problems that nobody tuned ------------------------------------------------------------------

DRAWN = "sampled shapes that nobody tuned"
ROUNDS, SWEPT = 15, 5  # that count: of a few contenders, and of the many of a sweep


def drawn(
    passed: str, products: int, contenders: Callable[..., Sequence[Contender]], asked: Asked
) -> Iterator[Case]:
    """The attentions of a seed, of a pass with so many products: single launches."""
    for problem in attentions(f"attention {passed}", asked.seed, asked.count):
        about = {**problem.record(passed, products), "seed": asked.seed}
        yield Case(
            f"{problem.name} {passed}",
            about,
            Floor.of(about["flops"], problem.moved * products // 2),
            partial(contenders, problem, drawn=True),
            alone,
            rounds=1 + (SWEPT if asked.specs else ROUNDS),
            discarded=1,
            gradients=passed == "backward",
            again=not asked.specs,
        )


# ---- What is checked -----------------------------------------------------------------------------


def sequence(problem: Attention, tensor: torch.Tensor, *, keys: bool = False) -> torch.Tensor:
    """The last sequence of a tensor of q's rows, or of k's, as [1, heads, seq, dim].

    Of packed ones it is the longest.
    """
    if not problem.lengths:
        return tensor[-1:]
    at = problem.lengths.index(max(problem.lengths))
    lengths = (problem.lengths_k or problem.lengths) if keys else problem.lengths
    first = sum(lengths[:at])
    return tensor[first : first + lengths[at]].transpose(0, 1)[None]


def masked(
    problem: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[Arguments, Band]:
    """A call on the last rows of a sequence and all of its columns, and its mask."""
    call = Arguments(q, k, v, causal="bottom_right" if problem.causal else False)
    if problem.band is not None:
        call.window = problem.band
    return call, band(call, extents(call))


# ---- What pages say ------------------------------------------------------------------------------

ABSENCES = {
    "one causal mask and one length only": "torch has no windows and no variable-length sequences",
    "No available kernel": "torch has no kernel of it for this case",
    "does not support alibi": "torch has it without ALiBi",
    "no gradients of FlashAttention-2's ALiBi": "torch has no gradients of its ALiBi",
}


@dataclass(frozen=True, kw_only=True)
class Pass(Family):
    """What both passes have in common."""

    grid: tuple[str, ...] = GRID
    axis: tuple[str, str] = ("length", "length of a sequence")
    divided: str = "cases of"
    drawn: str = f", {LISTED['tokens'] // 1024}k tokens, hidden size {LISTED['hidden']}"

    def at(self, problem: Problem) -> int:
        """The length of a sequence."""
        return int(problem["seq"])

    def subject(self, problem: Problem) -> str:
        """The head dimension, the mask and what is unusual."""
        dim = f"head dimension {_dims(problem)}"
        if problem["lengths"]:
            return f"{dim}, {len(problem['lengths'])} sequences of different lengths"
        mask = "causal" if problem["causal"] else "no mask"
        if problem["window"] is not None:
            mask = f"window of {problem['window'] + 1}"
        heads, kv_heads = problem["heads"], problem["kv_heads"]
        groups = f", {heads} query heads on {kv_heads}" if heads != kv_heads else ""
        option = KINDS.get(problem.get("option", ""))
        if option and option.listed == "blocks":
            return f"{dim}, {option.words}{groups}"
        return f"{dim}, {mask}{groups}" + (f", {option.words}" if option else "")

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By option, heads, mask and length."""
        option = [*KINDS].index(problem["option"]) if problem.get("option") else 0
        windowed = problem["window"] is not None
        shared = problem["heads"] != problem["kv_heads"]
        mask = windowed, problem["causal"]
        dims = problem.get("dim_v", 0), problem["dim"]
        return option, shared, *dims, *mask, problem["seq"], problem["batch"]

    def flops(self, problem: Problem) -> float | None:
        """What the cell says."""
        return float(problem["flops"])

    def division(self, problem: Problem) -> str:
        """The option, or the head dimension and what is unusual."""
        if problem.get("option"):
            return KINDS[problem["option"]].division
        if problem["lengths"]:
            return "variable-length sequences"
        shared = ", grouped queries" if problem["heads"] != problem["kv_heads"] else ""
        window = "" if problem["window"] is None else ", window"
        return f"head dimension {_dims(problem)}{window}{shared}"

    def further(self, cell: CellJson) -> Mapping[str, str]:
        """Of a cell with an option: TFLOP/s as a share of what it is without."""
        found = {one["contender"]: one["seconds"] for one in cell["entries"]}
        work, ours, without = cell["problem"], cell["entries"][0]["seconds"], found.get(WITHOUT)
        if not (ours and without):
            return {}
        share = work["flops"] * without / (ours * work["flops_without"])
        return {"of the rate without": f"{share:.2f}"}

    def panel(self, problem: Problem) -> tuple[str, str] | None:
        """By mask and head dimension: one length, as many heads of k and v as of q, no window.

        Cells of options have none.
        """
        alone = problem["heads"] == problem["kv_heads"] and not problem["lengths"]
        if not alone or problem["window"] is not None or problem.get("option"):
            return None
        if problem.get("dim_v"):
            return None
        mask = "causal" if problem["causal"] else "no mask"
        return mask, f"head dimension {problem['dim']}"


def _dims(problem: Problem) -> str:
    """The head dimension, or both where v has another."""
    dim, dim_v = problem["dim"], problem.get("dim_v")
    return f"{dim}, {dim_v} of v" if dim_v else str(dim)
