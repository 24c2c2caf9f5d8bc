"""What FlashInfer's `plan` is told, as `warploom.attention_decode` takes it.

Pages of sequences come as one list and where each begins in it; kernels take a table with a row for
each. It is made on the GPU, out of lists that may be anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.arguments import require_number
from warploom.errors import ProblemError
from warploom.runtime.families.attention_decode.extents import PAGES
from warploom.runtime.tensors import shown

MOST_ENTRIES = 2**22  # of a table that is kept for CUDA graphs: 16 MiB
LAYOUTS = {"NHD": "[pages, page, kv_heads, dim]", "HND": "[pages, kv_heads, page, dim]"}
Type = str | torch.dtype
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pages:
    """The page table of a batch, int32 [batch, columns], and its lengths, int32 [batch]."""

    table: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def empty(cls, batch: int, indices: int, device: torch.device) -> Pages:
        """Where any plan of so many sequences and pages goes, up to MOST_ENTRIES."""
        columns = max(1, min(indices, MOST_ENTRIES // max(1, batch)))
        table = torch.zeros(batch, columns, dtype=torch.int32, device=device)
        return cls(table, torch.zeros(batch, dtype=torch.int32, device=device))

    def take(self, other: Pages) -> None:
        """Become another, in the same memory; ProblemError where a sequence has too many pages."""
        columns = other.table.shape[1]
        if columns > self.table.shape[1]:
            raise ProblemError(
                f"{columns} pages of one sequence",
                rule=f"must be at most {self.table.shape[1]}, the columns of the table that CUDA "
                "graphs read: indices in paged_kv_indices_buffer, and at most "
                f"{MOST_ENTRIES} / batch",
                fix="give a larger buffer, capture graphs of a smaller batch, or use larger pages",
            )
        self.table[:, :columns] = other.table
        self.lengths.copy_(other.lengths)


def pages(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    page_size: int,
    device: torch.device,
    *,
    rounded: bool,
) -> Pages:
    """Return the table and the lengths of a batch; what is on the GPU of `indptr` is waited for.

    `rounded` gives the table a power of two of columns, so that batches of about the same lengths
    run by one plan. Raises ProblemError for lists that do not go together.
    """
    starts = _listed("indptr", indptr).cpu().long()
    counts = starts.diff()
    begins = len(starts) > 0 and int(starts[0]) == 0
    if not begins or bool((counts < 0).any()) or int(starts[-1]) > len(indices):
        raise ProblemError(
            f"indptr {shown(starts.tolist())} for {len(indices)} indices",
            rule="must begin with 0, not fall, and end within the indices",
            fix="it is the cumulative sum of the pages that sequences have",
        )
    if _listed("last_page_len", last_page_len).shape != counts.shape:
        raise ProblemError(
            f"last_page_len {list(last_page_len.shape)}",
            rule=f"must be [{len(counts)}]: a number for each sequence of indptr",
            fix="indptr has one more",
        )
    columns = max(1, int(counts.max())) if len(counts) else 1
    if rounded:
        columns = 1 << (columns - 1).bit_length()
    counts = counts.to(device)
    column = torch.arange(columns, device=device)
    at = starts[:-1].to(device)[:, None] + column
    used = column < counts[:, None]
    listed = _listed("indices", indices).to(device)
    if len(listed):
        table = torch.where(used, listed[at.clamp(max=len(listed) - 1)], 0)
    else:
        table = torch.zeros_like(at)
    last = last_page_len.to(device)
    lengths = torch.where(counts > 0, (counts - 1) * page_size + last, 0)
    return Pages(table.int(), lengths.int())


def _listed(name: str, given: torch.Tensor) -> torch.Tensor:
    """A list of whole numbers; ProblemError for anything else."""
    if not isinstance(given, torch.Tensor) or given.dim() != 1 or given.dtype.is_floating_point:
        raise ProblemError(
            f"{name} {shown(given)}", rule="must be an int32 tensor of one dimension", fix=""
        )
    return given


def fixed(buffers: dict[str, torch.Tensor | None], device: torch.device) -> Pages:
    """Where plans go that keep their place; ProblemError for buffers that tell no sizes."""
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor) or buffer.dim() != 1:
            raise ProblemError(
                f"{name} {shown(buffer)} with use_cuda_graph",
                rule="must be a tensor of one dimension: its size bounds the plans to come",
                fix="torch.empty(size, dtype=torch.int32, device=...)",
            )
    indptr, indices, last = (len(buffer) for buffer in buffers.values() if buffer is not None)
    if indptr != last + 1:
        raise ProblemError(
            f"paged_kv_indptr_buffer [{indptr}] with paged_kv_last_page_len_buffer [{last}]",
            rule="must be one longer: it has the first page of each sequence, and the end of the "
            "last",
            fix="paged_kv_last_page_len_buffer has the batch's size",
        )
    return Pages.empty(last, indices, device)


# ---- What is computed ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """The extents, types and numbers of the attention that a plan is made for.

    rows          query rows of each sequence
    window        how many keys before its own a row attends to; None: all
    element, kv   types of q, and of keys and values
    invariant     whether a sequence's bits may depend on its neighbours
    """

    heads: int
    kv_heads: int
    dim: int
    page: int
    rows: int
    window: int | None
    logits_soft_cap: float | None
    scale: float
    element: torch.dtype
    kv: torch.dtype
    invariant: bool

    def check(self) -> None:
        """Raise ProblemError for what can be seen to have no kernel before there are tensors."""
        if self.page not in PAGES:
            raise ProblemError(
                f"page_size {shown(self.page)}",
                rule=f"must be one of {', '.join(map(str, PAGES))}",
                fix="allocate the cache in such pages",
            )
        if self.element not in (torch.float16, torch.bfloat16):
            raise ProblemError(
                f"q_data_type {self.element}",
                rule="must be torch.float16 or torch.bfloat16",
                fix="caches of 8 bits are read by queries of 16",
            )

    def check_run(
        self, q: torch.Tensor, sequences: int, window_left: int | None, rows: int | None
    ) -> None:
        """Raise ProblemError where `run` is given something else than was planned."""
        wanted = (sequences * self.rows, self.heads, self.dim)
        if not isinstance(q, torch.Tensor):
            raise ProblemError(f"q {shown(q)}", rule="must be a torch tensor", fix="")
        if q.shape != wanted or q.dtype != self.element:
            raise ProblemError(
                f"q {list(q.shape)} of {q.dtype}",
                rule=f"must be as planned: {list(wanted)} of {self.element}",
                fix="plan again for these sizes",
            )
        window = -1 if self.window is None else self.window
        if window_left is not None or rows is not None:
            asked = window if window_left is None else window_left
            asked_rows = self.rows if rows is None else rows
            require_integers(window_left=asked, q_len_per_req=asked_rows)
            if (asked, asked_rows) == (window, self.rows):
                return
            raise ProblemError(
                f"window_left {shown(window_left)}, q_len_per_req {shown(rows)}",
                rule=f"must be as planned, {window} and {self.rows}, or left out",
                fix="plan again",
            )


def type_of(name: str, given: Type) -> torch.dtype:
    """The type that a name of FlashInfer's stands for."""
    found = getattr(torch, given, None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ProblemError(
            f"{name} {shown(given)}", rule="must be a type of torch's, or its name", fix=""
        )
    return found


def refuse(**given: object) -> None:
    """Raise ProblemError for the first argument that asks for what is not computed."""
    for name, value in given.items():
        raise ProblemError(
            f"{name} {shown(value)}",
            rule="must be left out: attention here does not compute it",
            fix="rotate q and k before they are cached; FlashInfer itself computes the others",
        )


def require_integers(least: int | None = None, **given: object) -> None:
    """Raise ProblemError for the first argument that is no int, or less than the least."""
    for name, value in given.items():
        integer = isinstance(value, int) and not isinstance(value, bool)
        if not integer or (least is not None and value < least):  # type: ignore[operator]
            rule = "must be an int" if least is None else f"must be an int of at least {least}"
            raise ProblemError(f"{name} {shown(value)}", rule=rule, fix="use int(...)")


def number(name: str, given: float | None) -> float:
    """1 for None; ProblemError for a tensor, which a call would wait for."""
    if given is None:
        return 1.0
    fix = "warploom.attention_decode takes tensors of scales: scale_k and scale_v"
    require_number(name, given, fix=fix)
    return float(given)


# ---- What is given to `run` ----------------------------------------------------------------------


def caches(given: torch.Tensor | Pair, layout: str, planned: Planned) -> Pair:
    """k and v as [pages, kv_heads, page, dim], views; ProblemError for other caches."""
    both = given.unbind(1) if isinstance(given, torch.Tensor) and given.dim() == 5 else given
    sizes = {"NHD": (planned.page, planned.kv_heads), "HND": (planned.kv_heads, planned.page)}
    wanted = (*sizes[layout], planned.dim)
    if not isinstance(both, tuple | list) or len(both) != 2:
        raise _unfit(shown(given), wanted, layout, planned)
    for one in both:
        if one.dim() != 4 or tuple(one.shape[1:]) != wanted or one.dtype != planned.kv:
            raise _unfit(f"{list(one.shape)} of {one.dtype}", wanted, layout, planned)
    k, v = both
    return (k.transpose(1, 2), v.transpose(1, 2)) if layout == "NHD" else (k, v)


def _unfit(given: str, wanted: tuple[int, ...], layout: str, planned: Planned) -> ProblemError:
    return ProblemError(
        f"paged_kv_cache {given}",
        rule=f"must be k and v {LAYOUTS[layout]}, as planned pages of {list(wanted)} "
        f"of {planned.kv}, or one tensor [pages, 2, ..] of both",
        fix="plan again, or make the wrapper with the other kv_layout",
    )
