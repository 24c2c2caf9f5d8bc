"""`warploom.sdpa.activate`: torch's own attention runs Warploom's kernels, and gives them back.

The operators that torch has on a GPU are registered for the CPU here; sdpa_torchs stands for what
torch has there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sdpa_bounds import assert_held, differentiated, dout_of, draw
from sdpa_torchs import routed, torchs
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.integrations import sdpa_activation, sdpa_rules
from warploom.runtime.plan import forget

FLASH, CUDNN = "flash_attention", "cudnn_attention"
Q = draw(2, 4, 9, 16)
K, V = draw(2, 2, 7, 16, seed=1), draw(2, 2, 7, 16, seed=2)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's kernels ran, where Warploom may be activated for CPU tensors."""
    noted: list[str] = []
    monkeypatch.setattr(sdpa_activation, "_KEY", "CPU")
    monkeypatch.setattr(sdpa_activation, "torchs_kernels", lambda: torchs(noted))
    monkeypatch.setattr(sdpa_rules, "elsewhere", lambda tensor: None)
    return noted


@pytest.fixture
def activated(ran: list[str]) -> Iterator[list[str]]:
    with warploom.sdpa.activate():
        yield ran


def operator(name: str, *given: torch.Tensor, **keywords: Any) -> tuple[Any, ...]:
    """One of the operators that torch picks, as its function calls them."""
    more = (None, True) if name == CUDNN else ()
    flags = [keywords.pop(key, kept) for key, kept in (("dropout_p", 0.0), ("is_causal", False))]
    run = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
    found: tuple[Any, ...] = run(*given, *more, *flags, **keywords)
    return found


def through(name: str) -> Any:  # noqa: ANN401
    """An attention with the arguments of torch's function, by one of its operators."""

    def attend(*given: torch.Tensor, enable_gqa: bool = False, **keywords: Any) -> torch.Tensor:
        out: torch.Tensor = operator(name, *given, **keywords)[0]
        return out

    return attend


# ---- Operators -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.31}])
@pytest.mark.parametrize(("heads", "length", "dim"), [(4, 33, 64), (2, 40, 40), (1, 1, 128)])
def test_operators_compute_what_torchs_function_does(
    name: str,
    keywords: dict[str, Any],
    heads: int,
    length: int,
    dim: int,
    activated: list[str],
) -> None:
    q, k, v = (draw(2, n, length, dim, seed=n) for n in (4, heads, heads))
    assert_held(through(name), (q, k, v), **keywords, enable_gqa=True)
    assert not activated


def test_cudnns_causal_mask_begins_at_the_top_left(activated: list[str]) -> None:
    """Guards against FlashAttention's alignment, the only one that its operator has."""
    for lengths in ((9, 30), (30, 9)):
        q, k, v = (draw(2, 4, n, 64, seed=i) for i, n in enumerate((*lengths, lengths[1])))
        assert_held(through(CUDNN), (q, k, v), is_causal=True)
        expected = warploom.attention(q, k, v, causal="bottom_right")
        assert torch.equal(operator(FLASH, q, k, v, is_causal=True)[0], expected)
    assert not activated


LAYOUTS = {
    "as it comes": lambda: tuple(torch.randn(2, 4, 9, 16).bfloat16() for _ in range(3)),
    "rows outside": lambda: tuple(draw(2, 4, 9, 16, seed=i) for i in range(3)),
    "packed": lambda: torch.randn(2, 9, 3, 4, 16).bfloat16().permute(2, 0, 3, 1, 4).unbind(0),
    "one head": lambda: tuple(draw(2, 1, 9, 16, seed=i) for i in range(3)),
}


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_lie_as_a_compiler_was_told(name: str, layout: str, activated: list[str]) -> None:
    """Guards against results that torch.compile takes for others: it believes the fake ones."""

    def told(given: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
        leaves = [tensor.requires_grad_() for tensor in given]
        results = operator(name, *leaves)
        arriving = torch.zeros_like(results[0])
        gradients = torch.autograd.grad(results[0], leaves, arriving)
        looks = [(*one.shape, one.stride(), one.dtype) for one in (*results[:2], *gradients)]
        small = [(tuple(one.shape), one.dtype) for one in results[6:8]]
        return [*looks, *small, results[4:6], tuple(one is None for one in results)]

    real: tuple[torch.Tensor, ...] = LAYOUTS[layout]()
    assert told(real) == told(
        tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in real)
    )
    assert not activated


