"""Calls of functions that are no products, of small and empty shapes, by operands in any view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from odd_views import odd_views

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.activation_backward.api import activation_backward

Tensors = dict[str, torch.Tensor]
SHAPES = [  # batch, heads, rows, keys, dim
    (1, 1, 1, 1, 64),
    (1, 2, 1, 5, 64),
    (2, 1, 5, 1, 64),
    (0, 2, 5, 5, 64),
    (2, 2, 0, 5, 64),
    (2, 2, 5, 0, 64),
]


@dataclass
class Case:
    """A function and its operands; those that are `written` are looked at too."""

    call: Callable[..., object]
    given: Tensors
    written: tuple[str, ...] = field(default=())


def of_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    leaves = [one.detach().requires_grad_() for one in (q, k, v)]
    results = warploom.attention(*leaves, return_lse=True, deterministic=True, **more)  # type: ignore[arg-type]
    ones = [torch.ones_like(one) for one in results]
    return *results, *torch.autograd.grad(results, leaves, ones)


def cases(shape: tuple[int, int, int, int, int], device: str) -> dict[str, Case]:
    """Every function's call of this shape."""
    b, h, s, t, d = shape
    chance = torch.Generator().manual_seed(0)

    def fp32(*extents: int) -> torch.Tensor:
        return torch.randn(extents, generator=chance).to(device)

    def bf16(*extents: int) -> torch.Tensor:
        return fp32(*extents).bfloat16()

    qkv = {"q": bf16(b, h, s, d), "k": bf16(b, h, t, d), "v": bf16(b, h, t, d)}
    dout, dlse = (
        torch.ones(b, h, s, d, device=device).bfloat16(),
        torch.ones(b, h, s, device=device),
    )

    def of_gradients(dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in qkv.values()]
        results = warploom.attention(*leaves, return_lse=True, deterministic=True)
        return torch.autograd.grad(results, leaves, (dout, dlse))

    further = {"bias": bf16(b, h, s, t), "sinks": fp32(h), "alibi_slopes": fp32(b, h)}
    out = {"out": bf16(b, h, s, d)}
    rows = {"out_a": bf16(b, s, d), "out_b": bf16(b, s, d), "out": bf16(b, s, d)}
    logs = {"lse_a": fp32(b, s), "lse_b": fp32(b, s), "lse": fp32(b, s)}
    found = {
        "attention": Case(of_attention, {**qkv, **further, "mask": fp32(b, h, s, t) > 0}),
        "gradients": Case(of_gradients, {"dout": dout, "dlse": dlse}),
        "attention into out": Case(warploom.attention, {**qkv, **out}, ("out",)),
        "merge": Case(warploom.merge_state, {**rows, **logs}, ("out", "lse")),
        "activation": Case(
            lambda **given: activation_backward(**given, activation="silu", sums=True),
            {"dy": torch.ones(s, t, device=device).bfloat16(), "z": bf16(s, t), "out": bf16(s, t)},
            ("out",),
        ),
    }
    if not b:
        return found
    counts = torch.full((b,), t, dtype=torch.int32, device=device)
    scales = {"scale_k": fp32(b, h, t).abs(), "scale_v": fp32(b, h, t).abs()}
    int8 = {"q": qkv["q"], "k": qkv["k"].to(torch.int8), "v": qkv["v"].to(torch.int8)}
    found["decode"] = Case(
        warploom.attention_decode,
        {**qkv, "cache_seqlens": counts, "sinks": fp32(h), **out},
        ("out",),
    )
    found["decode int8"] = Case(warploom.attention_decode, {**int8, **scales})
    found["append"] = Case(
        warploom.append_kv_cache,
        {
            **{name: bf16(b, h, t + 2, d) for name in ("k_cache", "v_cache")},
            "k": bf16(b, h, s, d),
            "v": bf16(b, h, s, d),
            "q": bf16(b, h, s, d),
            "cos": fp32(1, 8),
            "sin": fp32(1, 8),
            **out,
            "lengths": counts * 0,
            "lengths_after": counts * 0,
        },
        ("k_cache", "v_cache", "lengths_after", "out"),
    )
    return found


def any_view_gives_the_result_of_a_dense_tensor(case: Case) -> None:
    """Views with odd strides in dimensions of size 1 only must be taken; others may be refused."""

    def results(name: str, view: torch.Tensor) -> list[torch.Tensor]:
        given = {key: one.clone() for key, one in case.given.items()}
        given[name] = view
        found = case.call(**given)
        made = found if isinstance(found, tuple) else (found,)
        tensors = (*made, *(given[key] for key in case.written))
        return [one.clone() for one in tensors if isinstance(one, torch.Tensor)]

    for name, values in case.given.items():
        expected: list[torch.Tensor] = []
        for where, view in odd_views(values):
            if name in case.written and "expanded" in where:
                continue
            try:
                found = results(name, view)
            except ProblemError:
                assert "size 1" not in where and where != "dense", (name, where)
                continue
            expected = expected or found
            for one, other in zip(found, expected, strict=True):
                message = f"{name} {where}: {{}}".format
                torch.testing.assert_close(
                    one, other, rtol=1e-5, atol=1e-5, equal_nan=True, msg=message
                )
