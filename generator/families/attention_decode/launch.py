"""A decode kernel at launch: its parameter block, launches and workspaces."""

from __future__ import annotations

from functools import cached_property

from warploom.generator import launches as launch
from warploom.generator.elements import element
from warploom.generator.families.attention_decode import work
from warploom.generator.families.attention_decode.layout import DecodeLayout, decode_layout
from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeProblem
from warploom.generator.families.attention_decode.schedule import DecodeSchedule, DecodeSpec
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.parameters import (
    Field,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
    scalar,
    tensor_map,
)
from warploom.generator.shapes import refuse_beyond
from warploom.generator.tensor_maps import TensorMap

# Bytes that L2 fetches at a time: a row of a piece has no more. With 256 an H200 took 5 to 6 %
# longer for caches from 256 MB up.
PROMOTION = 128


class AtLaunch(launch.AtLaunch[DecodeOperation, DecodeSchedule, DecodeProblem]):
    """What a decode kernel's parameters are functions of."""

    @cached_property
    def layout(self) -> DecodeLayout:
        """Where everything of one block lies."""
        return decode_layout(self.operation, self.schedule)

    def tensor_map(self, tensor: str) -> TensorMap:
        """The map of k or v, in boxes of a stage's rows, or of a page's."""
        problem, kv, layout = self.problem, self.operation.kv, self.layout
        strides = problem.strides_k if tensor == "k" else problem.strides_v
        entry, head, row = (stride * kv.bytes for stride in strides)
        columns = layout.span // kv.bytes
        return TensorMap(
            tensor=tensor,
            element=kv,
            extents=(columns, problem.entry_rows, layout.pieces, problem.kv_heads, problem.entries),
            pitches=(row, layout.span, head, entry),
            box=(columns, layout.box_rows, layout.pieces, 1, 1),
            span=layout.span,
            promotion=PROMOTION,
        )


Decode = Field[AtLaunch]