REFUSED: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "dropout": ((Q, Q, Q), {"dropout_p": 1e-9}),
    "fp32": ((Q.float(),) * 3, {}),
    "negative scale": ((Q, Q, Q), {"scale": -1.0}),
    "expanded": ((Q, Q[:1].expand_as(Q), Q), {}),
    "8 bytes off": ((torch.randn(2 * 4 * 9 * 16 + 4).bfloat16()[4:].view(2, 4, 9, 16), Q, Q), {}),
    "head dimension 12": ((Q[..., :12],) * 3, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_do_not_compute_is_torchs_kernels(case: str, activated: list[str]) -> None:
    """Guards against copies, errors and wrong results where torch has a kernel."""
    given, keywords = REFUSED[case]
    copies = warploom.counters.copies
    (out,), found = differentiated(through(FLASH), given, **keywords)
    assert activated == [FLASH, f"{FLASH}_backward"]
    assert warploom.counters.copies == copies
    (wanted,), expected = differentiated(scaled_dot_product_attention, given, **keywords)
    for got, right in zip((out, *found), (wanted, *expected), strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)


def test_a_mask_is_cudnns_own(activated: list[str]) -> None:
    mask = torch.randn(2, 4, 9, 9).bfloat16()
    q = Q.clone().requires_grad_()
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out = run(q, Q, Q, mask, True)[0]
    out.backward(dout_of(out))
    assert activated == [CUDNN, f"{CUDNN}_backward"]


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("first", ["torch", "warploom"])
def test_either_backward_takes_what_either_forward_returned(
    name: str, first: str, ran: list[str]
) -> None:
    """Guards against gradients that are wrong where Warploom comes or goes between the passes."""

    def attend(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
        out: torch.Tensor = operator(name, *given, **keywords)[0]
        return out

    given = draw(2, 4, 9, 16), draw(2, 4, 9, 16, seed=1), draw(2, 4, 9, 16, seed=2)
    with warploom.sdpa.activate():
        leaves = [tensor.requires_grad_() for tensor in given]
        out = attend(*leaves, is_causal=True)
        expected = torch.autograd.grad(out, leaves, dout_of(out), retain_graph=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warploom.integrations.sdpa_override.attend", lambda *_: None)
            if first == "torch":
                out = attend(*leaves, is_causal=True)
            else:
                patch.setattr("warploom.integrations.sdpa_override.differentiate", lambda *_: None)
            found = torch.autograd.grad(out, leaves, dout_of(out))
    assert len(ran) == 1
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)


def test_a_warm_call_plans_nothing(activated: list[str]) -> None:
    differentiated(through(FLASH), (Q, Q, Q))
    plans = warploom.counters.plans
    differentiated(through(FLASH), (Q, Q, Q))
    assert warploom.counters.plans == plans
    assert not activated


# ---- Torch's function and modules ----------------------------------------------------------------


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.2}])
def test_torchs_function_is_warplooms(keywords: dict[str, Any], activated: list[str]) -> None:
    """With grouped queries, unequal lengths and top-left masks, as `warploom.sdpa` has them."""

    keywords = {**keywords, "enable_gqa": True}
    with routed():
        (found,), gradients = differentiated(scaled_dot_product_attention, (Q, K, V), **keywords)
    (right,), wanted = differentiated(warploom.sdpa, (Q, K, V), **keywords)
    assert not activated
    for got, expected in zip((found, *gradients), (right, *wanted), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("training", [False, True])
def test_modules_of_torch_are_warplooms(training: bool, activated: list[str]) -> None:
    """On the path that learns; that of fast inference has an attention of its own on the CPU."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    layer = layer.bfloat16().train(training)
    x = torch.randn(2, 9, 64).bfloat16().requires_grad_()
    arriving = torch.randn(2, 9, 64).bfloat16()
    forget()
    plans = warploom.counters.plans
    with routed():
        out = layer(x)
        found = torch.autograd.grad(out, [x, layer.self_attn.in_proj_weight], arriving)
    assert warploom.counters.plans == plans + 2
    assert not activated
    layer, x = layer.double(), x.detach().double().requires_grad_()
    wanted = layer(x)
    leaves = [x, layer.self_attn.in_proj_weight]
    gradients = torch.autograd.grad(wanted, leaves, arriving.double())
    for got, right in zip((out, *found), (wanted, *gradients), strict=True):
        difference = (got.double() - right).norm() / right.norm()
        assert difference < 0.02


def test_torch_compile_and_checkpoints_are_warplooms(activated: list[str]) -> None:
    def layer(*given: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(*given, is_causal=True) * 2

    def saved(*given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(layer, *given, use_reentrant=False)
        return found

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with routed():
        expected = differentiated(layer, (Q, Q, Q))
        for other in (saved, compiled):
            found = differentiated(other, (Q, Q, Q))
            for got, right in zip(
                (*found[0], *found[1]), (*expected[0], *expected[1]), strict=True
            ):
                assert torch.equal(got, right)
    assert not activated


def test_autocast_is_warplooms(activated: list[str]) -> None:
    with routed(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = scaled_dot_product_attention(Q.float(), Q.float(), Q.float())
    assert torch.equal(found, warploom.attention(Q, Q, Q))
    assert not activated


# ---- Activation ----------------------------------------------------------------------------------


def active() -> bool:
    """Whether Warploom's kernels run where torch's operators are called."""
    try:
        operator(FLASH, Q, Q, Q)
    except NotImplementedError:  # torch has no such kernel for the CPU
        return False
    return True


@pytest.mark.usefixtures("ran")
def test_what_is_activated_is_undone() -> None:
    """By its handle, by a block, and by torch's registry: torch's kernels are back each time."""
    assert not active()
    handle = warploom.sdpa.activate()
    assert attention.current_flash_attention_impl() == "warploom"
    assert "warploom" in attention.list_flash_attention_impls()
    assert active()
    for _ in range(2):
        handle.remove()
        assert not active()
        assert attention.current_flash_attention_impl() is None
    with pytest.raises(ZeroDivisionError), warploom.sdpa.activate():
        assert active()
        _ = 1 // 0
    assert not active()
    stale = warploom.sdpa.activate()
    attention.restore_flash_attention_impl()
    assert not active()
    with warploom.sdpa.activate():
        stale.remove()
        assert active()
        assert attention.current_flash_attention_impl() == "warploom"


@pytest.mark.usefixtures("ran")
def test_torchs_registry_activates_it_too() -> None:
    warploom.sdpa.activate().remove()
    attention.activate_flash_attention_impl("warploom")
    assert active()
    attention.restore_flash_attention_impl()
    assert not active()


@pytest.mark.usefixtures("activated")
def test_a_second_activation_is_refused() -> None:
    with pytest.raises(ProblemError, match="restore_flash_attention_impl"):
        warploom.sdpa.activate()
    assert active()


@pytest.mark.usefixtures("ran")
def test_another_active_attention_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3")
    with pytest.raises(ProblemError, match="FA3"):
        warploom.sdpa.activate()
    assert not active()


@pytest.mark.usefixtures("ran")
def test_what_torch_does_not_let_override_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing stays half registered."""
    whole = torch.library.Library.impl

    def impl(library: torch.library.Library, name: str, *given: Any) -> None:
        if "cudnn" in name:
            raise RuntimeError("there's already a kernel registered from python")
        whole(library, name, *given)  # type: ignore[no-untyped-call]

    with monkeypatch.context() as patch, pytest.raises(ProblemError, match="from python"):
        patch.setattr(torch.library.Library, "impl", impl)
        warploom.sdpa.activate()
    assert not active()
    assert attention.current_flash_attention_impl() is None


def test_a_torch_that_is_too_old_or_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.version.cuda is None:
        with pytest.raises(ProblemError, match="a build of torch for CUDA"):
            warploom.sdpa.activate()
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(ProblemError, match=r"2\.11 or later"):
        warploom.sdpa.activate()
    assert attention.current_flash_attention_impl() is None


@pytest.mark.usefixtures("ran")
def test_activation_hides_torchs_warning_and_no_other() -> None:
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            with warploom.sdpa.activate():
                warnings.warn("of somebody else", stacklevel=1)
    finally:
        torch.set_warn_always(False)
    assert [str(one.message) for one in heard] == ["of somebody else"]
