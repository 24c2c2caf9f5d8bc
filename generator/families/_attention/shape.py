"""The shapes of both passes: as they are kept, written on a command line, and listed as cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

from warploom.errors import ProblemError, SpecificationError
from warploom.generator import configurations, names
from warploom.generator.families._attention.operation import Operation
from warploom.generator.shapes import Shape, extents_of, named_of

TOKENS, HIDDEN = 16_384, 2048  # of cells: batch = tokens / seq, heads = hidden / dim


@dataclass(frozen=True, slots=True, order=True)
class AttentionShape(Shape):
    """q [batch, heads, seq_q, dim] over k and v [batch, kv_heads, seq_k, dim].

    batch     of packed sequences: how many there are; seq_q and seq_k are then the longest
    window    columns that a row attends to at most; 0: as many as the mask leaves
    total_q   rows of all packed sequences together; 0 where lengths are fixed
    total_k   columns, likewise
    """

    optional: ClassVar[frozenset[str]] = frozenset({"window", "total_q", "total_k"})

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    window: int = 0
    total_q: int = 0
    total_k: int = 0

    @property
    def sharing(self) -> int:
        """Query heads of one kv head."""
        return self.heads // max(1, self.kv_heads)

    @property
    def packed_rows(self) -> tuple[float, float]:
        """Of packed sequences, those that a tile of q is of, and one of k: its sequence's rows."""
        of_k = _seen(self.batch, (self.seq_q, self.total_q), (self.seq_k, self.total_k))
        return _seen(self.batch, *[(self.seq_q, self.total_q)] * 2), of_k

    @property
    def packed_columns(self) -> tuple[float, float]:
        """Of packed sequences, those that a tile of q is of, and one of k: its columns."""
        of_q = _seen(self.batch, (self.seq_k, self.total_k), (self.seq_q, self.total_q))
        return of_q, _seen(self.batch, *[(self.seq_k, self.total_k)] * 2)

    @property
    def compared(self) -> tuple[int, ...]:
        """How many query heads share a kv head is compared, too: schedules depend on it."""
        return (*astuple(self), self.sharing)


def _seen(batch: int, lengths: tuple[int, int], by: tuple[int, int]) -> float:
    """The mean length, at least 1, that an element of `by` sees; each has the longest, and all.

    Most elements are of long sequences. The longest belong together, the rest is as long as it
    must be on average: lengths are on the device, and nobody reads them.
    """
    (longest, total), (by_longest, by_total) = lengths, by
    longest, by_longest = min(longest, total), min(by_longest, by_total)
    rest = (total - longest) * (by_total - by_longest) / max(1, batch - 1)
    return max(1.0, (longest * by_longest + rest) / max(1, by_total))


def parse_shape(operation: Operation, text: str) -> AttentionShape:
    """The shape that `4x32x8x2048` is, or with two lengths `4x32x8x1x2048`.

    Windows and packed lengths end in `:window=128` and `:total=4096`.
    """
    lead = ["batch", "heads", "kv_heads"]
    extents, *more = text.split(":")
    found = extents_of(extents, [[*lead, "seq"], [*lead, "seq_q", "seq_k"]], "attention")
    seq = found.pop("seq", 0)
    found = {"seq_q": seq, "seq_k": seq, **found, "dim": operation.dim}
    packed = operation.lengths == "packed"
    wanted = (["window"] if operation.mask == "window" else []) + (["total"] if packed else [])
    others = "it is of masks that are windows, or packed lengths"
    given = named_of(text, more, wanted, names.full(operation), others)
    totals = {"total_q": given["total"], "total_k": given["total"]} if packed else {}
    shape = AttentionShape(**found, **totals, window=given.get("window", 0))
    refuse_shape(operation, shape)
    return shape


