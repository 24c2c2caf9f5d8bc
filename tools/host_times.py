"""The host's time of warm calls next to torch's of the same: `host_times.py --json FILE`.

Problems are so small that the GPU never keeps the host waiting. In each round every call of a row
has its turn, in random order, so that all meet the same machine.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).parents[1]))

import warploom
from benchmarks.samplers import hosted
from warploom.atomic_file import replace_file

Call = Callable[[], object]
ROUNDS = 25
EXTENTS = (1, 8, 128, 128)  # batch, heads, rows, dim


def rows() -> Iterator[tuple[str, float | None, dict[str, Call]]]:
    """Yield each row's name, the ratio aimed at, and its calls: ours first, then torch's."""
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (draw(EXTENTS) for _ in range(3))
    of_torch = functional.scaled_dot_product_attention
    yield (
        "attention, F.sdpa",
        1.0,
        {"ours": lambda: warploom.attention(q, k, v), "torch": lambda: of_torch(q, k, v)},
    )
    yield (
        "sdpa, F.sdpa",
        1.3,
        {"ours": lambda: warploom.sdpa(q, k, v), "torch": lambda: of_torch(q, k, v)},
    )
    q2, k2, v2 = (one.clone().requires_grad_() for one in (q, k, v))
    yield (
        "attention with autograd, F.sdpa",
        1.2,
        {"ours": lambda: warploom.attention(q2, k2, v2), "torch": lambda: of_torch(q2, k2, v2)},
    )
    from warploom.flash_attn import flash_attn_func

    q3, k3, v3 = (one.transpose(1, 2).contiguous() for one in (q, k, v))

    def flash() -> object:
        heads = partial(torch.transpose, dim0=1, dim1=2)
        return heads(of_torch(heads(q3), heads(k3), heads(v3)))

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield (
            "flash_attn_func, F.sdpa by its flash kernel",
            0.8,
            {"ours": lambda: flash_attn_func(q3, k3, v3), "torch": flash},
        )
    one, cache = draw(4, 32, 1, 128), [draw(4, 8, 1024, 128) for _ in range(2)]
    lengths, out = torch.full((4,), 64, dtype=torch.int32, device="cuda"), torch.empty_like(one)
    decode = partial(warploom.attention_decode, one, *cache, cache_seqlens=lengths)
    yield "attention_decode (bars 20 and 16 us)", None, {"ours": decode}
    yield "attention_decode, out given", None, {"ours": partial(decode, out=out)}
    x = draw(16, 256)
    linear = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    weight = warploom.quantize(linear.weight.detach(), "int4", group=128)
    quantized = warploom.nn.QuantizedLinear.from_packed(weight)
    given = x.clone().requires_grad_()
    yield (
        "QuantizedLinear with autograd, nn.Linear",
        1.1,
        {"ours": lambda: quantized(given), "torch": lambda: linear(given)},
    )
    a, b, d = draw(256, 256), draw(256, 256), draw(256, 256)
    plan = warploom.plan(a, b, out=d)
    mm = partial(torch.mm, a, b, out=d)
    yield "gemm, mm", None, {"ours": lambda: warploom.gemm(a, b), "torch": lambda: torch.mm(a, b)}
    yield "gemm, out given, mm", 0.85, {"ours": lambda: warploom.gemm(a, b, out=d), "torch": mm}
    yield "plan, out given, mm", 0.43, {"ours": lambda: plan(a, b, d), "torch": mm}


def medians(calls: dict[str, Call]) -> dict[str, float]:
    """The median seconds of each call."""
    samplers = {name: hosted([call]) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name in random.sample(list(calls), len(calls)):
            found[name].append(samplers[name]())
    return {name: statistics.median(times) for name, times in found.items()}


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where every time goes.")
def main(file: Path | None) -> None:
    """Measure all rows on one core, print the times and ratios, write them."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = {}
    for name, aim, calls in rows():
        found[name] = took = medians(calls)
        ratio = f"{took['ours'] / took['torch']:.2f} of torch" if "torch" in took else ""
        aimed = f"(aim {aim})" if aim else ""
        times = "  ".join(f"{who} {1e6 * seconds:.1f} us" for who, seconds in took.items())
        click.echo(f"{name:45s} {times}  {ratio} {aimed}")
    if file:
        replace_file(file, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
