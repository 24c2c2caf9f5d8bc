"""Whether two versions of Warploom launch alike: `collect` in each, then `same_kernels compare`.

Of every kernel that same_kernels has, on some problems: grids, shared memory, workspaces, where the
fields of the parameter block lie, and the value of each. Nothing is compiled.
"""

# ruff: noqa: ANN401 (functions and specs of whichever version is there are values here)

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import click
from same_kernels import defined, every, families, write

MULTIPROCESSORS = 132
PRODUCTS = ((1, 512, 64), (61, 4096, 4160), (128, 528, 1024), (3001, 2048, 16384))
MATRICES = ((1, 64), (300, 4096), (8192, 4096), (100_003, 24))
SEQUENCES = ((300, 500), (64, 64), (4096, 4096), (1, 8191))  # rows, columns


def products(spec: Any) -> Iterator[Any]:
    """Yield problems of a GEMM; every pitch is another."""
    operation = spec.operation
    steps = [step for step in operation.epilogue if step.pitched]
    pitched = [step.batch_field(i) for i, step in enumerate(operation.epilogue)]
    for m, n, k in PRODUCTS:
        pitches = (k if operation.layout_a == "row" else m, k if operation.layout_b == "col" else n)
        a, b, d = (-(-pitch // 16) * 16 + 16 * i for i, pitch in enumerate((*pitches, n), start=1))
        c = tuple(n + 16 * i for i in range(len(steps)))
        problem = defined("GemmProblem")(m, n, k, a, b, d, c)
        if operation.batched:
            lie = defined("Batches")
            problem = replace(
                problem,
                batches=6,
                batches_a=lie(6, a * max(m, k)),
                batches_b=lie(2, b * max(n, k), 3),
                batch_pitch_d=d * m + 16,
                batch_pitch_steps=tuple(16 * i for i, field in enumerate(pitched) if field),
            )
        yield problem


def packed_products(spec: Any) -> Iterator[Any]:
    """Yield problems of a product of packed weights; every pitch is another."""
    steps = [step for step in spec.operation.epilogue if step.pitched]
    for m, n, k in PRODUCTS:
        c = tuple(n + 16 * i for i in range(len(steps)))
        problem = defined("MixedGemmProblem")(m, n, k, k + 16, n + 32, c)
        if getattr(spec.operation, "groups", "none") == "rows":
            fields = [step.batch_field(i) for i, step in enumerate(spec.operation.epilogue)]
            apart = tuple(16 * i for i, field in enumerate(fields) if field)
            problem = replace(problem, batches=6, batch_pitch_steps=apart)
        yield problem


def attentions(spec: Any) -> Iterator[Any]:
    """Yield problems of an attention, or of its gradients; every tensor lies in another way."""
    operation = spec.operation
    packed, backward = operation.lengths == "packed", "backward" in operation.family
    names = ("q", "k", "v", "o", *(("do", "dq", "dk", "dv") if backward else ()))
    kind = defined("AttentionBackwardProblem" if backward else "AttentionProblem")
    bounds = {"none": {}, "causal": {"right": 5}, "window": {"left": 70, "right": -3}}
    for heads, kv_heads in ((8, 2), (3, 3)):
        for seq_q, seq_k in SEQUENCES:
            strides = {
                f"strides_{name}": (0 if packed else 1 << 20, 128 + 8 * i, 2048 + 8 * i)
                for i, name in enumerate(names)
            }
            yield kind(
                *(3, heads, kv_heads, seq_q, seq_k, operation.dim),
                **{"total_q": 2 * seq_q + 1, "total_k": 2 * seq_k + 3}
                if packed
                else {"total_q": seq_q, "total_k": seq_k},
                **strides,
                **bounds[operation.mask],
                bottom_right=packed,
            )


def gradients(spec: Any) -> Iterator[Any]:
    """Yield problems of a gradient of an activation; every pitch is another."""
    for m, n in MATRICES:
        yield defined("ActivationBackwardProblem")(m, n, n + 1, n + 2, n + 3)


def appended(spec: Any) -> Iterator[Any]:
    """Yield problems of appending; every step is another."""
    for batch, kv_heads, heads, seq in ((1, 8, 32, 1), (3, 2, 7, 300), (64, 1, 8, 5)):
        steps = {
            f"steps_{name}": (100 + i, 200 + i, 300 + i)
            for i, name in enumerate(
                ("k", "v", "k_cache", "v_cache", "q", "out", "scale_k", "scale_v")
            )
        }
        numbers = {"step_cos": 64, "step_sin": 72, "table_step": 9, "head_step": 1}
        yield defined("AttentionAppendProblem")(
            *(batch, kv_heads, heads, batch * seq, seq, seq, 70, 16, 8),
            **steps,
            **numbers,
            positions=128,
            rotary=spec.operation.dim,
        )


def decodes(spec: Any) -> Iterator[Any]:
    """Yield problems of decoding; every tensor lies in another way."""
    operation = spec.operation
    for batch, heads, kv_heads, seq_q, seq_k in ((1, 8, 8, 1, 64), (3, 32, 8, 5, 5000)):
        entries = 400 if operation.page else 1 if operation.keys == "packed" else batch
        strides = {
            f"strides_{name}": (1 << 20, 128 + 8 * i, 2048 + 8 * i)
            for i, name in enumerate(("q", "o", "k", "v", "scale_k", "scale_v"))
        }
        yield defined("DecodeProblem")(
            *(batch, heads, kv_heads, seq_q, seq_k, entries, operation.page or seq_k),
            **strides,
            total_q=batch * seq_q,
            table_stride=77,
            head_scale_stride=1,
            left=70,
            right=3,
        )


def merges(spec: Any) -> Iterator[Any]:
    """Yield problems of merging; every step is another."""
    for extents in ((1, 1, 1), (3, 7, 300), (1, 64, 4097)):
        steps = ((100 + i, 200 + i, 300 + i) for i in range(6))
        yield defined("AttentionMergeProblem")(extents, *steps)


def quantizations(spec: Any) -> Iterator[Any]:
    """Yield problems of quantizing attention; every tensor has other strides."""
    strides = [(1 << 20, 128 + 16 * i, 2048 + 16 * i) for i in range(5)]
    for sizes in ((1, 1, 1, 1, 1), (2, 8, 2, 300, 1031), (16, 16, 16, 1024, 4096)):
        yield defined("AttentionQuantizeProblem")(*sizes, *strides)


def casts(spec: Any) -> Iterator[Any]:
    """Yield problems of casts: rows and columns that no tile divides, and many of both."""
    grouped = {"groups": 9} if getattr(spec.operation, "offsets", False) else {}
    for m, n in ((1, 300), (300, 1000), (100_003, 4096)):
        down = m + 128 * len(grouped) * 9 + 16  # elements between rows of q of x.T
        yield defined("CastProblem")(m, n, n + 8, n + 16, (1, m), down, (1, n), **grouped)


def sparse_products(spec: Any) -> Iterator[Any]:
    """Yield problems of products with sparse weights: one tile, part of a wave, several waves."""
    for m, n, k in ((1, 72, 16), (61, 4096, 4160), (3001, 8200, 1024)):
        yield defined("SparseGemmProblem")(m, n, k, k + 8, n + 1)


def routings(spec: Any) -> Iterator[Any]:
    """Yield problems of routing: one token, a part of a warp, and many of the most experts."""
    for tokens, k, experts in ((1, 8, 128), (61, 3, 5), (32_768, 8, 1024)):
        yield defined("RouteProblem")(tokens, k, experts, 7, (k + 1, 1))


def combinations(spec: Any) -> Iterator[Any]:
    """Yield problems of sums of rows, and of copies of tokens: columns that no CTA divides."""
    for tokens, k, columns in ((1, 8, 2048), (61, 3, 2880), (32_768, 8, 7168)):
        rows = tokens * k
        yield defined("CombineProblem")(
            tokens, k, columns, rows, columns, columns + 8, (1, tokens), columns + 16, 8
        )


def dequantized(spec: Any) -> Iterator[Any]:
    """Yield problems of quantized weights: one slab, several, and experts with room between."""
    for experts, n, k in ((1, 64, 128), (1, 61, 4160), (33, 5760, 2880)):
        yield defined("DequantizeProblem")(experts, n, k, k + 8, n * (k + 8) + 16)


def pieces(spec: Any) -> Iterator[Any]:
    """Yield problems of a matrix that is split; every row stride is another."""
    for m, n in MATRICES:
        stride = (n if spec.operation.layout == "row" else m) + 1
        yield defined("Fp32PiecesProblem")(m, n, stride, -(-n // 64) * 64)


def shapes(spec: Any) -> Iterator[Any]:
    """Yield problems of a family that says nothing here: those whose launches depend on a shape."""
    kind = families()[spec.operation.family].shape
    for extent in (1, 300, 100_003):
        yield kind(*(extent for _ in fields(kind)))


PROBLEMS: dict[str, Callable[[Any], Iterator[Any]]] = {
    "gemm": products,
    "mixed_gemm": packed_products,
    "activation_backward": gradients,
    "attention_forward": attentions,
    "attention_backward": attentions,
    "attention_append": appended,
    "attention_decode": decodes,
    "attention_merge": merges,
    "attention_quantize": quantizations,
    "cast": casts,
    "dequantize": dequantized,
    "fp32_pieces": pieces,
    "sparse_gemm": sparse_products,
    "route": routings,
    "combine": combinations,
}


def plain(value: Any) -> Any:
    """Return a value as what JSON has; an element type by its name."""
    if value is None or isinstance(value, int | float | str):
        return value
    if type(value).__name__ == "Element":
        return value.name
    if is_dataclass(value) and not isinstance(value, type):
        found = {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
        return {"kind": type(value).__name__, **found}
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def launched(spec: Any) -> dict[str, Any]:
    """Return what the launches of a spec are, as hashes; names without the kernel's."""
    family = families()[spec.operation.family]
    block = family.parameters(spec)
    told: dict[str, Any] = {
        "block": [[f.name, f.kind.name, f.cpp, block.offsets[f.name]] for f in block.fields]
    }
    device = defined("DeviceLimits")(MULTIPROCESSORS)
    for number, problem in enumerate(PROBLEMS.get(spec.operation.family, shapes)(spec)):
        launches = family.launches(spec, problem, device)
        rooms = [asdict(room) for room in family.workspaces(spec, problem)]
        for launch in map(plain, launches):
            part = launch.pop("entry").removeprefix(spec.name)
            for name, value in launch.pop("parameters").items():
                told.setdefault(name, []).append([number, part, value])
            told.setdefault("launches", []).append([number, part, launch])
        told.setdefault("workspaces", []).append(rooms)
    return {
        what: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
        for what, value in told.items()
    }


@click.command()
@click.argument("path", metavar="OUT.json", type=click.Path(path_type=Path))
def main(path: Path) -> None:
    """Write how every kernel is launched to OUT.json."""
    kernels = {
        spec.digest: {"name": spec.name, "text": "", "entries": {"": launched(spec)}}
        for spec in every()
    }
    write(path, {"toolchain": "", "kernels": kernels})
    click.echo(f"{len(kernels)} kernels")


if __name__ == "__main__":
    main()
