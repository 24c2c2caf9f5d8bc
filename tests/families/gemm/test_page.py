"""The page of products: what it says of other libraries, of schedules that compete, of errors."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import torch

import warploom
from benchmarks.peers._products import TYPES
from warploom.generator.space import expand_file

PAGE = (Path(__file__).parents[3] / "docs" / "families" / "gemm.md").read_text()


def test_the_measured_errors_have_their_place() -> None:
    assert PAGE.partition("## Numerics")[2].partition("\n## ")[0].count("<!-- error table") == 1


def test_the_kernels_that_the_page_lets_compete_compute_what_the_cells_do(tmp_path: Path) -> None:
    (arguments,) = re.findall(r"warploom bench gemm (.*--specs.*)", PAGE)
    name, kind = (re.findall(rf"--{option} (\S+)", arguments)[0] for option in ("specs", "types"))
    (block,) = re.findall(rf"^```yaml\n(# {re.escape(name)}\n.*?)^```$", PAGE, re.M | re.S)
    (tmp_path / name).write_text(block)
    specs = expand_file(tmp_path / name).specs
    assert {spec.operation for spec in specs} == {TYPES[kind]}


def test_what_other_libraries_call_it_computes_the_same() -> None:
    """The tables of `Coming from other libraries`, as far as torch on a CPU has the other side."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48)
    a, w = x.bfloat16(), weight.bfloat16()
    c = torch.randn(5, 48).bfloat16()
    close = partial(torch.testing.assert_close, rtol=0.02, atol=0.02, check_dtype=False)
    close(warploom.gemm(a, w.t()), torch.mm(a, w.t()))
    linear = torch.nn.functional.linear(a.float(), w.float(), bias)
    close(warploom.gemm(a, w.t(), bias=bias, out_dtype=torch.float32), linear)
    added = torch.addmm(c.float(), a.float(), w.t().float(), beta=0.5, alpha=2.0)
    gemm = warploom.gemm(a, w.t(), residual=c, beta=0.5, scale_a=2.0, out_dtype=torch.float32)
    close(gemm, added)
    rows, columns = torch.rand(5, 1), torch.rand(1, 48)
    scaled = (a.float() @ w.t().float()) * rows * columns
    close(warploom.gemm(a, w.t(), scale_a=rows, scale_b=columns, out_dtype=torch.float32), scaled)
