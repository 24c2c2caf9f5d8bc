"""The front door's functions: gemm, plan, load, warmup, explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch

from warploom.errors import WarploomError
from warploom.generator.build import build_many
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime import epilogue as epilogues
from warploom.runtime import gemm as gemms
from warploom.runtime import kernel as kernels
from warploom.runtime import operators
from warploom.runtime.counters import counters
from warploom.runtime.epilogue import Item, Keywords
from warploom.runtime.gemm import GemmPlan
from warploom.runtime.gemm_problem import Options

__all__ = ["Explanation", "counters", "explain", "gemm", "load", "plan", "warmup"]


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    epilogue: Sequence[Item] | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Return scale_d (activation(scale_a scale_b (a b) + bias) + beta residual).

    a is [.., M, K] and b [.., K, N] (a torch weight [N, K] is b after .t()), of one type: fp16,
    bf16, e4m3, e5m2 or int8; e4m3 and e5m2 also mix. Batches broadcast. Products accumulate in
    fp32, for int8 in int32; sums of fp8 keep about 14 bits, with `accumulation="promoted"` only
    those over 128 of k, at the cost of some speed. The result [.., M, N] has `out_dtype`: by
    default that of 16-bit operands, int32 for int8 without epilogue, else bf16. 8-bit results
    saturate, round to nearest even and keep NaN (int8: 0).

    scale_a is a number, a one-element tensor or [M]; scale_b likewise or [N]; tensors are fp32.
    bias is [N], residual [M, N]; both fp16, bf16 or fp32. beta = 0 does not read the residual.
    Where b has batches, vectors and residual may have them too, before the dimensions given here.
    activation is relu, gelu, gelu_tanh or silu. amax, an fp32 tensor of one element, is raised to
    the largest magnitude before scale_d, a number or a one-element fp32 tensor. `epilogue` gives
    any other order, as a list of items (see `runtime/epilogue.py`). `out` may be exactly the
    residual. `spec` names the kernel.

    Runs on the current stream without waiting. On CPU tensors the reference computes the same.
    Raises ProblemError before anything is launched.
    """
    listed: Sequence[Item] = ()
    steps = (scale_a, scale_b, bias, activation, residual, amax, scale_d, epilogue)
    if any(x is not None for x in steps):
        listed = epilogues.items(
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            activation=activation,
            residual=residual,
            beta=beta,
            amax=amax,
            scale_d=scale_d,
            epilogue=epilogue,
        )
    if torch.compiler.is_compiling():
        return operators.call(a, b, listed, out, out_dtype, accumulation, spec)
    if isinstance(spec, str):
        spec = parse_name(spec)
    return gemms.gemm(a, b, listed, out, Options(out_dtype, accumulation, spec))


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    spec: KernelSpec | str | None = None,
    **keywords: Unpack[Keywords],
) -> GemmPlan:
    """Plan a call: build and load its kernel now, and return what runs it with least overhead.

    Arguments are those of `gemm`. `plan(a, b, out, ...)` then runs tensors of the same shapes,
    strides, types and alignment, with the same keywords; pass `out` here if it is passed there.
    """
    found = parse_name(spec) if isinstance(spec, str) else spec
    options = Options(out_dtype, accumulation, found)
    return gemms.plan(a, b, epilogues.items(**keywords), out, options)


def load(spec: KernelSpec | str) -> kernels.Kernel:
    """Return the loaded kernel of a spec or name, building it when the store lacks it."""
    found = parse_name(spec) if isinstance(spec, str) else spec
    loaded = kernels.kernel(found, torch.cuda.current_device())
    loaded.load(found.name, torch.cuda.current_device())
    return loaded


def warmup(path: str | Path, *, jobs: int | None = None) -> int:
    """Build every kernel of a configuration, in parallel, and load them on the current device.

    Returns their number. Raises the first CompilationError, after all have been tried.
    """
    from warploom.generator.space import expand_file  # brings pydantic, which no call needs

    specs = expand_file(Path(path)).specs
    for result in build_many(specs, kernels.store(), jobs):
        if isinstance(result, WarploomError):
            raise result
    if torch.cuda.is_available():
        for spec in specs:
            load(spec)
    return len(specs)


@dataclass(frozen=True)
class Explanation:
    """What a call would do, and why."""

    kernel: str
    reason: str
    grid: int
    stored: bool
    copies: tuple[str, ...]
    counters: dict[str, int]

    def __str__(self) -> str:
        """One fact a line."""
        copies = ", ".join(self.copies) or "none"
        stored = "compiled" if self.stored else "not compiled yet"
        return (
            f"kernel   {self.kernel}\nbecause  {self.reason}\nstore    {stored}\n"
            f"grid     {self.grid} blocks\ncopies   {copies}"
        )


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: Accumulation = "fast",
    spec: KernelSpec | str | None = None,
    **keywords: Unpack[Keywords],
) -> Explanation:
    """Say which kernel `gemm` would run for these arguments, and what it would copy."""
    options: Any = {"out_dtype": out_dtype, "accumulation": accumulation, "spec": spec}
    planned = plan(a, b, out=out, **options, **keywords)
    copies = [name for name, copy in (("a", planned.copy_a), ("b", planned.copy_b)) if copy]
    return Explanation(
        kernel=planned.choice.spec.name,
        reason=planned.choice.reason,
        grid=planned.launch.launches[0].grid if planned.launch else 0,
        stored=planned.launch is not None,
        copies=tuple(copies),
        counters=counters.as_dict(),
    )
