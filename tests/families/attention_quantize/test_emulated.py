"""The kernel that transposes v alone, run on the CPU with what it needs of CUDA made up."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Literal

import pytest
import torch
from host import library, needs_compiler

from warploom.generator.families.attention_quantize import FAMILY, AttentionQuantizeOperation
from warploom.generator.families.attention_quantize.schedule import complete
from warploom.generator.launches import NO_GPU, Address
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_forward.values import dim_major
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall

_CUDA = Path(__file__).with_name("emulated.h")
_LAUNCH = """
extern "C" void launch(const void* block, int grid) {
  Parameters p;
  std::memcpy(&p, block, sizeof(p));
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) Cta::run(kThreads, [&] { NAME(p); });
}
"""
OFFSETS: dict[Literal["fixed", "packed"], list[list[int]]] = {
    "fixed": [[]],
    # Ragged, empty and long sequences; one; an end past the rows, of which none is read.
    "packed": [[0, 130, 130, 131, 131, 400, 656, 656], [0, 300], [0, 200, 900]],
}


@needs_compiler
@pytest.mark.parametrize("lengths", OFFSETS)
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_v_of_any_lengths_is_transposed_byte_for_byte(
    dim: int, lengths: Literal["fixed", "packed"], tmp_path: Path
) -> None:
    operation = AttentionQuantizeOperation("e4m3", dim, "none", lengths=lengths)
    spec = KernelSpec("sm_90a", operation, complete("", operation, {}))
    text = re.sub(r"^#.*\n|asm volatile\(.*?\);", "", render(spec), flags=re.M)
    text = text[text.index("using Element") :] + _LAUNCH.replace("NAME", spec.name)
    path = library(_CUDA.read_text() + text, tmp_path / "kernel.so", ("cstddef", "ucontext.h"))
    for offsets in OFFSETS[lengths]:
        v = torch.randint(0, 256, (660, 3, dim), dtype=torch.uint8).view(torch.float8_e4m3fn)
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32) if offsets else None
        call = AttentionQuantizeCall(
            v if offsets else v.view(2, 330, 3, dim).transpose(1, 2), cu_seqlens=cu_seqlens
        )
        found = call.fake()[2].view(torch.uint8).fill_(255)
        (launch,) = FAMILY.launches(spec, call._problem(()), NO_GPU)
        tensors = {"v": v, "v_out": found, "cu_seqlens": cu_seqlens}
        values = {
            name: tensors[value.tensor].data_ptr() if isinstance(value, Address) else value
            for name, value in launch.parameters.items()
        }
        block = ctypes.create_string_buffer(FAMILY.parameters(spec).pack(values))
        ctypes.CDLL(str(path)).launch(block, launch.grid)
        rows = None if cu_seqlens is None else cu_seqlens.clamp(max=660)
        assert torch.equal(found, dim_major(call.v, rows).view(torch.uint8)), offsets