_MAP = "[column of a piece, row, piece, head, entry of the cache]"
_MAPS: tuple[Decode, ...] = (
    tensor_map("k_map", _MAP, lambda at: at.tensor_map("k")),
    tensor_map("v_map", _MAP, lambda at: at.tensor_map("v")),
)
_PARTS: tuple[Decode, ...] = (
    pointer("parts", "float", "o of parts of items, unscaled: [place, row, dim]"),
    pointer("sums", "float2", "maximum and sum of their rows: [place, row]"),
    pointer("counters", "uint32_t", "parts of an item, by warps; 0 between launches"),
    int32("part_rows", "of a part", lambda at: work.part_rows(at.schedule, at.problem)),
)
_WORK: tuple[Decode, ...] = (
    int32("batch", "sequences", lambda at: at.problem.batch),
    int32("kv_heads", "of a sequence", lambda at: at.problem.kv_heads),
    int32("sharing", "heads of one kv head", lambda at: at.problem.heads // at.problem.kv_heads),
    int32(
        "row_tiles",
        "of one kv head and sequence, at most",
        lambda at: work.row_tiles(at.schedule, at.problem.rows),
    ),
    int32("seq_k", "keys of a sequence, at most", lambda at: at.problem.seq_k),
    scalar("scale", "of dot products of q and k"),
)
_PAGES: tuple[Decode, ...] = (
    pointer("page_table", "const int32_t", "pages of each sequence"),
    int64("table_stride", "from one sequence to the next", lambda at: at.problem.table_stride),
    int32("pages", "of the cache", lambda at: at.problem.entries),
)
_BOUNDS: dict[str, Decode] = {
    "left": int32("left", "a row sees no key before its own - left", lambda at: at.problem.left),
    "right": int32("right", "nor one after its own + right", lambda at: at.problem.right),
}


def _strides(tensor: str, first: str) -> list[Decode]:
    said = zip((first, "head", "row"), range(3), strict=True)
    return [_stride(tensor, name, at) for name, at in said]


def _stride(tensor: str, name: str, index: int) -> Decode:
    def value(at: AtLaunch) -> int:
        found: tuple[int, ...] = getattr(at.problem, f"strides_{tensor}")
        return found[index]

    return int64(f"{tensor}_{name}_stride", "elements", value)


def _queries(operation: DecodeOperation) -> list[Decode]:
    cpp = element(operation.element).cpp
    fields: list[Decode] = [
        pointer("q", f"const {cpp}", "rows of every head"),
        pointer("o", cpp, "as q, but for its strides"),
    ]
    if operation.queries == "packed":
        return [
            *fields,
            pointer("lse", "float", "[heads, total_q]"),
            pointer("cu_seqlens_q", "const int32_t", "first row of each sequence, and the end"),
            int32("seq_q", "rows of a sequence, at most", lambda at: at.problem.seq_q),
            int32("total_q", "rows of all of them", lambda at: at.problem.total_q),
            *_strides("q", "batch")[1:],
            *_strides("o", "batch")[1:],
        ]
    return [
        *fields,
        pointer("lse", "float", "[batch, heads, seq_q]"),
        int32("seq_q", "rows of a sequence", lambda at: at.problem.seq_q),
        *_strides("q", "batch"),
        *_strides("o", "batch"),
    ]


def _keys(operation: DecodeOperation) -> list[Decode]:
    fields: list[Decode] = list(_PAGES) if operation.page else []
    if operation.lengths:
        fields.append(pointer("lengths", "const int32_t", "keys of each sequence"))
    if operation.starts:
        fields.append(pointer("starts", "const int32_t", "first key of each that rows see"))
    if operation.keys == "packed":
        first = "first key of each sequence, and the end"
        fields.append(pointer("cu_seqlens_k", "const int32_t", first))
        fields.append(int32("total_k", "keys of all", lambda at: at.problem.entry_rows))
    if operation.scales != "none":
        fields += [pointer(f"scale_{one}", "const float", f"factors of {one}") for one in "kv"]
    if operation.scales == "head":
        scales = "1; 0: all have the first"
        fields.append(int32("scale_stride", scales, lambda at: at.problem.head_scale_stride))
    if operation.scales == "token":
        fields += [*_strides("scale_k", "entry"), *_strides("scale_v", "entry")]
    return fields


def parameters(spec: DecodeSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation = spec.operation
    alone = spec.schedule.cluster == 1
    parts = _PARTS if alone else ()
    fields = [*_MAPS, *_queries(operation), *parts, *_WORK, *_keys(operation)]
    if operation.mask != "none":
        fields.append(_BOUNDS["right"])
    if operation.mask == "window":
        fields.append(_BOUNDS["left"])
    fields += [field for modifier in operation.modifiers for field in modifier.parameters()]
    if operation.batch_invariant and alone:
        fields.append(
            int32(
                "chunks",
                "places of an item",
                lambda at: work.chunks(at.operation, at.schedule, at.problem),
            )
        )
    return block(fields)


# ---- Launches and workspaces ---------------------------------------------------------------------


def _counted(at: AtLaunch) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `refuse_beyond`."""
    problem, schedule = at.problem, at.schedule
    bounds = (problem.left if at.operation.mask == "window" else 0) + abs(problem.right)
    count, places = work.tiles(schedule, problem), work.parts(at.operation, schedule, problem)
    return {
        f"seq_k {problem.seq_k}": problem.seq_k + 2 * schedule.keys + bounds + problem.seq_q,
        f"{problem.entries} entries of {problem.entry_rows} keys": problem.entry_rows,
        f"total_q {problem.total_q}": problem.total_q,
        f"{count} tiles of {schedule.keys} keys": count + work.MOST_BLOCKS * schedule.ctas_per_sm,
        f"{places} parts": places,
    }


def launches(spec: DecodeSpec, problem: DecodeProblem, device: DeviceLimits) -> list[Launch]:
    """One launch. No extent may be 0: no tensor map describes an empty tensor.

    Tensors are named q, k, v, o, lse (fp32, contiguous) and, where the operation has them, int32
    lengths, starts, page_table, cu_seqlens_q and cu_seqlens_k, fp32 scale_k and scale_v, and those
    of its modifiers. The host scalars are `scale`, which must be positive, and those of its
    modifiers. ProblemError for what is beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    refuse_beyond(_counted(at))
    return [
        Launch(
            entry=spec.name,
            grid=work.blocks(spec.schedule, problem, device.multiprocessors),
            block=spec.schedule.threads,
            cluster=spec.schedule.cluster,
            shared_bytes=at.layout.shared_bytes,
            parameters=parameters(spec).values(at),
            early=True,
        )
    ]


def workspaces(spec: DecodeSpec, problem: DecodeProblem) -> list[Workspace]:
    """Parts of items that several blocks share, their sums, and a counter of each item.

    Blocks of a cluster need none.
    """
    operation, schedule = spec.operation, spec.schedule
    if schedule.cluster > 1:
        return []
    rows = work.parts(operation, schedule, problem) * work.part_rows(schedule, problem)
    return [
        Workspace("parts", 4 * rows * operation.dim),
        Workspace("sums", 8 * rows),
        Workspace("counters", 4 * work.items(schedule, problem) * schedule.warps, kept=True),
    ]
