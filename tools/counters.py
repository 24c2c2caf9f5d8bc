"""Hardware counters of one call of each kernel, by Nsight Compute: `counters.py ternary sparse_d`.

It needs a GPU whose counters ncu may read. Kernels are built and warmed up first; between
cudaProfilerStart and Stop is one call of each, so that ncu sees nothing else. What it prints of
each kernel of 5 us or more: time, pipes, caches, and what warps wait for. `--csv FILE` keeps all.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch

import warploom
from warploom.runtime.families.attention_quantize.api import transpose_values

Call = Callable[[], object]
SECTIONS = (
    *("SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats"),
    *("WarpStateStats", "LaunchStats", "Occupancy"),
)
TIME = "gpu__time_duration.sum"
SHOWN = re.compile(
    r"gpu__time_duration\.sum|(pipe_tensor_type|issue_active|lts__throughput|l1tex__throughput"
    r"|dram__throughput|data_pipe_lsu_wavefronts)\S*\.avg\.pct|stalled\S*per_issue_active"
)
LEAST = 5000  # ns of a kernel that is shown


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16).to(dtype)


def int8_rows(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of int8, and the scale of each."""
    values = torch.randint(-127, 128, (m, k), device="cuda", dtype=torch.int8)
    return values, torch.rand(m, device="cuda")


def ternary() -> Call:
    """4096 rows by ternary weights of 4096x4096."""
    x, scale = int8_rows(4096, 4096)
    weight = warploom.quantize(normal(4096, 4096), "ternary", activations="int8")
    return lambda: warploom.mixed_gemm(x, weight, scale_a=scale, out_dtype=torch.bfloat16)


def int8() -> Call:
    """The same by int8."""
    (x, scale), (weight, _) = int8_rows(4096, 4096), int8_rows(4096, 4096)
    return lambda: warploom.gemm(x, weight.t(), scale_a=scale, out_dtype=torch.bfloat16)


def nvfp4() -> Call:
    """64 rows by NVFP4 weights of 28672x4096."""
    x, weight = normal(64, 4096), warploom.quantize(normal(28672, 4096), "nvfp4")
    return lambda: warploom.mixed_gemm(x, weight)


def sparse(which: str) -> Call:
    """8192x8192x8192 with half of the blocks of a matrix."""
    a, b = normal(8192, 8192), normal(8192, 8192)
    mask = torch.rand(64, 64, device="cuda") < 0.5
    a = a.t() if which == "b" else a
    return lambda: warploom.block_sparse_gemm(a, b, mask, sparse=which)


def forward() -> Call:
    """Attention in e4m3: 16 heads of 128, 16,384 keys, no mask."""
    kind = torch.float8_e4m3fn
    q, k, v = (normal(1, 16384, 16, 128, dtype=kind).transpose(1, 2) for _ in range(3))
    one, laid_out = torch.ones(1, 16, device="cuda"), transpose_values(v)
    scales = {"q_descale": one, "k_descale": one, "v_descale": one}
    return lambda: warploom.attention(q, k, laid_out, v_layout="dim_major", **scales)


def backward() -> Call:
    """Gradients of causal attention: 16 heads of 192 with 128, 8,192 keys, a batch of two."""
    q, k, v = (normal(2, 8192, 16, dim).transpose(1, 2).requires_grad_() for dim in (192, 192, 128))
    out = warploom.attention(q, k, v, causal=True)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def block_scaled(n: int, k: int) -> Call:
    """512 rows by weights of n x k in e4m3, with scales of 1x128 by 128x128."""
    x, weight = (normal(rows, k, dtype=torch.float8_e4m3fn) for rows in (512, n))
    scale_a = torch.rand(512, k // 128, device="cuda")
    scale_b = torch.rand(n // 128, k // 128, device="cuda")
    scales = {"scale_a": scale_a, "scale_b": scale_b}
    return lambda: warploom.gemm(x, weight.t(), **scales, out_dtype=torch.bfloat16)


CALLS: dict[str, Callable[[], Call]] = {
    **{one.__name__: one for one in (ternary, int8, nvfp4, forward, backward)},
    "sparse_b": lambda: sparse("b"),
    "sparse_d": lambda: sparse("out"),
    "block_scaled_7168x16384": lambda: block_scaled(7168, 16384),
    "block_scaled_32768x512": lambda: block_scaled(32768, 512),
    "block_scaled_4096x7168": lambda: block_scaled(4096, 7168),
}


@click.command()
@click.argument("which", nargs=-1, required=True, type=click.Choice(list(CALLS)))
@click.option("--csv", "kept", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--run", is_flag=True, hidden=True, help="Make the calls: what ncu watches.")
def main(which: tuple[str, ...], *, kept: Path | None, run: bool) -> None:
    """Print the hardware counters of one call of each of these kernels."""
    if run:
        torch.manual_seed(0)
        made = [CALLS[name]() for name in which]
        for call in made:
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
        for call in made:
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
        return
    again = [sys.executable, __file__, *which, "--run"]
    subprocess.run(again, check=True)  # noqa: S603 (ourselves: nothing is compiled under ncu)
    with tempfile.TemporaryDirectory() as folder:
        file = kept or Path(folder) / "counters.csv"
        chosen = [word for section in SECTIONS for word in ("--section", section)]
        ncu = ["ncu", "--clock-control", "none", "--profile-from-start", "off", *chosen]
        watched = [*ncu, "--csv", "--page", "raw", "--log-file", os.fspath(file), *again]
        subprocess.run(watched, check=True)  # noqa: S603 (ncu, as the user has it)
        for line in shown(file.read_text()):
            click.echo(line)


def shown(text: str) -> Iterator[str]:
    """The lines of a table of ncu's that say most, kernel by kernel."""
    rows = [row for row in csv.reader(text.splitlines()) if len(row) > 10]
    names, units, *kernels = rows
    for row in kernels:
        values = dict(zip(names, row, strict=True))
        scale = {"us": 1e3, "usecond": 1e3, "ms": 1e6}.get(units[names.index(TIME)], 1)
        if float(values[TIME].replace(",", "")) * scale < LEAST:
            continue
        yield values["Kernel Name"]
        for name, unit in zip(names, units, strict=True):
            if SHOWN.search(name) and values[name] not in ("", "0"):
                yield f"  {name:70} {values[name]:>12} {unit}"


if __name__ == "__main__":
    main()
