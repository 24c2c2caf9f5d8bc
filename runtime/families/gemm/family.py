"""The family of GEMMs, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from warploom.generator.elements import element
from warploom.generator.families.gemm import SPARSE_BLOCK, GemmOperation, GemmShape
from warploom.runtime.baselines import Baseline, Results, eager_and_compiled
from warploom.runtime.call import Call
from warploom.runtime.elements import TORCH
from warploom.runtime.explanation import Explanation
from warploom.runtime.families._product.reference import apply, rounded, write_outputs
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.fp32_pieces.reference import SPAN
from warploom.runtime.families.gemm import api, fp32, strassen
from warploom.runtime.families.gemm.api import GemmPlan
from warploom.runtime.families.gemm.block_masks import expanded
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.pieces import PiecesCall, SpannedPiecesCall, UnsplitBCall
from warploom.runtime.families.gemm.samples import (
    GemmData,
    GemmTrial,
    Operands,
    own_call,
)
from warploom.runtime.families.gemm.tf32 import Tf32Call
from warploom.runtime.family import RuntimeFamily
from warploom.runtime.plan import make

_SCALES = ({"scale", "scale_a", "scale_b"}, {"scale_row", "scale_column"})  # cuBLAS's, of 8 bits


def baselines(operation: GemmOperation, sets: Sequence[Operands]) -> list[Baseline]:
    """cuBLAS by torch, with the epilogue in eager torch and by torch.compile.

    Of 16 bits without an epilogue, cuBLASLt is another. With one, the bare matmul is shown too.
    """
    if operation.groups != "none":
        return _grouped_baselines(operation, sets)
    if operation.sparse != "none":
        return _sparse_baselines(operation, sets)
    name, bare = _product(operation, torch.ones((), device=sets[0].a.device))
    taken = _scales(operation, sets[0].listed)
    whole = partial(_with_epilogue, bare, taken)
    plain = len(sets[0].listed) == taken
    eager = f"{name} (cuBLAS)" if plain else f"{name} (cuBLAS), then its epilogue in eager torch"
    found = eager_and_compiled(whole, [(one,) for one in sets], eager)
    if element(operation.a).bits == 16:
        by_lt = [partial(_by_cublaslt, whole, one) for one in sets]
        found.append(Baseline(eager.replace("cuBLAS", "cuBLASLt"), by_lt))
    if not plain:
        alone = [partial(bare, one, one.listed[:taken]) for one in sets]
        found.append(Baseline(f"{name} (cuBLAS), without the epilogue", alone, peer=False))
    return found


def _grouped_baselines(operation: GemmOperation, sets: Sequence[Operands]) -> list[Baseline]:
    """torch's grouped GEMM, which has bf16 without an epilogue."""
    if (operation.a, operation.d) != ("bf16", "bf16"):
        return []
    by_torch = torch._grouped_mm
    alone = [partial(by_torch, one.a, one.b, offs=one.offs) for one in sets]
    return [Baseline("torch._grouped_mm", alone, peer=not operation.epilogue)]


def _sparse_baselines(operation: GemmOperation, sets: Sequence[Operands]) -> list[Baseline]:
    """The dense matmul, which computes all blocks; of a sparse A of 16 bits also torch's BSR."""
    if element(operation.a).bits != 16:
        return []
    dense = [partial(torch.matmul, one.a, one.b) for one in sets]
    found = [Baseline("torch.mm (cuBLAS) of all blocks", dense, peer=False)]
    if operation.sparse == "a" and all(extent % SPARSE_BLOCK == 0 for extent in sets[0].a.shape):
        size = (SPARSE_BLOCK, SPARSE_BLOCK)
        by_blocks = []
        for one in sets:
            assert one.mask is not None  # noqa: S101 (for type checkers)
            counting = torch.where(expanded(one.mask, *one.a.shape), one.a, 0.0)
            by_blocks.append(partial(by_bsr, counting.to_sparse_bsr(size), one))
        found.append(Baseline("torch BSR (Triton)", by_blocks))
    return found


def by_bsr(a: torch.Tensor, one: Operands) -> torch.Tensor:
    """D of a sparse A in torch's block format."""
    values: dict[str, Any] = dict(item[:2] for item in one.listed)
    x: torch.Tensor = (a @ one.b) * values["scale"]
    return x if values.get("bias") is None else x + values["bias"]


def _product(
    operation: GemmOperation, ones: torch.Tensor
) -> tuple[str, Callable[[Operands, Sequence[Item]], torch.Tensor]]:
    """torch's function for the types of a product, and a call of it; `ones` is a scale of 1."""
    fast = operation.accumulation == "fast"
    if operation.a == "int8":
        return "torch._int_mm", lambda one, _: torch._int_mm(one.a, one.b)
    if element(operation.a).bits == 16:
        name = "torch.bmm" if operation.batched else "torch.mm"
        return name, lambda one, _: torch.matmul(one.a, one.b)
    wide = TORCH[operation.d] if element(operation.d).bits > 8 else torch.bfloat16
    laid_out: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # block scales as torch reads them

    def scaled(one: Operands, scales: Sequence[Item]) -> torch.Tensor:
        given = [value for _, value, *_ in scales]
        if operation.block_scales != "none":  # a multiple of 4 rows, and of 512 of k, is taken
            if id(one) not in laid_out:
                of_a, of_b = given[0].mT.contiguous().mT, given[1].mT
                of_b = of_b if operation.block_scales == "row_block" else of_b.contiguous()
                laid_out[id(one)] = of_a, of_b
            return torch._scaled_mm(one.a, one.b, *laid_out[id(one)], out_dtype=wide)
        if any(item[0] in _SCALES[1] for item in scales):
            a, b = given[0].reshape(-1, 1), given[1].reshape(1, -1)
        else:
            a, b = (value.reshape(()) for value in (*given, *[ones] * (2 - len(given))))
        return torch._scaled_mm(
            one.a, one.b, scale_a=a, scale_b=b, out_dtype=wide, use_fast_accum=fast
        )

    return "torch._scaled_mm", scaled


