"""What tuning draws and holds results against: whole kinds of calls, and a bound that is narrow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decode_calls import fixed, paged

from warploom.generator.families.attention_decode import DecodeOperation, DecodeShape
from warploom.generator.launches import NO_GPU
from warploom.runtime.families import family
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families.attention_decode import reference
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.attention_decode.extents import extents

FAMILY = family("attention_decode")
SHAPE = DecodeShape(3, 8, 2, 2, 72)
OPERATION = DecodeOperation("bf16", 64, lengths=True, mask="causal")
OPERATIONS: dict[str, DecodeOperation] = {
    "fixed": OPERATION,
    "all keys": replace(OPERATION, lengths=False),
    "fp16": replace(OPERATION, element="fp16"),
    "paged": replace(OPERATION, page=32),
    "packed": replace(OPERATION, keys="packed", queries="packed", lengths=False),
    "window": replace(OPERATION, mask="window", softcap=True, sinks="same"),
    "e4m3": replace(OPERATION, page=16, cache="e4m3", scales="head", sinks="fp32"),
    "int8": replace(OPERATION, cache="int8", scales="token", element="fp16"),
    "int8 in pages": replace(OPERATION, cache="int8", scales="token", page=16, starts=True),
    "invariant": replace(OPERATION, batch_invariant=True),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_drawn_call_is_one_of_its_operation_and_shape(name: str) -> None:
    """Else what is tuned is another problem than what it is recorded for."""
    for device in ("cpu", "meta"):
        random = torch.Generator().manual_seed(0) if device == "cpu" else None
        call = FAMILY.draw(OPERATIONS[name], SHAPE, device, random)  # type: ignore[attr-defined]
        asked = call.draft(NO_GPU).choice
        assert asked.spec.operation == OPERATIONS[name]
        assert asked.asked is not None
        if not OPERATIONS[name].batch_invariant:
            assert asked.asked.shape == SHAPE


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_reference_is_within_its_bound(name: str) -> None:
    trial = FAMILY.trial(OPERATIONS[name], SHAPE, "cpu", 0)
    (choice,) = FAMILY.choices(OPERATIONS[name], SHAPE, NO_GPU)
    assert trial.error_share(choice.spec) < 1
    out = trial.results[0]
    out.view(-1)[5] += out.abs().max()
    assert trial.held_share() > 1


def emulated(one: reference.Sequence, function: reference.Function) -> reference.Pair:
    """As kernels compute: weights relative to the largest are rounded to the type of q, keys are in
    parts with a maximum each, which are added up in fp32.
    """
    s, kind = reference.scores(one, function, torch.float32), one.q.dtype
    top = torch.full(s.shape[:-1], -torch.inf)[..., None]
    if (column := function.column(s[None])) is not None:
        top = column[0]
    total, out = (top > -torch.inf).float(), torch.zeros(one.q.shape)
    for first in range(0, s.shape[-1], 16):
        part = s[..., first : first + 16]
        highest = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = highest.masked_fill(highest == -torch.inf, 0)
        scaled = (top - safe).exp()
        p = (part - safe).exp()
        total = total * scaled + p.sum(-1, keepdim=True)
        if one.scale_v is not None:
            p = p * one.scale_v.expand(-1, s.shape[-1])[:, None, None, first : first + 16]
        values = one.v[:, first : first + 16].float()[:, None]
        out = out * scaled + p.to(kind).float() @ values
        top = highest
    found = torch.where(total > 0, out / total, torch.zeros(())).to(kind)
    return found, (top + total.log()).squeeze(-1)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_is_within_the_bound_and_one_lost_key_is_not(name: str) -> None:
    call = FAMILY.draw(OPERATIONS[name], SHAPE, "cpu", torch.Generator().manual_seed(1))  # type: ignore[attr-defined]
    share, of_lse = _shares(call, emulated)
    assert share < 1
    assert of_lse < 1

    def losing(one: reference.Sequence, function: reference.Function) -> reference.Pair:
        v = one.v.clone()
        v[:, 40] = 0
        return emulated(replace(one, v=v), function)

    assert _shares(call, losing)[0] > 2


@pytest.mark.parametrize("lengths", [(0, 5, 40), (1, 1, 1)])
def test_rows_without_keys_are_exact(lengths: tuple[int, ...]) -> None:
    """Of no key there is nothing to be off by: 0, and -inf or the sink."""
    for case in (fixed(lengths, rows=3), paged(lengths, rows=3)):
        call = AttentionDecodeCall(case.q, case.k, case.v, **case.keywords)
        assert max(_shares(call, emulated)) < 1
        out, _ = reference.of_call(call, *_sizes(call), reference.bound)
        assert out.isfinite().all()


def _sizes(call: AttentionDecodeCall) -> tuple[object, ...]:
    sizes = extents(call)
    return sizes, band(call.plain, sizes)


def _shares(call: AttentionDecodeCall, compute: reference.Attention) -> tuple[float, float]:
    """The largest errors of out and lse, as shares of their bounds."""
    found, exact, bound = (
        reference.of_call(call, *_sizes(call), each)  # type: ignore[arg-type]
        for each in (compute, reference.exact, reference.bound)
    )
    shares = []
    for one, wanted, off in zip(found, exact, bound, strict=True):
        apart = (one.double() - wanted).abs()
        same = one.double() == wanted
        shares.append(float((apart / off).masked_fill(same, 0).max()))
    return shares[0], shares[1]
