"""The libraries that families are measured beside, by their words on a command line."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.peers._attention_baseline import Attend, AttentionBaseline, Forward, Start
from benchmarks.peers._attention_quantized import Bound, Quantized
from benchmarks.peers._decode_problem import Way
from benchmarks.peers._mixed_weights import Weight
from benchmarks.peers._products import Peer
from benchmarks.peers.libraries import cudnn_frontend, vllm_flash_attention
from benchmarks.peers.libraries.deep_gemm import deep_gemm
from benchmarks.peers.libraries.flash_attention import FLASH3, FLASH4, flash3_decode
from benchmarks.peers.libraries.flashinfer import cuda_cores, tensor_cores, xqa
from benchmarks.peers.libraries.humming import Humming
from benchmarks.peers.libraries.machete import Machete
from benchmarks.peers.libraries.marlin import Marlin
from benchmarks.peers.libraries.quack import quack
from benchmarks.peers.libraries.torch_kernels import (
    CUDNN,
    CUDNN_KERNEL,
    EFFICIENT,
    FLASH2,
    FLASH_KERNEL,
    TorchInt4,
    cublas,
    cublas_block_scaled,
    cudnn_decode,
    flash2_decode,
    heads_as_rows,
)
from benchmarks.peers.libraries.triton import FLEX, gemm

GEMM: dict[str, Peer] = {"cublas": cublas, "triton": gemm, "quack": quack}
BLOCK_SCALED: dict[str, Peer] = {"cublas": cublas_block_scaled, "deep_gemm": deep_gemm}

BASELINES: dict[str, AttentionBaseline] = {
    "cudnn": CUDNN,
    "fa2": FLASH2,
    "fa3": FLASH3,
    "fa4": FLASH4,
    "triton": FLEX,
    "efficient": EFFICIENT,
}
# Of those that have it, the name and how it is made.
FORWARD: dict[str, tuple[str, Callable[[], Forward]]] = {
    word: (one.name, one.forward) for word, one in BASELINES.items() if one.forward
}
BACKWARD: dict[str, tuple[str, Start]] = {
    word: (one.name, one.backward) for word, one in BASELINES.items() if one.backward
}
TRAINED: dict[str, tuple[str, Forward]] = {
    word: (one.name, one.trained) for word, one in BASELINES.items() if one.trained
}
OPTIONS: dict[str, tuple[str, Callable[[], Attend]]] = {
    word: (one.name, one.option) for word, one in BASELINES.items() if one.option
}
NAMES = {word: one.name for word, one in BASELINES.items()}
# Attention of operands in 8 bits, by their contenders' names.
EIGHT_BITS: dict[str, tuple[str, Callable[[Quantized], Bound]]] = {
    "fa3_8bit": (vllm_flash_attention.NAME, vllm_flash_attention.flash3_8bit),
    "cudnn_8bit": (cudnn_frontend.NAME, cudnn_frontend.cudnn_8bit),
}
BESIDE_DRAWN = ("cudnn", "fa2", "fa3")  # what is drawn is measured beside these, if none is named
DECODE: dict[str, tuple[Way, ...]] = {
    "cudnn": (
        Way("cuDNN", cudnn_decode),
        Way("cuDNN, heads as rows", heads_as_rows(CUDNN_KERNEL)),
    ),
    "fa2": (
        Way("FlashAttention-2", flash2_decode),
        Way("FlashAttention-2, heads as rows", heads_as_rows(FLASH_KERNEL)),
    ),
    "fa3": (
        Way("FlashAttention-3", flash3_decode),
        Way("FlashAttention-3", flash3_decode, page=64),
    ),
    "flashinfer": (
        Way("FlashInfer", cuda_cores, page=16),
        Way("FlashInfer, tensor cores", tensor_cores, page=16),
        Way("FlashInfer, tensor cores", tensor_cores, page=64),
        Way("FlashInfer", cuda_cores, page=16, cache="e4m3"),
    ),
    "xqa": (
        Way("XQA", xqa, page=16),
        Way("XQA", xqa, page=64),
        Way("XQA", xqa, page=64, cache="e4m3", eight=True),
    ),
}
MIXED: dict[str, tuple[str, type[Weight]]] = {
    "marlin": ("Marlin", Marlin),
    "machete": ("Machete", Machete),
    "humming": ("humming", Humming),
    "torch": ("torch, int4", TorchInt4),
}
