"""Two checkouts of Warploom in one loop: did a change cost speed, on the GPU or on the host?

`python -m benchmarks.checkouts OLD/src NEW/src --json FILE`: a process for each path, which stands
first on its PYTHONPATH, measures every cell when told to; rounds alternate in random order, so that
both meet the same clocks. Cells are captured CUDA graphs over buffers that L2 does not hold, and
warm calls by the host's clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 9
SECONDS = 0.02  # of replays in a round
CACHED = 120e6  # bytes: more than twice the L2 of an H200


def cells() -> dict[str, dict[str, Any]]:
    """Every cell by name: products, attention, its gradients, and the host's time of calls."""
    found: dict[str, dict[str, Any]] = {}
    for m, n, k in (
        (1, 6144, 4096), (16, 4096, 14336), (64, 1280, 8192), (100, 6144, 4096), (512, 28672, 4096),
        (2048, 4096, 4096), (4096, 4096, 4096), (8192, 8192, 8192),
    ):  # fmt: skip
        for kind in ("bf16", "e4m3"):
            found[f"gemm {kind} {m}x{n}x{k}"] = {"what": "gemm", "type": kind, "extents": (m, n, k)}
    for dim in (64, 128, 256):
        for seq, batch in ((512, 4), (512, 32), (2048, 8), (8192, 2)):
            for causal in (False, True):
                one = {"extents": (batch, 2048 // dim, seq, dim), "causal": causal}
                name = f"dim {dim} {batch}x{seq} {'causal' if causal else 'full'}"
                found[f"attention {name}"] = {"what": "attention", **one}
                if seq == 2048:
                    found[f"gradients {name}"] = {"what": "gradients", **one}
    for lengths in ((300, 1700, 20, 4000, 900), (1024,) * 8):
        name = f"packed of {len(lengths)}"
        found[f"attention {name}"] = {"what": "packed", "lengths": lengths}
    for what in ("gemm", "gemm, out given", "plan, out given", "attention", "dynamic attention"):
        found[f"host {what}"] = {"what": "host", "call": what}
    return found


# ---- In the process of one checkout --------------------------------------------------------------


def calls(cell: dict[str, Any]) -> list[Callable[[], object]]:
    """The cell's call, once for each set of buffers."""
    import torch

    import warploom

    def random16(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").bfloat16()

    def one() -> tuple[Callable[[], object], float]:
        if cell["what"] == "gemm":
            m, n, k = cell["extents"]
            a, b = random16(m, k), random16(n, k)
            if cell["type"] == "e4m3":
                a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
            out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
            size = a.nbytes + b.nbytes + out.nbytes
            return (lambda: warploom.gemm(a, b.t(), out=out)), size
        if cell["what"] == "packed":
            total = sum(cell["lengths"])
            q, k, v = (random16(total, 16, 128) for _ in range(3))
            ends = torch.tensor([0, *cell["lengths"]]).cumsum(0).int().cuda()
            packed = {
                "cu_seqlens_q": ends, "cu_seqlens_k": ends,
                "max_seqlen_q": max(cell["lengths"]), "max_seqlen_k": max(cell["lengths"]),
            }  # fmt: skip
            return (lambda: warploom.attention(q, k, v, causal=True, **packed)), 4 * q.nbytes
        q, k, v = (random16(*cell["extents"]) for _ in range(3))
        if cell["what"] == "attention":
            return (lambda: warploom.attention(q, k, v, causal=cell["causal"])), 4 * q.nbytes
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out, dout = warploom.attention(q, k, v, causal=cell["causal"]), random16(*q.shape)
        return (lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)), 8 * q.nbytes

    first, size = one()
    return [first, *(one()[0] for _ in range(min(15, math.ceil(CACHED / size))))]


def timed_on_gpu(cell: dict[str, Any]) -> Callable[[], float]:
    """Return what measures the seconds of one call, in a replayed graph."""
    import torch

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # where autograd then has its backward passes
        found = calls(cell)
        for call in found:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in found:
            call()

    def replays(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    replays(2)
    count = max(1, math.ceil(SECONDS / replays(3)))
    return lambda: replays(count) / len(found)


def timed_on_host(cell: dict[str, Any]) -> Callable[[], float]:
    """Return what measures the host's seconds of one warm call of a small problem."""
    import torch

    import warploom

    a, b = (torch.randn(256, 256, device="cuda").bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    q = torch.randn(1, 8, 256, 64, device="cuda").bfloat16()
    planned, dynamic = warploom.plan(a, b, out=out), dynamic_name()
    call: Callable[[], object] = {
        "gemm": lambda: warploom.gemm(a, b),
        "gemm, out given": lambda: warploom.gemm(a, b, out=out),
        "plan, out given": lambda: planned(a, b, out),
        "attention": lambda: warploom.attention(q, q, q),
        "dynamic attention": lambda: warploom.attention(q, q, q, causal=True, spec=dynamic),
    }[cell["call"]]

    def seconds(count: int = 200) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return took / count

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # both on one core, in turns
    with torch.no_grad():
        seconds()
        return lambda: min(seconds() for _ in range(10))


def dynamic_name() -> str:
    """A kernel whose blocks take tiles from a counter."""
    from warploom.generator.architectures import ARCHITECTURES
    from warploom.generator.families import family
    from warploom.generator.families.attention_forward import AttentionOperation
    from warploom.generator.specification import KernelSpec

    wanted = AttentionOperation("bf16", 64, "causal", False, "fixed")
    fields = {"q_tile": 128, "kv_tile": 64, "pingpong": True, "scheduler": "dynamic"}
    arch = next(iter(ARCHITECTURES))
    schedule = family(wanted.family).complete(arch, wanted, fields)
    return KernelSpec(arch, wanted, schedule).name


def serve() -> None:
    """Measure the cells that standard input names, a line each; answer with seconds."""
    known: dict[str, dict[str, Any]] = cells()
    ready: dict[str, Callable[[], float]] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in ready:
            make = timed_on_host if known[name]["what"] == "host" else timed_on_gpu
            ready.clear()  # one cell's memory at a time
            ready[name] = make(known[name])
            print("ready", flush=True)
        else:
            print(ready[name](), flush=True)


# ---- In the process that asks --------------------------------------------------------------------


def main() -> None:
    """Measure, print the ratios, write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="two folders that hold the package")
    parser.add_argument("--match", default="", help="only cells whose name has this text")
    parser.add_argument("--json", type=Path, help="where every time goes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve()
        return
    if len(given.paths) != 2:
        parser.error("two paths are compared")
    servers = [Server(path.resolve()) for path in given.paths]
    found: dict[str, list[list[float]]] = {}
    for name in (name for name in cells() if given.match in name):
        for one in servers:
            one.ask(name)
        for one in servers:
            one.answer()
        found[name] = [[], []]
        for _ in range(ROUNDS):
            for index in random.sample((0, 1), 2):
                servers[index].ask(name)
                found[name][index].append(float(servers[index].answer()))
        old, new = (statistics.median(times) * 1e6 for times in found[name])
        print(f"{name:40s} {old:10.2f} us {new:10.2f} us  old / new {old / new:.3f}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    for kind in dict.fromkeys(name.split()[0] for name in found):
        ratios = [
            math.log(statistics.median(old) / statistics.median(new))
            for name, (old, new) in found.items()
            if name.split()[0] == kind
        ]
        print(f"{kind}: geometric mean of old / new {math.exp(statistics.mean(ratios)):.4f}")


class Server:
    """The process of one checkout."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, "--serve"],
            env={**os.environ, "PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str) -> None:
        """Have a cell made ready, or measured once."""
        if self._process.stdin:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()

    def answer(self) -> str:
        """What it says."""
        answer = self._process.stdout.readline() if self._process.stdout else ""
        if not answer:
            raise SystemExit("a checkout's process ended: see above")
        return answer.strip()


if __name__ == "__main__":
    main()
