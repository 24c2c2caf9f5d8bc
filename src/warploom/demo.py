"""`make demo`: from a YAML file to kernels in the store, then one layer of Llama 3 8B, checked.

The kernels of configs/*/smoke.yaml are generated and compiled, which needs no GPU. Then the seven
GEMMs of the layer run through `warploom.gemm`, and its attention through `warploom.attention`, with
its gradients, and are held against float64: on a Hopper GPU, with times beside torch's, or else on
the CPU reference with fewer tokens. The exit code is 3 if a result is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import click

from warploom.cli.compile import COLUMNS, row
from warploom.cli.output import Output, reporting
from warploom.errors import ResultError, WarploomError
from warploom.generator.architectures import served, serving
from warploom.generator.gpus import DEFAULT
from warploom.generator.specification import KernelSpec

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


@click.command()
@reporting
def command(output: Output) -> None:
    """Compile the smoke configuration, then run and check one transformer layer."""
    output.for_people = True
    compile_kernels(output)
    device = "cuda" if _has_hopper(output) else "cpu"
    run_layer(output, device)
    run_attention(output, device)


# ---- Kernels -------------------------------------------------------------------------------------


def compile_kernels(output: Output) -> None:
    """Generate and compile every kernel of configs/*/smoke.yaml that is not in the store yet."""
    from warploom.generator import build, configurations
    from warploom.generator.space import expand_file

    specs = [spec for path in configurations.smoke() for spec in expand_file(path).specs]
    compiled_before = build.counters.compiles
    stored: set[KernelSpec] = set()
    output.line(f"{len(specs)} kernels of configs/*/smoke.yaml, from YAML to cubin:")
    with output.progress("compiling", total=len(specs)) as advance:

        def done(spec: KernelSpec, result: build.Result) -> None:
            if build.counters.compiles == compiled_before:  # what is stored is handed out first
                stored.add(spec)
            advance(spec.digest[:8])

        results = build.build_many(specs, on_done=done)
    rows: list[list[object]] = []
    for spec, result in zip(specs, results, strict=True):
        if isinstance(result, WarploomError):
            raise result
        rows.append(row(spec, result, stored=spec in stored))
    output.table("kernels", COLUMNS, rows)


# ---- Layer ---------------------------------------------------------------------------------------


def run_layer(output: Output, device: str) -> None:
    """Run and check the GEMMs of the layer; ResultError if one is wrong."""
    import torch

    tokens = TOKENS[device]
    torch.manual_seed(0)
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU reference"
    output.line(f"\nThe seven GEMMs of one Llama 3 8B layer, {tokens} tokens in bf16, on {where}:")
    with torch.no_grad():
        rows = [_multiply(name, weight, tokens, device) for name, weight in LAYER.items()]
    output.table("layer", ["projection", "M", "N", "K", *_columns(device, "torch.mm")], rows)
    wrong = [str(row[0]) for row in rows if not float(str(row[4])) <= 1]
    _conclude(output, f"projections {', '.join(wrong)}" if wrong else "", "differ")


def _multiply(name: str, weight: tuple[int, int], tokens: int, device: str) -> list[object]:
    """One row of the table."""
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
    return [name, tokens, n, k, error_share(d, a, b), *times, kernel]


# ---- Attention -----------------------------------------------------------------------------------


def run_attention(output: Output, device: str) -> None:
    """Run and check the attention of the layer and its gradients; ResultError if one is wrong."""
    import torch

    tokens = 8 * TOKENS[device]
    output.line(f"\nIts attention: {HEADS} query heads over {KV_HEADS}, {tokens} tokens:")
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, tokens, heads, DIM, device=device).bfloat16().transpose(1, 2)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    columns = ["mask", "tokens", *_columns(device, "torch")]
    with torch.no_grad():
        rows = [_attend(causal, q, k, v) for causal in (False, True)]
    output.table("attention", columns, rows)
    output.line("\nIts gradients:")
    gradients = [_differentiate(causal, q, k, v) for causal in (False, True)]
    output.table("gradients", columns, gradients)
    wrong = [
        f"{what} with mask {row[0]}"
        for what, found in (("attention", rows), ("gradients", gradients))
        for row in found
        if not float(str(row[2])) <= 1
    ]
    _conclude(output, ", ".join(wrong), "differs")


def _attend(causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[object]:
    """One row of the table; torch's time is that of its scaled_dot_product_attention."""
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
    return ["causal" if causal else "none", q.shape[2], share, *times, kernel]


def _differentiate(causal: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[object]:
    """One row of the table of gradients; torch's time is that of its own."""
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
    return ["causal" if causal else "none", q.shape[2], share, *times, kernel]


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


def _conclude(output: Output, wrong: str, verb: str) -> None:
    """Say that all is right; ResultError for what is wrong."""
    if wrong:
        raise ResultError(
            wrong,
            rule=f"{verb} from float64 by more than the bound of an element",
            fix="`make gpu-test` finds which kernels are wrong on this GPU",
        )
    output.line("Each element is within its bound of the float64 result.")


def _columns(device: str, peer: str) -> list[str]:
    """What the tables end with: times where kernels run, else what would run on an H200."""
    if device == "cuda":
        return ["error / bound", "microseconds", peer, "ratio", "kernel"]
    return ["error / bound", "kernel on an H200"]


def _times(device: str, ours: Callable[[], object], peer: Callable[[], object]) -> list[object]:
    """Microseconds of ours and of torch's, and how they compare; nothing where no kernel runs."""
    from warploom.runtime.measure import graph_sampler, interleave

    if device != "cuda":
        return []
    timings = interleave({"warploom": graph_sampler([ours]), "torch": graph_sampler([peer])})
    seconds, others = timings["warploom"].median, timings["torch"].median
    return [seconds * 1e6, others * 1e6, others / seconds]


def _elsewhere(device: str) -> str | None:
    """The GPU whose kernel is named where none runs: the one that records came of."""
    return ELSEWHERE if device == "cpu" else None


def _has_hopper(output: Output) -> bool:
    import torch

    if not torch.cuda.is_available():
        output.line("\nNo GPU here: the reference computes, on fewer tokens and without times.")
        return False
    capability = torch.cuda.get_device_capability()
    found = serving(capability)
    if found is None:
        output.line(
            f"\nThis GPU is of compute capability {capability}; kernels are for {served()}."
        )
    return found is not None


if __name__ == "__main__":
    command()
