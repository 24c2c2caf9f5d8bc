"""Warploom weaves GPU kernels from YAML; this is the whole of its public Python interface.

Importing it is cheap: the runtime, and torch with it, load when one of its names is first used.
`warploom.generator` works without either. Errors are the classes listed here, each with the
value met, the rule it breaks and the fix.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from warploom.errors import (
    CompilationError,
    ConfigurationError,
    DeviceError,
    KernelMissingError,
    ProblemError,
    RecordsError,
    ResultError,
    SpecificationError,
    StoreError,
    ToolchainError,
    UnknownNameError,
    WarploomError,
)
from warploom.suggestions import suggestion

if TYPE_CHECKING:
    from warploom import flash_attn, flashinfer, float8, fp32, functional, nn, testing
    from warploom.generator.specification import KernelSpec
    from warploom.integrations.checkpoints.load import load_checkpoint
    from warploom.integrations.checkpoints.quantizer import WarploomConfig
    from warploom.integrations.experts import experts
    from warploom.integrations.grouped_mm import grouped_mm
    from warploom.integrations.patch import patch
    from warploom.integrations.patch_attention import register_transformers
    from warploom.integrations.sdpa import sdpa
    from warploom.quantization.packed_experts import PackedExperts
    from warploom.quantization.packed_weight import PackedWeight
    from warploom.quantization.quantize import quantize
    from warploom.quantization.sparse_weight import SparseWeight, sparsify
    from warploom.reports.report import kernel_report
    from warploom.runtime.api import Explanation, counters, explain, load, warmup
    from warploom.runtime.families._attention.block_mask import BlockMask
    from warploom.runtime.families._attention.dropout import dropout_mask
    from warploom.runtime.families._attention.given_blocks import block_mask
    from warploom.runtime.families.attention_append.api import append_kv_cache
    from warploom.runtime.families.attention_decode.api import attention_decode
    from warploom.runtime.families.attention_forward.api import attention, plan_attention
    from warploom.runtime.families.attention_forward.attention_8bit import attention_8bit
    from warploom.runtime.families.attention_merge.api import merge_state
    from warploom.runtime.families.attention_quantize.api import (
        QuantizedAttention,
        attention_quantize,
    )
    from warploom.runtime.families.cast.api import cast
    from warploom.runtime.families.combine.api import combine, permute
    from warploom.runtime.families.dequantize.api import dequantize
    from warploom.runtime.families.fp32_pieces.api import fp32_pieces
    from warploom.runtime.families.gemm.api import gemm, plan
    from warploom.runtime.families.gemm.block_sparse import block_sparse_gemm
    from warploom.runtime.families.gemm.grouped import grouped_gemm
    from warploom.runtime.families.mixed_gemm.api import mixed_gemm
    from warploom.runtime.families.mixed_gemm.grouped import grouped_mixed_gemm
    from warploom.runtime.families.route.api import route
    from warploom.runtime.families.sparse_gemm.api import sparse_gemm
    from warploom.tuning.autotune.api import autotune
    from warploom.tuning.autotune.ranks import assert_same_records, records_digest
    from warploom.tuning.recording import recording

    __version__: str

__all__ = [
    "BlockMask",
    "CompilationError",
    "ConfigurationError",
    "DeviceError",
    "Explanation",
    "KernelMissingError",
    "KernelSpec",
    "PackedExperts",
    "PackedWeight",
    "ProblemError",
    "QuantizedAttention",
    "RecordsError",
    "ResultError",
    "SparseWeight",
    "SpecificationError",
    "StoreError",
    "ToolchainError",
    "UnknownNameError",
    "WarploomConfig",
    "WarploomError",
    "__version__",
    "append_kv_cache",
    "assert_same_records",
    "attention",
    "attention_8bit",
    "attention_decode",
    "attention_quantize",
    "autotune",
    "block_mask",
    "block_sparse_gemm",
    "cast",
    "combine",
    "counters",
    "dequantize",
    "dropout_mask",
    "experts",
    "explain",
    "flash_attn",
    "flashinfer",
    "float8",
    "fp32",
    "fp32_pieces",
    "functional",
    "gemm",
    "grouped_gemm",
    "grouped_mixed_gemm",
    "grouped_mm",
    "kernel_report",
    "load",
    "load_checkpoint",
    "merge_state",
    "mixed_gemm",
    "nn",
    "patch",
    "permute",
    "plan",
    "plan_attention",
    "quantize",
    "recording",
    "records_digest",
    "register_transformers",
    "route",
    "sdpa",
    "sparse_gemm",
    "sparsify",
    "testing",
    "warmup",
]

# Where names come from that are imported when they are first used: all but those above. A name that
# is its module's stands for the module.
_LAZY = {
    "BlockMask": "warploom.runtime.families._attention.block_mask",
    "Explanation": "warploom.runtime.api",
    "KernelSpec": "warploom.generator.specification",
    "PackedExperts": "warploom.quantization.packed_experts",
    "PackedWeight": "warploom.quantization.packed_weight",
    "QuantizedAttention": "warploom.runtime.families.attention_quantize.api",
    "SparseWeight": "warploom.quantization.sparse_weight",
    "WarploomConfig": "warploom.integrations.checkpoints.quantizer",
    "assert_same_records": "warploom.tuning.autotune.ranks",
    "attention": "warploom.runtime.families.attention_forward.api",
    "attention_8bit": "warploom.runtime.families.attention_forward.attention_8bit",
    "append_kv_cache": "warploom.runtime.families.attention_append.api",
    "attention_decode": "warploom.runtime.families.attention_decode.api",
    "attention_quantize": "warploom.runtime.families.attention_quantize.api",
    "merge_state": "warploom.runtime.families.attention_merge.api",
    "autotune": "warploom.tuning.autotune.api",
    "block_mask": "warploom.runtime.families._attention.given_blocks",
    "block_sparse_gemm": "warploom.runtime.families.gemm.block_sparse",
    "cast": "warploom.runtime.families.cast.api",
    "combine": "warploom.runtime.families.combine.api",
    "counters": "warploom.runtime.api",
    "dequantize": "warploom.runtime.families.dequantize.api",
    "dropout_mask": "warploom.runtime.families._attention.dropout",
    "experts": "warploom.integrations.experts",
    "explain": "warploom.runtime.api",
    "flash_attn": "warploom.flash_attn",
    "flashinfer": "warploom.flashinfer",
    "float8": "warploom.float8",
    "fp32": "warploom.fp32",
    "fp32_pieces": "warploom.runtime.families.fp32_pieces.api",
    "functional": "warploom.functional",
    "gemm": "warploom.runtime.families.gemm.api",
    "grouped_gemm": "warploom.runtime.families.gemm.grouped",
    "grouped_mixed_gemm": "warploom.runtime.families.mixed_gemm.grouped",
    "grouped_mm": "warploom.integrations.grouped_mm",
    "kernel_report": "warploom.reports.report",
    "load": "warploom.runtime.api",
    "load_checkpoint": "warploom.integrations.checkpoints.load",
    "mixed_gemm": "warploom.runtime.families.mixed_gemm.api",
    "nn": "warploom.nn",
    "patch": "warploom.integrations.patch",
    "permute": "warploom.runtime.families.combine.api",
    "plan": "warploom.runtime.families.gemm.api",
    "plan_attention": "warploom.runtime.families.attention_forward.api",
    "quantize": "warploom.quantization.quantize",
    "recording": "warploom.tuning.recording",
    "records_digest": "warploom.tuning.autotune.ranks",
    "register_transformers": "warploom.integrations.patch_attention",
    "sdpa": "warploom.integrations.sdpa",
    "route": "warploom.runtime.families.route.api",
    "sparse_gemm": "warploom.runtime.families.sparse_gemm.api",
    "sparsify": "warploom.quantization.sparse_weight",
    "testing": "warploom.testing",
    "warmup": "warploom.runtime.api",
}

if os.environ.get("WARPLOOM_LOG"):
    import_module("warploom.log").set_up()


def _import(name: str) -> object:
    """Import a name of the runtime on first use, and keep it (PEP 562)."""
    renamed = import_module("warploom.renamed")
    if name in renamed.NAMES:
        renamed.warn(f"warploom.{name}", f"warploom.{renamed.NAMES[name]}")
        return _import(renamed.NAMES[name])
    if name == "__version__":
        globals()[name] = _version()
        return globals()[name]
    if name not in _LAZY:
        near = "" if name.startswith("_") else suggestion(name, __all__)
        told = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(f"{told}: {near}" if near else told)
    import_module("warploom.variables").warn()
    module = import_module(_LAZY[name])
    value: object = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def _version() -> str:
    """Return the version that was installed: of the last tag, or one on the way to the next."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("warploom")
    except PackageNotFoundError:  # a checkout on the path, not installed
        return "0.0.0+unknown"


if not TYPE_CHECKING:  # where every name is known, so that one that is misspelt is told
    __getattr__ = _import


def __dir__() -> list[str]:
    """Every public name, loaded or not."""
    return sorted(__all__)
