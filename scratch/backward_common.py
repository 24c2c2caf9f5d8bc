"""Specs and calls that check_backward.py and bench_backward.py share."""

import math
import os

import torch

from warploom.errors import SpecificationError
from warploom.generator.build import build_many
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardProblem,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import UNBOUNDED
from warploom.generator.specification import KernelSpec
from warploom.runtime.plan import plan_launches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TENSORS = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")

# dim -> schedules: (q_tile, kv_tile, stages, overlap, accumulate[, cluster])
SCHEDULES = {
    32: [
        (128, 128, 2, True, "direct"),
        (128, 128, 2, True, "bulk"),
        (64, 128, 2, True, "bulk"),
        (64, 128, 2, False, "bulk"),
    ],
    64: [
        (96, 128, 2, True, "direct", 4),
        (96, 128, 2, True, "direct"),
        (96, 128, 2, True, "bulk"),
        (112, 128, 2, True, "direct"),
        (112, 128, 2, True, "bulk"),
        (80, 128, 2, True, "direct"),
        (64, 128, 2, True, "bulk"),
        (64, 128, 2, False, "bulk"),
        (64, 64, 2, True, "bulk"),
    ],
    96: [
        (64, 128, 2, True, "bulk"),
        (64, 128, 2, False, "bulk"),
        (64, 128, 2, True, "direct"),
        (64, 64, 2, False, "bulk"),
    ],
    128: [
        (64, 128, 2, False, "bulk", 2),
        (64, 128, 2, False, "bulk", 4),
        (64, 128, 2, False, "bulk", 8),
        (80, 128, 2, False, "bulk", 4),
        (64, 128, 1, False, "bulk", 4),
        (64, 128, 2, False, "bulk"),
        (80, 128, 2, False, "bulk"),
        (64, 128, 2, True, "bulk"),
        (64, 64, 2, False, "bulk"),
    ],
    192: [
        (64, 128, 1, False, "bulk"),
        (64, 128, 2, False, "direct"),
        (64, 128, 2, True, "direct"),
        (64, 64, 2, False, "bulk"),
    ],
    256: [
        (64, 128, 1, False, "direct"),
        (80, 128, 1, False, "direct"),
        (48, 128, 1, False, "direct"),
        (48, 128, 2, False, "direct"),
        (32, 128, 2, False, "direct"),
        (64, 64, 1, False, "bulk"),
        (64, 64, 2, False, "direct"),
    ],
}
# name -> fields of the operation, for what is not plain
KINDS = {
    "none": {},
    "causal": {"mask": "causal"},
    "window": {"mask": "window"},
    "softcap": {"mask": "causal", "softcap": True},
    "det": {"deterministic": True},
    "det causal": {"mask": "causal", "deterministic": True},
    "det window": {"mask": "window", "deterministic": True},
    "packed": {"lengths": "packed"},
    "packed causal": {"mask": "causal", "lengths": "packed"},
    "det packed window softcap": {"mask": "window", "lengths": "packed", "softcap": True, "deterministic": True},
}
if os.environ.get("ONLY"):  # "q_tile,overlap;..."
    only = {tuple(map(int, x.split(","))) for x in os.environ["ONLY"].split(";")}
    SCHEDULES = {d: [s for s in ss if (s[0], int(s[3])) in only] for d, ss in SCHEDULES.items()}
SOFTCAP = 5.0


def spec(dim, schedule, kind="none", element="bf16"):
    """The spec, or None where the rules refuse it."""
    try:
        return KernelSpec(
            "sm_90a",
            AttentionBackwardOperation(element, dim, **KINDS[kind]),
            AttentionBackwardSchedule(*schedule),
        )
    except SpecificationError as error:
        print("refused", dim, kind, schedule, str(error)[:100])
        return None


def build(specs):
    """Compile all, and say which are not clean."""
    for one, result in zip(specs, build_many(specs), strict=True):
        if isinstance(result, Exception):
            raise SystemExit(f"{one.name}: {result}")
        for entry, resources in result.resources.items():
            if not resources.clean:
                print("NOT CLEAN", entry, resources)
        if result.serialised:
            print("SERIALISED", one.name)


