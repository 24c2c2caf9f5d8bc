"""What NVRTC's log says reaches the artifact and the error, and cubins depend on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom.errors import CompilationError
from warploom.generator import nvrtc
from warploom.generator.artifact import Artifact, Resources
from warploom.generator.toolchain import find

# NVRTC 13.0's own log, of a unit with two entries; the second calls a function.
LOG = """\
two.cu(23): warning #177-D: variable "unused" was declared but never referenced
  static __device__ int unused;
                        ^

Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"

ptxas info    : (C7517) warpgroup.wait is injected in around line 40 by compiler to allow use of \
registers defined by GMMA in function 'spills'
ptxas info    : 20 bytes gmem
ptxas info    : Compiling entry function 'spills' for 'sm_90a'
ptxas info    : Function properties for spills
ptxas         .     16328 bytes stack frame, 40124 bytes spill stores, 82360 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 16328 bytes cumulative stack size
ptxas info    : Compile time = 3442.418 ms
ptxas info    : Compiling entry function 'calls' for 'sm_90a'
ptxas info    : Function properties for calls
ptxas         .     128 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 0 barriers, 160 bytes cumulative stack size
ptxas info    : Compile time = 3.461 ms
ptxas info    : Function properties for _Z6helperi
ptxas         .     32 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
"""

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(const float* x, float* y) {
  float v[48];
  #pragma unroll
  for (int i = 0; i < 48; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 48; ++i) y[i * 1024 + threadIdx.x] = v[i] * v[(i * 7) % 48];
}
extern "C" __global__ void indexes(const int* x, int* y, int n) {
  int v[64];
  for (int i = 0; i < n; ++i) v[x[i] & 63] = i;
  y[threadIdx.x] = v[threadIdx.x & 63];
}
extern "C" __global__ void clean(int* y) { y[threadIdx.x] = 1; }
"""

SERIALISED = """
extern "C" __global__ void serialised(float* d, unsigned long long a, unsigned long long b) {
  float d0 = 0, d1 = 0, d2 = 0, d3 = 0;
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int k = 0; k < 2; ++k) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16"
      " {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3) : "l"(a + k), "l"(b + k));
    d0 += 1.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  d[threadIdx.x] = d0 + d1 + d2 + d3;
}
"""


def compile(source: str, name: str = "kernel") -> Artifact:
    return nvrtc.compile(source, name=name, arch="sm_90a", toolchain=find())


def test_each_entry_has_its_own_resources_with_those_of_functions_it_calls() -> None:
    resources, _ = nvrtc.report(LOG)
    assert resources == {
        "spills": Resources(registers=32, spill_bytes=122484, local_bytes=16328),
        "calls": Resources(registers=16, spill_bytes=20, local_bytes=160),
    }


def test_warnings_are_the_compilers_and_ptxas_c75_lines_though_it_calls_them_info() -> None:
    _, warnings = nvrtc.report(LOG)
    assert [line.split(":")[0] for line in warnings] == ["two.cu(23)", "ptxas info    "]
    assert "C7517" in warnings[1]


def test_a_log_without_entries_gives_no_resources() -> None:
    assert nvrtc.report("") == ({}, ())


def test_a_source_without_a_kernel_is_refused() -> None:
    with pytest.raises(CompilationError, match="no kernel in this source"):
        compile("__device__ int unused;")


def test_spills_and_local_memory_are_seen_in_real_code() -> None:
    resources = compile(SPILLS).resources
    assert set(resources) == {"spills", "indexes", "clean"}
    assert resources["spills"].registers == 32
    assert resources["spills"].spill_bytes > 0
    assert (resources["indexes"].spill_bytes, resources["indexes"].local_bytes) == (0, 256)
    assert [resources[entry].clean for entry in ("spills", "indexes", "clean")] == [
        False,
        False,
        True,
    ]


def test_a_serialised_wgmma_is_seen_in_real_code() -> None:
    artifact = compile(SERIALISED)
    assert any(
        "wgmma.mma_async instructions are serialized" in line for line in artifact.serialised
    )


def test_a_cubin_is_machine_code_and_the_same_bytes_each_time_and_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = '#include <cuda_fp16.h>\nextern "C" __global__ void f(__half* d) { *d = __half(1); }\n'
    first = compile(source)
    monkeypatch.chdir(tmp_path)
    second = compile(source)
    assert first.cubin[:4] == b"\x7fELF"
    assert first.cubin == second.cubin
    assert first.options == find().options("sm_90a")
    assert first.toolchain == find().identity
    assert first.compile_seconds > 0


def test_a_folder_in_the_working_directory_does_not_shadow_the_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cute").mkdir()
    (tmp_path / "cute" / "config.hpp").write_text("#error shadowed\n")
    monkeypatch.chdir(tmp_path)
    artifact = compile('#include "cute/config.hpp"\nextern "C" __global__ void f() {}\n')
    assert list(artifact.resources) == ["f"]


def test_the_first_error_is_the_message_and_log_and_source_are_kept() -> None:
    source = "int f() { int unused; }\nint g() { return nowhere; }\nint h = elsewhere;\n"
    with pytest.raises(CompilationError) as caught:
        compile(source, name="broken")
    error = caught.value
    assert error.value == 'broken: broken.cu(2): error: identifier "nowhere" is undefined'
    assert "2 errors detected" in error.log
    assert error.source == source
    assert error.exit_code == 2


def test_an_error_of_ptxas_is_the_message_too() -> None:
    with pytest.raises(CompilationError, match="Not a name of any known instruction: 'bogus'"):
        compile('extern "C" __global__ void f() { asm volatile("bogus 1;"); }\n')
