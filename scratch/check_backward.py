"""dq, dk, dv of every spec beside float64 autograd, in units of twice plain torch's error.

PYTHONPATH=<link tree> python3 scratch/check_backward.py [dim ...] [--kinds none,causal,...]
"""

import argparse
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from backward_common import (  # noqa: E402
    DTYPES, KINDS, SCHEDULES, SOFTCAP, UNBOUNDED, build, make, plain, plan, spec,
)  # fmt: skip

parser = argparse.ArgumentParser()
parser.add_argument("dims", nargs="*", type=int)
parser.add_argument("--kinds", default=",".join(KINDS))
parser.add_argument("--runs", type=int, default=20, help="that deterministic kernels repeat")
args = parser.parse_args()
dims, kinds = args.dims or list(SCHEDULES), args.kinds.split(",")
# (batch, heads, kv_heads, seq_q, seq_k, interleaved, right - (seq_k - seq_q), dim taken off)
CASES = [
    (1, 1, 1, 64, 64, False, 0, 0), (1, 1, 1, 128, 128, False, 0, 0), (1, 2, 2, 512, 512, False, 0, 0),
    (2, 3, 3, 200, 333, True, 0, 0), (1, 4, 2, 77, 130, True, 0, 0), (2, 6, 2, 333, 77, False, 0, 0),
    (1, 2, 1, 1, 1000, False, 0, 8), (1, 2, 2, 1000, 1, True, 0, 0), (1, 2, 2, 257, 500, True, -300, 16),
    (3, 4, 4, 1021, 1021, True, 0, 0), (1, 8, 1, 640, 640, False, 5, 24), (2, 7, 1, 300, 131, True, 0, 0),
    (1, 16, 2, 200, 300, True, 0, 8),
]  # fmt: skip
# (heads, kv_heads, rows of sequences, columns, rows after the last, columns after, bottom right)
PACKED = [
    (2, 2, (64, 64), (64, 64), 0, 0, False), (4, 2, (1, 0, 129, 300), (5, 77, 0, 301), 0, 0, True),
    (7, 1, (257, 3, 0), (130, 200, 9), 75, 140, False), (8, 1, (1, 70, 300), (9, 200, 301), 1, 9, False),
    (2, 1, (0, 511), (1, 640), 1, 1, True),
]  # fmt: skip
NAMES = ("dq", "dk", "dv")


def units(found, exact, rough):
    result = []
    for f, e, r in zip(found, exact, rough):
        error = (f.double() - e).abs().max().item() if e.numel() else 0.0
        allowed = 2 * (r.double() - e).abs().max().item() + 2**-8 * e.abs().max().item() / 4 if e.numel() else 1.0
        result.append(error / max(allowed, 1e-30) if error == error else float("inf"))
    return result


def bounds(mask, seq_q, seq_k, shift):
    right = seq_k - seq_q + shift if mask != "none" else UNBOUNDED
    return (100 if mask == "window" else UNBOUNDED), right


def repeated(run, t):
    """Whether more runs give the same bits."""
    first = [t[n].clone() for n in NAMES]
    for _ in range(args.runs):
        run()
        if not all(torch.equal(t[n], f) for n, f in zip(NAMES, first)):
            return False
    return True


def fixed(one, case, seed):
    batch, heads, kv_heads, seq_q, seq_k, interleaved, shift, off = case
    operation = one.operation
    t = make(batch, heads, kv_heads, seq_q, seq_k, operation.dim - off, operation.element, seed, interleaved)
    left, right = bounds(operation.mask, seq_q, seq_k, shift)
    cap = SOFTCAP if operation.softcap else None
    dlse = torch.randn(batch, heads, seq_q, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) if seed % 2 else None
    operands = [t[n] for n in ("q", "k", "v", "do")]
    o, lse, *exact = plain(*operands, left, right, torch.float64, cap, dlse)
    _, _, *rough = plain(*operands, left, right, t["q"].dtype, cap, dlse)
    t |= {"o": torch.empty_like(t["q"]).copy_(o), "lse": lse.float().contiguous(), "dlse": dlse}
    for name in NAMES:
        t[name] = torch.full_like(t[name[1:]], torch.nan)
    run = plan(one, t, left, right)
    run()
    torch.cuda.synchronize()
    same = not operation.deterministic or repeated(run, t)
    return units([t[n] for n in NAMES], exact, rough), same


