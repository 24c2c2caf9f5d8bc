"""`make demo`: one layer of Llama 3 8B on Warploom, compiled and checked, in one screen.

The seven GEMMs of the layer run through `warploom.gemm`, and its attention through
`warploom.attention`, with its gradients. Each element is held against float64: on a Hopper GPU,
with times of torch in the same loop, or else on the CPU reference with fewer tokens. Their kernels
are compiled, which needs no GPU. The exit code is 3 if a result is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

import click

from warploom.cli.output import Output, reporting
from warploom.errors import ResultError, WarploomError
from warploom.generator.architectures import served, serving
from warploom.generator.gpus import DEFAULT
from warploom.generator.specification import parse_name

if TYPE_CHECKING:
    import torch

_HIDDEN, _KEY_VALUE, _MLP = 4096, 1024, 14336
LAYER = {  # the weights of one layer of Llama 3 8B, [N, K] as torch has them
    "q": (_HIDDEN, _HIDDEN),
    "k": (_KEY_VALUE, _HIDDEN),
    "v": (_KEY_VALUE, _HIDDEN),
    "o": (_HIDDEN, _HIDDEN),
    "gate": (_MLP, _HIDDEN),
    "up": (_MLP, _HIDDEN),
    "down": (_HIDDEN, _MLP),
}
TOKENS = {"cuda": 512, "cpu": 64}
ELSEWHERE = DEFAULT.name  # whose kernels are named on machines without a Hopper GPU
HEADS, KV_HEADS, DIM = 32, 8, 128  # of the layer's attention


COLUMNS = ["part", "shape", "tile", "registers", "error / bound"]
TIMES = ["us", "torch us", "ratio"]  # where kernels run: torch's time over Warploom's last


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the layer that was run and checked.

    share    the largest error of an element, as a share of its bound
    kernel   the name of the kernel that ran, or would run on ELSEWHERE
    times    microseconds, torch's, and their ratio; none where no kernel runs
    """

    name: str
    shape: str
    kernel: str
    share: float
    times: tuple[float, ...] = ()


@click.command()
@reporting
def command(output: Output) -> None:
    """Run and check one transformer layer, and compile its kernels."""
    output.for_people = True
    device = "cuda" if _has_hopper(output) else "cpu"
    with output.progress("computing", total=len(LAYER) + 4) as advance:
        parts = [*_gemms(device, advance), *_attentions(device, advance)]
    registers = compile_kernels(output, [one.kernel for one in parts])
    _show(output, parts, registers, device)
    if wrong := [one.name for one in parts if not one.share <= 1]:
        raise ResultError(
            ", ".join(wrong),
            rule="must differ from float64 by no more than the bound of each element",
            fix="`make gpu-test` finds which kernels are wrong on this GPU",
        )
    largest = max(one.share for one in parts)
    output.line(
        f"Checked: {len(parts)} results, every element against float64. "
        f"The largest error is {largest:.2f} of its bound."
    )
    output.document("largest error / bound", largest)
    attention = next(one.kernel for one in parts if "attention" in one.name)
    activate = Path(sys.prefix, "bin", "activate")
    hidden = which("warploom") is None and activate.is_file()
    output.line(f"Next, after `source {os.path.relpath(activate)}`:" if hidden else "Next:")
    for written, shows in _next(attention):
        output.line(f"  {written:<56}  {shows}")


def _next(kernel: str) -> list[tuple[str, str]]:
    """What to try next: a command, and what it shows."""
    asked = "warploom explain gemm --shapes 4096x6144x4096 --gpu h200"
    return [
        ("python -c 'import warploom; help(warploom.patch)'", "a model of transformers on it"),
        (f"warploom report {kernel[-8:]}", "attention: source, SASS, registers"),
        (asked, "which kernel runs, and why"),
        ("warploom emit configs/gemm/smoke.yaml", "from YAML to CUDA C++"),
    ]


def compile_kernels(output: Output, names: Sequence[str]) -> dict[str, int]:
    """Compile the kernels that are not in the kernel cache yet; return the registers of each."""
    from warploom.generator import build

    specs = [parse_name(name) for name in dict.fromkeys(names)]
    with output.progress("compiling", total=len(specs)) as advance:
        results = build.build_many(specs, on_done=lambda spec, _: advance(spec.digest[:8]))
    registers: dict[str, int] = {}
    for spec, result in zip(specs, results, strict=True):
        if isinstance(result, WarploomError):
            raise result
        registers[spec.name] = max(one.registers for one in result.resources.values())
    return registers


def _show(output: Output, parts: Sequence[Part], registers: dict[str, int], device: str) -> None:
    rows: list[list[object]] = []
    for one in parts:
        tile = "x".join(map(str, parse_name(one.kernel).schedule.tile))
        told = [one.name, one.shape, tile, registers[one.kernel], one.share]
        rows.append([*told, *one.times, one.kernel[-8:]])
    columns = [*COLUMNS, *(TIMES if device == "cuda" else ()), "kernel"]
    output.table("layer", columns, rows)
    output.document("kernels", {one.name: one.kernel for one in parts})


# ---- Layer ---------------------------------------------------------------------------------------


def _gemms(device: str, advance: Callable[[str], None]) -> list[Part]:
    import torch

    torch.manual_seed(0)
    parts = []
    for name, weight in LAYER.items():
        with torch.no_grad():
            parts.append(_multiply(name, weight, TOKENS[device], device))
        advance(name)
    return parts