def refuse_shape(operation: Operation, shape: AttentionShape) -> None:
    """Raise ProblemError for a shape that no call of the operation has."""

    def refuse(what: str, rule: str, fix: str) -> None:
        raise ProblemError(f"shape {str(shape)!r}{what}", rule=rule, fix=fix)

    if shape.heads % shape.kv_heads:
        refuse("", "heads must be a multiple of kv_heads", "change one of them")
    if shape.dim != operation.dim:
        refuse(f": dim {shape.dim}", f"must be the operation's, {operation.dim}", "change one")
    windowed, packed = operation.mask == "window", operation.lengths == "packed"
    if bool(shape.window) != windowed:
        rule = "must be greater than 0" if windowed else "must be left out"
        mask = f"the operation's mask is {operation.mask}"
        refuse(f": window {shape.window}", rule, f"{mask}: change it, or the window")
    totals = (shape.total_q, shape.total_k)
    if (packed and 0 in totals) or (not packed and any(totals)):
        rule = "total_q and total_k must be given" if packed else "must have no totals"
        refuse("", rule, f"the operation's lengths are {operation.lengths}: change them, or these")
    for total, longest in zip(totals, (shape.seq_q, shape.seq_k), strict=True):
        if packed and not max(longest, shape.batch) <= total <= shape.batch * longest:
            refuse(
                "",
                "the total must be between the longest sequence and the batch times it",
                "change total, batch or length",
            )


def cells(operation: Operation, model: str | None, rows: Sequence[int]) -> list[AttentionShape]:
    """The cells of an operation's dimension and mask, at these lengths or at all."""
    if model is not None:
        raise SpecificationError(
            f"--model {model} for attention",
            rule="a model names weights, of which attention has none",
            fix="give --cells or --shapes",
        )
    packed = operation.lengths == "packed"
    if (packed and not operation.eight) or operation.mask == "window" or operation.caps:
        return []
    listed = configurations.cells()["attention"]
    if operation.family.removeprefix("attention_") not in listed["passes"]:
        return []
    causal, dim = operation.mask == "causal", operation.dim
    if packed:
        return [_packed_cell(listed["packed"], dim)]
    if operation.dim_v:
        listed = listed["two_dims"]
        heads, lengths = listed["heads"][0], rows or listed["seq"]
        if [dim, operation.dim_v] not in listed["dims"]:
            return []
        return [
            AttentionShape(max(1, TOKENS // seq), heads, heads, seq, seq, dim) for seq in lengths
        ]
    if operation.eight:
        listed = {**listed, **listed["eight_bits"], "dim": listed["eight_bits"]["tuned_dim"]}
    found = []
    if dim in listed["dim"] and causal in listed["causal"]:
        for seq in rows or listed["seq"]:
            heads = HIDDEN // dim
            found.append(AttentionShape(max(1, TOKENS // seq), heads, heads, seq, seq, dim))
    found += [
        AttentionShape(batch, heads, kv_heads, seq, seq, dim)
        for batch, heads, kv_heads, seq, of_dim, of_causal in listed["grouped"]
        if (of_dim, of_causal) == (dim, causal) and (not rows or seq in rows)
    ]
    return found


def _packed_cell(listed: Mapping[str, Any], dim: int) -> AttentionShape:
    """As many tokens as the cell of packed sequences, which are half as long as its longest."""
    longest, total = listed["longest"], listed["tokens"]
    heads, kv_heads, batch = listed["heads"], listed["kv_heads"], 2 * total // longest
    sizes = batch, heads, kv_heads, longest, longest, dim
    return AttentionShape(*sizes, total_q=total, total_k=total)


def extents_of_cell(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    """The extents of a measured cell; None where it does not say enough."""
    if "seq" not in problem:
        return None
    extents = {name: problem[name] for name in ("batch", "heads", "kv_heads", "dim")}
    seq, window = problem["seq"], problem.get("window")
    extents |= {"seq_q": seq, "seq_k": problem.get("seq_k") or seq, "window": 0}
    if window is not None:
        extents["window"] = 1 + (window if problem["causal"] else 2 * window)
    if lengths := problem.get("lengths"):
        columns = problem.get("lengths_k") or lengths
        extents |= {"total_q": sum(lengths), "total_k": sum(columns)}
    return extents


def rows_of(shape: AttentionShape) -> tuple[int, int]:
    """Rows of q, and of k and v, of all sequences."""
    rows, columns = shape.batch * shape.seq_q, shape.batch * shape.seq_k
    return shape.total_q or rows, shape.total_k or columns


def scores(operation: Operation, shape: AttentionShape) -> float:
    """The scores of all heads that the mask leaves: half of a causal square, as it is counted."""
    rows, _ = rows_of(shape)
    columns = shape.packed_columns[0] if shape.total_q else float(shape.seq_k)
    hidden = 0.0
    if operation.mask != "none":
        own = shape.packed_rows[0] if shape.total_q else float(shape.seq_q)
        hidden = min(own, columns) / 2
    seen = columns - hidden
    if operation.mask == "window" and shape.window:
        seen = min(seen, float(shape.window))
    return rows * shape.heads * seen