def strides(tensor, packed=False):
    dim = tensor.shape[-1]
    found = tuple(s if n > 1 else dim for n, s in zip(tensor.shape[:-1], tensor.stride()[:-1]))
    return (0, found[1], found[0]) if packed else found  # [token, head, dim]


def plan(one, tensors, left=UNBOUNDED, right=UNBOUNDED, lengths=None, bottom_right=False):
    """A function that launches `one` on these tensors; it returns the prepared launches.

    `lengths`: of packed sequences, (rows, columns); tensors are [token, head, dim] then.
    """
    q, k = tensors["q"], tensors["k"]
    packed = lengths is not None
    if packed:
        (total_q, heads, dim), (total_k, kv_heads, _) = q.shape, k.shape
        batch, (seq_q, seq_k) = len(lengths[0]), map(max, lengths)
    else:
        (batch, heads, seq_q, dim), (_, kv_heads, seq_k, _) = q.shape, k.shape
        total_q, total_k = seq_q, seq_k
    problem = AttentionBackwardProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_k=seq_k,
        dim=dim,
        total_q=total_q,
        total_k=total_k,
        left=left,
        right=right,
        bottom_right=bottom_right,
        **{
            f"strides_{n}": strides(tensors[n], packed)
            for n in ("q", "k", "v", "o", "do", "dq", "dk", "dv")
        },
    )
    names = TENSORS + (OFFSETS if packed else ())
    softcap = one.operation.softcap
    scalars = ("scale", "softcap") if softcap else ("scale",)
    launch = plan_launches(one, problem, q.device.index or 0, names, scalars)
    addresses = tuple(0 if tensors.get(n) is None else tensors[n].data_ptr() for n in names)
    given = (dim**-0.5, SOFTCAP) if softcap else (dim**-0.5,)
    return lambda: launch.run(addresses, given, lambda: None)


def scores(q, k, scale, left, right, softcap=None):
    group = q.shape[-3] // k.shape[-3]
    s = (q @ k.repeat_interleave(group, -3).transpose(-1, -2)) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if left < UNBOUNDED or right < UNBOUNDED:
        row = torch.arange(q.shape[-2], device=q.device)[:, None]
        column = torch.arange(k.shape[-2], device=q.device)[None]
        s = s.masked_fill((column > row + right) | (column < row - left), -math.inf)
    return s


def plain(q, k, v, do, left, right, dtype, softcap=None, dlse=None):
    """o, lse, dq, dk, dv by autograd through the plain expression in `dtype`."""
    q, k, v = (t.to(dtype).detach().requires_grad_() for t in (q, k, v))
    s = scores(q, k, q.shape[-1] ** -0.5, left, right, softcap)
    dead = (s == -math.inf).all(-1)
    live = s.masked_fill(dead[..., None], 0)
    lse = torch.logsumexp(live, -1).masked_fill(dead, -math.inf)
    p = torch.softmax(live, -1).masked_fill(dead[..., None], 0)
    o = p @ v.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    total = (o * do.to(dtype)).sum()
    if dlse is not None:
        total = total + (lse.masked_fill(dead, 0) * dlse.to(dtype).masked_fill(dead, 0)).sum()
    return o.detach(), lse.detach(), *torch.autograd.grad(total, (q, k, v))


def make(batch, heads, kv_heads, seq_q, seq_k, dim, element="bf16", seed=0, interleaved=False):
    """Random q, k, v, do; `interleaved`: [batch, seq, head, dim] in memory."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def one(h, s):
        shape = (batch, s, h, dim) if interleaved else (batch, h, s, dim)
        t = torch.randn(shape, device="cuda", generator=generator).to(DTYPES[element])
        return t.transpose(1, 2) if interleaved else t

    q, k, v, do = one(heads, seq_q), one(kv_heads, seq_k), one(kv_heads, seq_k), one(heads, seq_q)
    return {"q": q, "k": k, "v": v, "do": do}
