"""torch's attention on the GPU: Warploom's kernels beside, and in place of, those of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sdpa_bounds import assert_held, differentiated, dout_of
from sdpa_on_gpu import BACKENDS, BF16, HALF, Tensors, by, close, launching, operands
from torch.nn import attention
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

import warploom

pytestmark = pytest.mark.gpu
Shape = tuple[int, int, int, int, int, torch.dtype]


# ---- warploom.sdpa -------------------------------------------------------------------------------

SHAPES = [
    (4, 4, 256, 256, 64, BF16),
    (8, 2, 300, 300, 128, BF16),
    (4, 4, 129, 513, 128, HALF),
    (6, 3, 257, 65, 256, BF16),
    (4, 1, 77, 77, 40, HALF),
    (2, 2, 1, 200, 64, BF16),
]
MASKED = ("scores", "heads", "keys", "rows")


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.07}])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_right(shape: Shape, keywords: dict[str, Any]) -> None:
    given = operands(*shape)
    with launching(expected=True):
        assert_held(warploom.sdpa, given, **keywords, enable_gqa=True)


def mask_of(name: str, shape: Shape, seed: int = 0) -> torch.Tensor:
    """A mask of some of the scores' dimensions, of truth values or numbers."""
    heads, _, rows, keys, _, dtype = shape
    kind, which = name.split(" of ")
    extents = {
        "scores": (2, heads, rows, keys),
        "heads": (heads, rows, keys),
        "keys": (2, 1, 1, keys),
        "rows": (rows, 1),
    }[which]
    drawn = torch.randn(extents, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return drawn > -0.5 if kind == "mask" else drawn if kind == "fp32" else drawn.to(dtype)


MASKS = [f"{kind} of {which}" for kind in ("mask", "fp32", "16 bits") for which in MASKED]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("shape", SHAPES[:4])
def test_masks_and_their_gradients_are_right(shape: Shape, name: str) -> None:
    given, mask = operands(*shape), mask_of(name, shape)
    with launching(expected=True):
        if mask.dtype == torch.bool:
            assert_held(warploom.sdpa, given, attn_mask=mask, enable_gqa=True)
        else:
            assert_held(warploom.sdpa, (*given, mask), enable_gqa=True)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(BF16).min])
def test_keys_that_the_lowest_number_is_added_to_do_not_count(lowest: float, dim: int) -> None:
    """Guards against NaN of rows that attend to nothing, or of tiles in which one does not.

    Of the lowest finite number, what such a row gives depends on the scale.
    """
    given = operands(4, 4, 300, 300, dim)
    shown = torch.ones(300, 300, device="cuda", dtype=torch.bool).tril()
    if lowest == -torch.inf:
        shown[3], shown[190:210] = False, False
    mask = torch.zeros(300, 300, device="cuda", dtype=BF16).masked_fill(~shown, lowest)
    with launching(expected=True):
        (out,), gradients = differentiated(warploom.sdpa, given, attn_mask=mask)
    assert (out[:, :, ~shown.any(1)] == 0).all()
    wide = tuple(tensor.double() for tensor in given)
    (right,), wanted = differentiated(scaled_dot_product_attention, wide, attn_mask=shown)
    close((out, *gradients), (right, *wanted))


@pytest.mark.parametrize(
    "keywords", [{"dropout_p": 1.0}, {"scale": -0.5}], ids=["dropout", "scale"]
)
def test_what_kernels_do_not_compute_is_torchs(keywords: dict[str, Any]) -> None:
    given = operands(4, 4, 128, 128, 64)
    found, expected = [], []
    for function, into in ((warploom.sdpa, found), (scaled_dot_product_attention, expected)):
        torch.manual_seed(3)
        # Of torch's own, cuDNN refuses to drop every weight.
        with launching(expected=False), attention.sdpa_kernel(SDPBackend.MATH):
            out, gradients = differentiated(function, given, **keywords)
        into += [*out, *gradients]
    assert torch.equal(found[0], expected[0])
    close(tuple(found), tuple(expected))


def test_explain_says_which_kernel_runs() -> None:
    q, k, v = operands(4, 4, 64, 64, 64)
    assert not warploom.explain(warploom.sdpa, q, k, v).torch
    found = warploom.explain(warploom.sdpa, q, k, v, dropout_p=1.0)
    assert found.torch
    assert "dropout_p" in found.reason