def _multiply(name: str, weight: tuple[int, int], tokens: int, device: str) -> Part:
    """Run, check and time one GEMM."""
    import torch

    import warploom
    from warploom.runtime.families.gemm.reference import error_share

    n, k = weight
    a = torch.randn(tokens, k, device=device).bfloat16()
    b = (torch.randn(n, k, device=device) * k**-0.5).bfloat16().t()
    d = warploom.gemm(a, b)
    kernel = warploom.explain(a, b, gpu=_elsewhere(device)).kernel
    peer = torch.empty_like(d)
    times = _times(device, lambda: warploom.gemm(a, b, out=d), lambda: torch.mm(a, b, out=peer))
    return Part(name, f"{tokens}x{n}x{k}", kernel, error_share(d, a, b), times)


# ---- Attention -----------------------------------------------------------------------------------


def _attentions(device: str, advance: Callable[[str], None]) -> list[Part]:
    import torch

    tokens = 8 * TOKENS[device]
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, device=device).bfloat16().transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    parts = []
    for causal in (False, True):
        with torch.no_grad():
            parts.append(_attend(causal, q, k, v))
        advance("attention")
    for causal in (False, True):
        parts.append(_differentiate(causal, q, k, v))
        advance("gradients")
    return parts


def _shape(q: torch.Tensor) -> str:
    return f"{HEADS}/{KV_HEADS} heads, {q.shape[2]}"


def _name(what: str, *, causal: bool) -> str:
    return f"{what}{', causal' * causal}"


def _attend(causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Run, check and time attention; torch's time is of its scaled_dot_product_attention."""
    import torch

    import warploom
    from warploom.runtime.families._attention import reference
    from warploom.runtime.families._attention.function import Function
    from warploom.runtime.families._attention.mask import Band
    from warploom.runtime.measure import largest_share

    out, lse = warploom.attention(q, k, v, causal=causal, return_lse=True)
    band = Band(right=0) if causal else Band()
    function = Function(DIM**-0.5, band=band)
    exact, bound = reference.exact(q, k, v, function), reference.bound(q, k, v, function)
    share = max(map(largest_share, (out, lse), exact, bound))
    kernel = warploom.explain(q, k, v, causal=causal, gpu=_elsewhere(q.device.type)).kernel
    sdpa = torch.nn.functional.scaled_dot_product_attention
    times = _times(
        q.device.type,
        lambda: warploom.attention(q, k, v, causal=causal),
        lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=True),
    )
    return Part(_name("attention", causal=causal), _shape(q), kernel, share, times)


def _differentiate(causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Part:
    """Run, check and time its gradients; torch's time is that of its own."""
    import torch

    import warploom
    from warploom.runtime.families._attention.function import Function
    from warploom.runtime.families._attention.mask import Band
    from warploom.runtime.families.attention_backward import reference
    from warploom.runtime.measure import largest_share

    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    dout = torch.randn_like(q)
    out, lse = warploom.attention(leaves[0], leaves[1], leaves[2], causal=causal, return_lse=True)
    found = torch.autograd.grad(out, leaves, dout)
    function = Function(DIM**-0.5, band=Band(right=0) if causal else Band())
    given = reference.Tensors(q, k, v, out.detach(), lse.detach(), dout)
    exact, bound = reference.exact(given, function), reference.bound(given, function)
    share = max(map(largest_share, found, exact, bound))
    kernel = warploom.explain(q, k, v, causal=causal, gpu=_elsewhere(q.device.type)).backward
    sdpa = torch.nn.functional.scaled_dot_product_attention
    times = _times(
        q.device.type,
        _backward(warploom.attention, (q, k, v), dout, causal=causal),
        _backward(sdpa, (q, k, v), dout, is_causal=causal, enable_gqa=True),
    )
    return Part(_name("backward", causal=causal), _shape(q), kernel or "", share, times)


def _backward(
    attend: Callable[..., torch.Tensor],
    operands: Sequence[torch.Tensor],
    dout: torch.Tensor,
    **keywords: bool,
) -> Callable[[], object]:
    """A backward pass; the forward pass before it runs once, on the stream that times it.

    Its leaves are of that stream as well: autograd brings gradients to the stream on which a leaf
    was first used, and a capture must not wait for another.
    """
    import torch

    leaves: list[torch.Tensor] = []
    found: list[torch.Tensor] = []

    def call() -> object:
        if not found:
            leaves.extend(operand.detach().requires_grad_() for operand in operands)
            found.append(attend(*leaves, **keywords))
        return torch.autograd.grad(found[0], leaves, dout, retain_graph=True)

    return call


# ---- Both ----------------------------------------------------------------------------------------


def _times(
    device: str, ours: Callable[[], object], peer: Callable[[], object]
) -> tuple[float, ...]:
    """Microseconds of ours and of torch's, and how they compare; none where no kernel runs."""
    from warploom.runtime.measure import graph_sampler, interleave

    if device != "cuda":
        return ()
    timings = interleave({"warploom": graph_sampler([ours]), "torch": graph_sampler([peer])})
    seconds, others = timings["warploom"].median, timings["torch"].median
    return seconds * 1e6, others * 1e6, others / seconds


def _elsewhere(device: str) -> str | None:
    """The GPU whose kernel is named where none runs: the one that records came of."""
    return ELSEWHERE if device == "cpu" else None


def _has_hopper(output: Output) -> bool:
    """Whether kernels run here; says which layer is run, and on what."""
    import torch

    here, found = "no GPU here: on the CPU reference", None
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        found, here = serving(capability), torch.cuda.get_device_name()
        if found is None:
            here = f"on the CPU reference: compute capability {capability} is not {served()}"
    tokens = TOKENS["cuda" if found else "cpu"]
    output.line(f"One layer of Llama 3 8B, {tokens} tokens (attention: {8 * tokens}), bf16, {here}")
    if not found:
        output.line(f"Kernels are those of an {ELSEWHERE.removeprefix('NVIDIA ')}, compiled here.")
    return found is not None


if __name__ == "__main__":
    command()