def _scales(operation: GemmOperation, listed: Sequence[Item]) -> int:
    """How many items of the epilogue cuBLAS takes as scales of operands in fp8."""
    if not element(operation.a).is_fp8:
        return 0
    if operation.block_scales != "none":
        return 2
    kinds = [item[0] for item in listed[:2]]
    if kinds == ["scale_row", "scale_column"]:
        return 2
    tensors = [isinstance(item[1], torch.Tensor) for item in listed[:2]]
    own = [kind in _SCALES[0] and given for kind, given in zip(kinds, tensors, strict=True)]
    return own.index(False) if False in own else len(own)


def _with_epilogue(
    bare: Callable[[Operands, Sequence[Item]], torch.Tensor], taken: int, one: Operands
) -> Results:
    """D, in the type of the matmul's own result until it is rounded."""
    x, rest = bare(one, one.listed[:taken]), one.listed[taken:]
    if not rest:
        return x if x.dtype == one.out.dtype else rounded(x, one.out.dtype)
    x = x.float() if x.dtype == torch.int32 else x
    write_outputs(x, rest)
    return rounded(apply(x, rest), one.out.dtype, rest)


def _by_cublaslt(whole: Callable[[Operands], Results], one: Operands) -> Results:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return whole(one)
    finally:
        torch.backends.cuda.preferred_blas_library(before)


class GemmRuntime(RuntimeFamily[GemmOperation, GemmShape]):
    """Calls of `warploom.gemm`."""

    function = staticmethod(api.gemm)
    operands = 2
    unnamed = True

    def trial(
        self, operation: GemmOperation, shape: GemmShape, device: str, seed: int
    ) -> GemmTrial:
        """Random operands of a product: see trial.py."""
        return GemmTrial(operation, shape, device, seed)

    def calls(self, operation: GemmOperation, shape: GemmShape) -> list[Call[Any, Any]]:
        """Calls on dense operands: two where a vector of scales has one element.

        `warploom.gemm` takes that of a keyword for a number, that of an `epilogue` for a vector.
        """
        one = GemmData(operation, shape, "meta", 0).operands()
        own = own_call(operation, one)
        if own is not None:
            return [own]
        keywords = {"scale_row": "scale_a", "scale_column": "scale_b"}
        by_keywords = tuple((keywords.get(item[0], item[0]), *item[1:]) for item in one.listed)
        ways = {
            tuple(step_of(item).reads(item) for item in listed): listed
            for listed in (by_keywords, one.listed)
        }
        given = (None, TORCH[operation.d], operation.accumulation == "fast")
        if operation.terms > 1:
            a = torch.cat([one.a] * operation.pieces, -1)
            b = torch.cat([one.b.mT] * operation.pieces, -1).mT
            terms = operation.terms
            if operation.whole_b:
                return [
                    UnsplitBCall(a, one.b, listed, *given, terms=terms) for listed in ways.values()
                ]
            if operation.spans == "any":
                return [PiecesCall(a, b, listed, *given, terms=terms) for listed in ways.values()]
            span = a.new_empty(SPAN, dtype=torch.int32)
            return [
                SpannedPiecesCall(
                    *(a, b, listed, *given),
                    terms=terms,
                    span_a=span,
                    span_b=span,
                    spans=operation.spans,
                )
                for listed in ways.values()
            ]
        kind = Tf32Call if operation.a == "tf32" else GemmCall
        return [kind(one.a, one.b, listed, *given) for listed in ways.values()]

    def call(self, *operands: Any, **keywords: Any) -> GemmCall:
        """A product, by no algorithm: `explanation` has the others."""
        composed = ("algorithm", "precision")
        others = {name: value for name, value in keywords.items() if name not in composed}
        return GemmCall.asked(*operands, **others)

    def explanation(
        self, operands: Sequence[Any], keywords: Mapping[str, Any], gpu: str | None
    ) -> Explanation | None:
        """What a call by an algorithm or a precision does, which is several launches."""
        precision, algorithm = keywords.get("precision"), keywords.get("algorithm")
        if precision is not None:
            fp32.refuse_algorithm(algorithm, precision)
            return fp32.explanation(self.call(*operands, **keywords), precision, gpu)
        if algorithm is None:
            return None
        return strassen.explanation(self.call(*operands, **keywords), algorithm, gpu)

    def plan(self, call: Call[Any, Any]) -> GemmPlan:
        """The plan of a product."""
        return make(call, GemmPlan)

    def rehearse(self) -> None:
        """Multiply on the CPU."""
        one = torch.ones(1, 1, 8, 64, dtype=torch.bfloat16)
        api.gemm(one, one.mT)

    def baselines(self, operation: GemmOperation, trial: GemmTrial) -> list[Baseline]:
        """cuBLAS, by torch: see baselines.py."""
        return baselines(operation, trial.sets)


FAMILY = GemmRuntime()