# ---- torch's function ----------------------------------------------------------------------------


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.07}])
@pytest.mark.parametrize("shape", [(4, 4, 256, 256, 64, BF16), (8, 2, 300, 300, 128, HALF)])
def test_either_implementation_of_torch_is_warplooms(
    backend: SDPBackend, keywords: dict[str, Any], shape: Shape
) -> None:
    given = operands(*shape)
    with launching(expected=True):
        assert_held(by(backend), given, **keywords, enable_gqa=True)


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("lengths", [(100, 300), (300, 100)])
def test_masks_of_unequal_lengths_begin_at_the_top_left(lengths: tuple[int, int]) -> None:
    """cuDNN's are Warploom's; what torch picks by itself means the same, whoever computes."""
    given = operands(4, 4, *lengths, 64)
    assert_held(scaled_dot_product_attention, given, is_causal=True)
    with launching(expected=True):
        assert_held(by(SDPBackend.CUDNN_ATTENTION), given, is_causal=True)


@pytest.mark.usefixtures("activated")
def test_what_torch_picks_by_itself_is_warplooms() -> None:
    """Guards against an operator that torch prefers on this GPU and that was left out."""
    for dim in (64, 128, 256, 12):  # torch pads the last to 16
        given = operands(4, 4, 256, 256, dim)
        for keywords in ({}, {"is_causal": True}):
            with launching(expected=True):
                out, gradients = differentiated(scaled_dot_product_attention, given, **keywords)
            wide = tuple(tensor.double() for tensor in given)
            right, wanted = differentiated(scaled_dot_product_attention, wide, **keywords)
            close((*out, *gradients), (*right, *wanted))


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("shape", [(4, 4, 256, 256, 64, BF16), (4, 4, 129, 300, 128, BF16)])
@pytest.mark.parametrize("name", ["mask of scores", "mask of keys", "16 bits of scores"])
@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION])
def test_masks_of_torchs_function_are_warplooms(
    backend: SDPBackend, name: str, shape: Shape
) -> None:
    given, mask = operands(*shape), mask_of(name, shape)
    with launching(expected=True):
        assert_held(by(backend), given, attn_mask=mask)


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("name", ["16 bits of scores", "16 bits of heads", "16 bits of keys"])
@pytest.mark.parametrize("shape", [(4, 4, 256, 256, 64, BF16), (4, 4, 129, 300, 128, HALF)])
def test_the_gradient_of_a_mask_is_warplooms(shape: Shape, name: str) -> None:
    """torch picks the operator that has one; what was broadcast it sums by itself, in 16 bits."""
    given = (*operands(*shape), mask_of(name, shape))
    with launching(expected=True):
        out, gradients = differentiated(scaled_dot_product_attention, given)
    wide = tuple(tensor.double() for tensor in given)
    right, wanted = differentiated(scaled_dot_product_attention, wide)
    close((*out, *gradients), (*right, *wanted))


@pytest.mark.parametrize("first", ["torch", "warploom"])
def test_either_backward_takes_a_mask_that_either_forward_had(first: str) -> None:
    """Guards against a log-sum-exp that torch's memory-efficient kernel reads otherwise."""
    shape = (4, 4, 129, 300, 64, BF16)
    given, mask = operands(*shape), mask_of("16 bits of scores", shape)
    run, leaves = by(SDPBackend.EFFICIENT_ATTENTION), [one.requires_grad_() for one in given]
    with contextlib.ExitStack() as stack:
        if first == "warploom":
            stack.enter_context(warploom.sdpa.activate())
        out = run(*leaves, mask)
    with contextlib.ExitStack() as stack:
        if first == "torch":
            stack.enter_context(warploom.sdpa.activate())
        with launching(expected=first == "torch"):
            found = torch.autograd.grad(out, leaves, dout_of(out))
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    wanted = scaled_dot_product_attention(*wide, mask.double())
    gradients = torch.autograd.grad(wanted, wide, dout_of(out).double())
    close((out.detach(), *found), (wanted.detach(), *gradients))


