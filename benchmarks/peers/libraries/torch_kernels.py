"""torch's own kernels: cuBLAS's GEMM, its int4 GEMM, and its attention: cuDNN, FlashAttention-2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_baseline import Attend, AttentionBaseline, differentiated
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._decode_problem import Call, Make
from benchmarks.peers._decode_problem import Given as Decoding
from benchmarks.peers._gradients import Backward, Step
from benchmarks.peers._mixed_codes import OFFSETS, Codes
from benchmarks.peers._mixed_problem import Activations, Quantised
from benchmarks.peers._mixed_weights import Weight, only
from benchmarks.peers._options_given import Given, Tensors
from benchmarks.peers._products import baseline, prepared_baseline
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.samples import Operands as GemmOperands
from warploom.runtime.measure import Call as Timed

CUDNN_KERNEL, FLASH_KERNEL = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# ---- GEMM ----------------------------------------------------------------------------------------


def cublas_block_scaled(operation: GemmOperation, given: Sequence[GemmOperands]) -> Contender:
    """torch.nn.functional.scaled_mm, which takes multiples of 4 rows: others are padded before."""

    def padded(one: torch.Tensor, to: int, dim: int) -> torch.Tensor:
        missing = -one.shape[dim] % to
        return pad(one, (*[0, 0] * (one.dim() - 1 - dim), 0, missing))

    def prepare(one: GemmOperands, out: torch.Tensor) -> Callable[[], object]:
        (_, scale_a), (_, scale_b) = one.listed[:2]
        a = padded(one.a.view(torch.uint8), 4, 0).view(one.a.dtype)
        of_a = padded(scale_a, 4, 0).t().contiguous().t()
        if operation.block_scales == "row_block":  # whose k blocks come in fours
            of_b = padded(scale_b, 4, 1).contiguous().t()
        else:
            of_b = scale_b.t().contiguous()
        options: Any = {"out_dtype": out.dtype, "out": out}
        return partial(torch._scaled_mm, a, one.b, of_a, of_b, **options)

    rows = -(-given[0].out.shape[0] // 4) * 4
    outs = [one.out.new_empty(rows, one.out.shape[1]) for one in given]
    return prepared_baseline("torch._scaled_mm", operation, given, prepare, outs)


def cublas(operation: GemmOperation, given: Sequence[GemmOperands]) -> Contender:
    """torch.mm, torch._scaled_mm with fast sums, or torch._int_mm: cuBLAS."""
    name = {"e4m3": "torch._scaled_mm", "int8": "torch._int_mm"}.get(operation.a, "torch.mm")
    return baseline(name, _cublas, operation, given)


def _cublas(operation: GemmOperation, one: GemmOperands, out: torch.Tensor) -> object:
    if operation.a == "e4m3":
        scales = [tensor for _, tensor in one.listed]
        if operation.epilogue[0] == Scale("row"):
            scales = [scales[0][:, None], scales[1][None]]
        kinds: Any = {"out_dtype": out.dtype, "use_fast_accum": True}
        return torch._scaled_mm(
            one.a, one.b, scale_a=scales[0], scale_b=scales[1], out=out, **kinds
        )
    return (torch._int_mm if operation.a == "int8" else torch.mm)(one.a, one.b, out=out)


def cublaslt(operation: GemmOperation, given: Sequence[GemmOperands]) -> Contender:
    """torch.mm where it is told to prefer cuBLASLt."""
    plain = cublas(operation, given)

    def call(prepared: Timed) -> None:
        known = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        try:
            prepared()
        finally:
            torch.backends.cuda.preferred_blas_library(known)

    calls = [partial(call, prepared) for prepared in plain.calls]
    return Contender("torch.mm, cuBLASLt", calls, plain.error_share, peer=True)


# ---- Attention -----------------------------------------------------------------------------------


def cudnn(problem: Attention, one: Operands) -> torch.Tensor:
    """cuDNN as torch has it; its packed gradients read past what torch 2.11 allocates for them."""
    if problem.window is not None:
        raise ValueError("torch has no windows of cuDNN's")
    if problem.causal and not problem.square:
        raise ValueError("torch's causal mask of cuDNN begins at the top left")
    if not problem.lengths:
        return _causal(CUDNN_KERNEL, problem, one)
    if one.q.requires_grad:
        raise ValueError("torch has no gradients of cuDNN's packed sequences")
    found: torch.Tensor = torch.ops.aten._cudnn_attention_forward(
        *(one.q, one.k, one.v, None, *one.lengths.values()),
        *(False, 0.0, problem.causal, False),
        scale=problem.dim**-0.5,
    )[0]
    return found


def flash2(problem: Attention, one: Operands) -> torch.Tensor:
    """FlashAttention-2 as torch has it; windows and sequences that differ take its operator."""
    if problem.window is None and not problem.lengths and (problem.square or not problem.causal):
        return _causal(FLASH_KERNEL, problem, one)
    left, right = problem.band or (None, None)
    lengths = one.lengths.values() or (None, None, problem.seq, problem.columns)
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(*one.turned, *lengths, 0.0, problem.causal and problem.window is None, False),
        scale=problem.dim**-0.5,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return found if problem.lengths else found.transpose(1, 2)


def _causal(backend: SDPBackend, problem: Attention, one: Operands) -> torch.Tensor:
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(
            *(one.q, one.k, one.v),
            is_causal=problem.causal,
            enable_gqa=problem.heads != problem.kv_heads,
        )


def _cudnn_trained(problem: Attention, one: Operands) -> torch.Tensor:
    # The operators: to choose a backend by its context would be charged to the peer.
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: torch.Tensor = operator(one.q, one.k, one.v, None, True, 0.0, problem.causal)[0]
    return out


def _flash2_trained(problem: Attention, one: Operands) -> torch.Tensor:
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out: torch.Tensor = operator(one.q, one.k, one.v, 0.0, problem.causal)[0]
    return out


def _cudnn_backward(step: Step, deterministic: bool) -> Backward:
    if deterministic:
        raise ValueError("torch has no deterministic one")
    return differentiated(step, deterministic, cudnn)


def with_option(backend: SDPBackend) -> Attend:
    """A backend of torch. ALiBi is a bias that was made before, which has the causal mask too."""

    def attend(one: Given, tensors: Tensors) -> torch.Tensor:
        read, problem = {**one.shared.read, **tensors}, one.problem
        alibi = problem.kind == "alibi"
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(
                *(tensors["q"], tensors["k"], tensors["v"]),
                attn_mask=one.shared.biases if alibi else read.get("mask", read.get("bias")),
                dropout_p=problem.dropout_p,
                is_causal=problem.attention.causal and not alibi,
            )

    return attend


def _flash2_with_option(one: Given, tensors: Tensors) -> torch.Tensor:
    """FlashAttention-2 as torch has it; ALiBi takes its operator."""
    if one.problem.kind != "alibi":
        return with_option(FLASH_KERNEL)(one, tensors)
    q, k, v = (tensors[name] for name in "qkv")
    if q.requires_grad:
        raise ValueError("torch has no gradients of FlashAttention-2's ALiBi")
    seq, causal = one.problem.attention.seq, one.problem.attention.causal
    found: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        *(None, None, seq, seq, 0.0, causal, False),
        alibi_slopes=one.shared.read["alibi_slopes"],
    )[0]
    return found.transpose(1, 2)


CUDNN = AttentionBaseline(
    "cuDNN",
    forward=lambda: cudnn,
    backward=_cudnn_backward,
    trained=_cudnn_trained,
    option=lambda: with_option(CUDNN_KERNEL),
)
FLASH2 = AttentionBaseline(
    "FlashAttention-2",
    forward=lambda: flash2,
    backward=lambda step, deterministic: differentiated(step, deterministic, flash2),
    trained=_flash2_trained,
    option=lambda: _flash2_with_option,
)
EFFICIENT = AttentionBaseline(
    "torch's efficient kernel", option=lambda: with_option(SDPBackend.EFFICIENT_ATTENTION)
)


# ---- Decode attention ----------------------------------------------------------------------------


def cudnn_decode(given: Decoding, _page: int) -> Call:
    """cuDNN as torch has it: without a mask."""
    if given.problem.rows > 1:
        raise ValueError("torch's causal mask of cuDNN begins at the top left")
    return _heads_first(given, _grouped(CUDNN_KERNEL), given.q)


def flash2_decode(given: Decoding, _page: int) -> Call:
    """FlashAttention-2 as torch has it; by its operator, whose mask ends at the last row."""
    rows, keys, dim = given.problem.rows, given.problem.keys, given.problem.dim
    if rows == 1:
        return _heads_first(given, _grouped(FLASH_KERNEL), given.q)
    caches = given.caches()

    def call(index: int) -> torch.Tensor:
        k, v = caches[index]
        found: torch.Tensor = torch.ops.aten._flash_attention_forward(
            *(given.q, k, v, None, None, rows, keys, 0.0, True, False), scale=dim**-0.5
        )[0]
        return found

    return call


def heads_as_rows(backend: SDPBackend) -> Make:
    """A backend with the heads of a group as rows: each kv head is read by one block of rows."""

    def of(given: Decoding, _page: int) -> Call:
        problem = given.problem
        if problem.rows > 1:
            raise ValueError("the mask of several rows is not that of a group's heads")
        extents = problem.batch, problem.kv_heads, problem.group, problem.dim
        grouped = given.q.view(extents).transpose(1, 2)
        call = _heads_first(given, _grouped(backend), grouped)
        return lambda index: call(index).transpose(1, 2).reshape(given.q.shape)

    return of


def _grouped(backend: SDPBackend) -> Dense:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel([backend]):
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, enable_gqa=grouped)

    return attend


def _heads_first(given: Decoding, attend: Dense, q: torch.Tensor) -> Call:
    """Tensors as torch has them: [batch, heads, seq, dim], seen transposed."""
    heads_first = [[one.transpose(1, 2) for one in pair] for pair in given.caches()]
    q = q.transpose(1, 2)
    return lambda index: attend(q, *heads_first[index]).transpose(1, 2)


# ---- Weights of 4 bits ---------------------------------------------------------------------------


class TorchInt4(Weight):
    """torch._weight_int4pack_mm: scale (code - 8) + an offset in bf16."""

    most: ClassVar[int] = 512  # rows: it reads the weight for every 16 of them

    @classmethod
    def of(cls, given: Quantised) -> TorchInt4:
        """By torch's own packing."""
        codes = only("torch", given.codes, "int4", "uint4")
        packed = torch._convert_weight_to_int4pack(packed_bytes(codes), 8)
        offsets = offsets_of(codes)
        return cls((packed, torch.stack((codes.scales.t(), offsets.t()), 2).contiguous()))

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """bf16 activations."""
        m, k = a.values.shape
        if a.rows is not None or m > self.most:
            raise RuntimeError(f"torch: for bf16 and up to {self.most} rows here")
        packed, factors = self.tensors
        group = k // factors.shape[0]
        found: torch.Tensor = torch._weight_int4pack_mm(a.values, packed, group, factors)
        return found

    def exact(self, codes: Codes) -> torch.Tensor:
        """With the offset as it is rounded."""
        grouped = (codes.codes.double() - 8).view(codes.n, -1, codes.group)
        offsets = offsets_of(codes).double()[..., None]
        return (grouped * codes.factors()[..., None] + offsets).view(codes.n, codes.k)


def packed_bytes(found: Codes) -> torch.Tensor:
    """Codes as uint8 [n, k / 2], the first of a pair high: what torch's own packing takes."""
    return found.codes[:, ::2] << 4 | found.codes[:, 1::2]


def offsets_of(found: Codes) -> torch.Tensor:
    """What torch adds to scale (code - 8), [n, k / group], in the type of the scales."""
    if found.zeros is None:
        return torch.zeros_like(found.scales)
    return ((OFFSETS["int4"] - found.zeros.float()) * found.scales.float()).to(found.scales.dtype)
