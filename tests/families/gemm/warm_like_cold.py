"""Random calls, each in a process that has made none, then all of them in one process, twice.

Run by test_warm_like_cold.py: it forks, which a process with threads of a test runner must not.
Prints a line for each call that answers otherwise when others like it ran before.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from hashlib import sha256
from typing import Any

import torch
import torch.fx.experimental.symbolic_shapes  # autograd's first call would, in each process: 3 s

import warploom
from warploom.generator.families import family

CHANCE = 0.25  # of each argument, and of each leaf


def answer(seed: int) -> str:
    """A digest of the result of a seed's call with its gradients, or the text of its error.

    Choices are few, so that calls of different seeds are often of one kind, but for what requires
    grad.
    """
    chosen, normal = random.Random(seed), torch.Generator().manual_seed(seed)

    def operand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=normal).to(dtype)

    is_quantized = chosen.random() < CHANCE
    m, n, k = chosen.choice([(8, 64, 128), (16, 64, 128)])
    lead = chosen.choice([(), (2,)])
    a, weight = operand(*lead, m, k), operand(n, k)
    if chosen.random() < CHANCE:
        a = operand(*lead, k, m).mT
    keywords: dict[str, Any] = {}
    way = chosen.choice(["keywords", "keywords", "mean_square", "rms_scale"])
    if way == "mean_square":
        shares = torch.empty(a.shape[:-1].numel(), n // 16)
        keywords["epilogue"] = [("bias", operand(n)), (way, shares)]
    elif way == "rms_scale":
        shares = operand(a.shape[:-1].numel(), k // 16, dtype=torch.float32).square()
        keywords["epilogue"] = [(way, shares, 1e-5)]
    else:
        if chosen.random() < CHANCE:
            keywords["activation"] = chosen.choice(["relu", "silu"])
        if chosen.random() < CHANCE:
            keywords["bias"] = operand(n)
        if chosen.random() < CHANCE:
            keywords["residual"] = operand(*lead, m, n)
        if chosen.random() < CHANCE:
            keywords["out"] = torch.full((*lead, m, n), torch.nan, dtype=torch.bfloat16)
    tensors = {"a": a, "weight": weight, **keywords}
    leaves = [
        tensors[name].requires_grad_()
        for name in ("a", "weight", "bias", "residual")
        if name in tensors and chosen.random() < CHANCE and not (is_quantized and name == "weight")
    ]
    try:
        with torch.set_grad_enabled(chosen.random() > CHANCE):
            if is_quantized:
                packed = warploom.quantize(weight.detach(), "int4", group=128)
                d = warploom.mixed_gemm(a, packed, **keywords)
            else:
                d = warploom.gemm(a, weight.t(), **keywords)
        written = [one for item in keywords.get("epilogue", ()) for one in item[1:]]
        found = [d.detach(), d.stride(), d.requires_grad, *written]
        if d.requires_grad:
            found += torch.autograd.grad(d.float().square().sum(), leaves, allow_unused=True)
    except warploom.ProblemError as error:
        return str(error)
    return sha256(b"".join(map(content, found))).hexdigest()


def content(one: object) -> bytes:
    """The bytes of a tensor, or of what is shown of another object."""
    if isinstance(one, torch.Tensor):
        return one.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return repr(one).encode()


def alone(seed: int) -> str:
    """The answer in a process that has made no call before."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, answer(seed).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        told = file.read()
    os.wait()
    return told


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Modules and tables of files are no calls: read once here, not in every process.
    _ = warploom.gemm, warploom.mixed_gemm, warploom.quantize
    for name in ("gemm", "mixed_gemm"):
        assert family(name).table.classes
    seeds = range(int(sys.argv[1]))
    cold = {seed: alone(seed) for seed in seeds}
    for _ in range(2):
        for seed in seeds:
            if answer(seed) != cold[seed]:
                print(seed)