LAYOUTS: dict[str, Callable[[], Tensors]] = {
    "heads outside": lambda: tuple(
        torch.randn(2, 4, 200, 64, device="cuda").bfloat16() for _ in range(3)
    ),
    "packed": lambda: (
        torch.randn(2, 200, 3, 4, 64, device="cuda").bfloat16().permute(2, 0, 3, 1, 4).unbind(0)
    ),
    "part of a head": lambda: tuple(
        torch.randn(2, 200, 4, 128, device="cuda").bfloat16()[..., 32:96].transpose(1, 2)
        for _ in range(3)
    ),
}


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_models_are_read_where_they_lie(layout: str) -> None:
    given = LAYOUTS[layout]()
    copies = warploom.counters.copies
    with launching(expected=True):
        assert_held(by(SDPBackend.FLASH_ATTENTION), given, is_causal=True)
    assert warploom.counters.copies == copies


@pytest.mark.usefixtures("activated")
def test_what_cannot_be_read_is_torchs_kernel() -> None:
    q, k, v = operands(4, 4, 128, 128, 64)
    expanded = k[:1].expand_as(k)
    with launching(expected=False):
        out, gradients = differentiated(by(SDPBackend.FLASH_ATTENTION), (q, expanded, v))
    wide = tuple(tensor.double() for tensor in (q, expanded, v))
    right, wanted = differentiated(scaled_dot_product_attention, wide)
    close((*out, *gradients), (*right, *wanted))


@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
def test_what_is_activated_is_undone(backend: SDPBackend) -> None:
    """torch's kernels run before and after, with the same bits; dropout is theirs in between."""
    given = operands(4, 4, 256, 256, 64)

    def dropped() -> torch.Tensor:
        torch.manual_seed(3)
        return by(backend)(*given, dropout_p=0.25)

    before, before_dropped = by(backend)(*given), dropped()
    with warploom.sdpa.activate():
        assert attention.current_flash_attention_impl() == "warploom"
        with launching(expected=True):
            by(backend)(*given)
        with launching(expected=False):
            assert torch.equal(dropped(), before_dropped)
    with launching(expected=False):
        assert torch.equal(by(backend)(*given), before)


@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
@pytest.mark.parametrize("first", ["torch", "warploom"])
def test_either_backward_takes_what_either_forward_returned(
    backend: SDPBackend, first: str
) -> None:
    """Guards against a log-sum-exp in another base, order or place than torch's."""
    given = operands(4, 4, 300, 300, 128)
    leaves = [tensor.requires_grad_() for tensor in given]
    with contextlib.ExitStack() as stack:
        if first == "warploom":
            stack.enter_context(warploom.sdpa.activate())
        out = by(backend)(*leaves, is_causal=True)
    with contextlib.ExitStack() as stack:
        if first == "torch":
            stack.enter_context(warploom.sdpa.activate())
        with launching(expected=first == "torch"):
            found = torch.autograd.grad(out, leaves, dout_of(out))
    wide = tuple(tensor.detach().double() for tensor in given)
    right = [tensor.requires_grad_() for tensor in wide]
    wanted = scaled_dot_product_attention(*right, is_causal=True)
    gradients = torch.autograd.grad(wanted, right, dout_of(out).double())
    close((out.detach(), *found), (wanted.detach(), *gradients))


@pytest.mark.usefixtures("activated")
def test_deterministic_gradients_are_bit_equal() -> None:
    given = operands(8, 2, 700, 700, 128)
    torch.use_deterministic_algorithms(True)
    try:
        found = [
            differentiated(by(SDPBackend.FLASH_ATTENTION), given, enable_gqa=True)[1]
            for _ in range(5)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        for got, first in zip(again, found[0], strict=True):
            assert torch.equal(got, first)


@pytest.mark.usefixtures("activated")
def test_packed_sequences_are_warplooms() -> None:
    """torch's varlen_attn, sequence by sequence as torch's function has each."""
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    lengths = [100, 1, 333]
    given = tuple(torch.randn(434, 4, 64, device="cuda").bfloat16() for _ in range(3))
    starts = torch.tensor([0, 100, 101, 434], dtype=torch.int32, device="cuda")

    def one_by_one(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
        heads = ([tensor.transpose(0, 1)[None] for tensor in part] for part in parts)
        return torch.cat([scaled_dot_product_attention(*p)[0].transpose(0, 1) for p in heads])

    with launching(expected=True):
        out, gradients = differentiated(
            lambda *tensors: varlen(*tensors, starts, starts, 333, 333), given
        )
    wide = tuple(tensor.double() for tensor in given)
    right, wanted = differentiated(one_by_one, wide)
    close((*out, *gradients), (*right, *wanted))