def packed(one, case, seed):
    heads, kv_heads, rows, columns, more_rows, more_columns, bottom_right = case
    operation, dtype = one.operation, DTYPES[one.operation.element]
    generator = torch.Generator("cuda").manual_seed(seed)

    def tensor(total, h):
        return torch.randn(total, h, operation.dim, device="cuda", generator=generator).to(dtype)

    total_q, total_k = sum(rows) + more_rows, sum(columns) + more_columns
    t = {"q": tensor(total_q, heads), "k": tensor(total_k, kv_heads), "v": tensor(total_k, kv_heads), "do": tensor(total_q, heads)}
    t |= {"o": torch.full_like(t["q"], torch.nan), "lse": torch.full((heads, total_q), torch.nan, device="cuda"), "dlse": None}
    for name, lengths in (("cu_seqlens_q", rows), ("cu_seqlens_k", columns)):
        t[name] = torch.tensor([sum(lengths[:i]) for i in range(len(lengths) + 1)], device="cuda", dtype=torch.int32)
    for name in ("q", "do"):
        t[name][sum(rows):] = torch.nan
    for name in ("k", "v"):
        t[name][sum(columns):] = torch.nan
    left, right = (100 if operation.mask == "window" else UNBOUNDED), (0 if operation.mask != "none" else UNBOUNDED)
    cap = SOFTCAP if operation.softcap else None
    for name in NAMES:
        t[name] = torch.full_like(t[name[1:]], torch.nan)
    exact, rough = ([torch.zeros_like(t[n[1:]], dtype=torch.float64) for n in NAMES] for _ in "12")
    at_q = at_k = 0
    for r, c in zip(rows, columns):
        of_q, of_k = slice(at_q, at_q + r), slice(at_k, at_k + c)
        at_q, at_k = at_q + r, at_k + c
        if r == 0:
            continue
        if c == 0:
            t["o"][of_q], t["lse"][:, of_q] = 0, -torch.inf
            continue
        own = [t[n][s].transpose(0, 1) for n, s in (("q", of_q), ("k", of_k), ("v", of_k), ("do", of_q))]
        shift = c - r if bottom_right and operation.mask != "none" else 0
        l, rt = (left - shift if left < UNBOUNDED else left), (right + shift if right < UNBOUNDED else right)
        o, lse, *e = plain(*own, l, rt, torch.float64, cap)
        _, _, *p = plain(*own, l, rt, dtype, cap)
        t["o"][of_q], t["lse"][:, of_q] = o.transpose(0, 1).to(dtype), lse.float()
        for into, parts in ((exact, e), (rough, p)):
            for whole, part, s in zip(into, parts, (of_q, of_k, of_k)):
                whole[s] = part.transpose(0, 1).double()
    run = plan(one, t, left, right, (rows, columns), bottom_right)
    run()
    torch.cuda.synchronize()
    same = not operation.deterministic or repeated(run, t)
    return units([t[n] for n in NAMES], exact, rough), same


specs = {
    (dim, kind, schedule): one
    for dim in dims for kind in kinds for schedule in SCHEDULES[dim]
    if not ("det" in kind and (schedule[4] == "direct" or schedule[5:] not in ((), (1,))))
    if (one := spec(dim, schedule, kind, "fp16" if kind == "window" else "bf16"))
}  # fmt: skip
build(list(specs.values()))
print(torch.cuda.get_device_name(), torch.__version__)
bad = 0
for (dim, kind, schedule), one in specs.items():
    worst, lines = 0.0, []
    check, cases = (packed, PACKED) if "packed" in kind else (fixed, CASES)
    for seed, case in enumerate(cases):
        found, same = check(one, case, seed)
        worst = max(worst, *found)
        if not max(found) <= 1 or not same:
            lines.append(f"   BAD {case}: dq %.3g dk %.3g dv %.3g{'' if same else ' NOT BIT-EQUAL'}" % tuple(found))
    bad += bool(lines)
    print(f"{'bad ' if lines else 'good'} {dim} {kind} {schedule}: worst {worst:.3f} of the allowed error", flush=True)
    print("\n".join(lines[:6]), end="\n" if lines else "")
print(f"{len(specs) - bad} of {len(specs)} specs good")
