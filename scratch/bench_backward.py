"""TFLOP/s of every spec beside torch's SDPA backward (cuDNN; dim > 128: FlashAttention-2), 16k tokens, hidden 2048; and of each launch.

PYTHONPATH=<link tree> python3 scratch/bench_backward.py [dim ...] [--seq 512,2048,16384]
"""

import argparse
import os
import statistics
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from backward_common import SCHEDULES, UNBOUNDED, build, make, plan, spec  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("dims", nargs="*", type=int)
parser.add_argument("--seq", default="512,2048,16384")
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--det", action="store_true", help="deterministic kernels too")
args = parser.parse_args()
dims = args.dims or list(SCHEDULES)
KINDS = ("", "det") if args.det else ("",)
specs = {
    (dim, mask, (*schedule, det)): one
    for dim in dims for mask in ("none", "causal") for schedule in SCHEDULES[dim] for det in KINDS
    if not (det and (schedule[4] == "direct" or schedule[5:] not in ((), (1,))))
    if (one := spec(dim, schedule, f"{det} {mask}".strip().replace("det none", "det")))
}  # fmt: skip
build(list(specs.values()))
print(torch.cuda.get_device_name(), torch.__version__)


def milliseconds(function, repeat):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeat):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeat


for dim in dims:
    for mask in ("none", "causal"):
        for seq in map(int, args.seq.split(",")):
            batch, heads, causal = 16384 // seq, max(1, 2048 // dim), mask == "causal"
            flops = 10 * batch * heads * seq * seq * dim / (2 if causal else 1)
            t = make(batch, heads, heads, seq, seq, dim)
            leaves = [t[n].detach().requires_grad_() for n in ("q", "k", "v")]
            wide = [SDPBackend.FLASH_ATTENTION] if dim > 128 else [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
            with sdpa_kernel(wide, set_priority=True):
                out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            t["o"] = out.detach()
            s = torch.empty(batch, heads, seq, device="cuda")
            for b in range(batch):  # lse in slices: the scores need memory
                for h in range(heads):
                    for at in range(0, seq, 4096):
                        x = (
                            t["q"][b, h, at : at + 4096].float() @ t["k"][b, h].float().T
                        ) * dim**-0.5
                        if causal:
                            row = torch.arange(at, at + x.shape[0], device="cuda")[:, None]
                            x.masked_fill_(torch.arange(seq, device="cuda")[None] > row, -torch.inf)
                        s[b, h, at : at + 4096] = torch.logsumexp(x, -1)
            t["lse"] = s
            for name in ("q", "k", "v"):
                t["d" + name] = torch.zeros_like(t[name])
            peer = lambda: torch.autograd.grad(out, leaves, t["do"], retain_graph=True)  # noqa: E731
            exact = peer()
            candidates, prepared = {"sdpa": peer}, {}
            for (d, m, schedule), one in specs.items():
                if (d, m) == (dim, mask):
                    run = plan(one, t, right=0 if causal else UNBOUNDED)
                    prepared[schedule] = run()
                    torch.cuda.synchronize()
                    for name, e in zip(("dq", "dk", "dv"), exact):
                        gap = (
                            t[name].float() - e.float()
                        ).abs().max().item() / e.float().abs().max().item()
                        if not gap < 0.03:
                            print("DIFFERS from sdpa", schedule, name, gap)
                    candidates[schedule] = run
            times = {name: [] for name in candidates}
            for name, function in candidates.items():
                milliseconds(function, 2)
            once = milliseconds(candidates["sdpa"], 3)
            repeat = max(2, min(20, int(30 / once)))
            for _ in range(args.rounds):
                for name, function in candidates.items():
                    times[name].append(milliseconds(function, repeat))
            print(f"\nd{dim} {mask} S{seq} B{batch} H{heads}", flush=True)
            for name, samples in times.items():
                ms = statistics.median(samples)
                split = ""
                if name in prepared:
                    parts = [
                        statistics.median(milliseconds(p.fire, 3) for _ in range(3))
                        for p in prepared[name]
                    ]
                    split = "  pre %.3f main %.3f (%.0f TF) post %.3f ms" % (
                        parts[0],
                        parts[1],
                        flops / parts[1] / 1e9,
                        parts[2],
                    )
                print(f"  {flops / ms / 1e9:6.0f} TFLOP/s {ms:8.3f} ms  {name}{split}", flush=True)
            del t, leaves, out, exact, candidates, prepared, s
            torch.cuda.empty_cache()
