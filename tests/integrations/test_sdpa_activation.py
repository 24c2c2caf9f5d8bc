"""`warploom.sdpa.activate`: torch's own attention runs Warploom's kernels, and gives them back.

The operators that torch has on a GPU are registered for the CPU here; sdpa_torchs stands for what
torch has there.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from interrupts import lines
from sdpa_bounds import differentiated, draw
from sdpa_torchs import operator, routed
from torch.nn import attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.runtime.plan import forget

Q = draw(2, 4, 9, 16)
K, V = draw(2, 2, 7, 16, seed=1), draw(2, 2, 7, 16, seed=2)

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
        operator("flash_attention", Q, Q, Q)
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
def test_an_interrupt_leaves_torchs_kernels_or_a_handle() -> None:
    """Ctrl-C at any line of activate() undoes it; at any line of remove(), remove() finishes it."""
    files = ("sdpa_activation", "torch_operators")
    made: list[Any] = []
    for point in sorted(lines(lambda: made.append(warploom.sdpa.activate()), files)):
        for handle in made:
            handle.remove()
        with pytest.raises(KeyboardInterrupt):
            lines(warploom.sdpa.activate, files, point)
        assert not active(), point
        assert attention.current_flash_attention_impl() is None, point
    for point in sorted(lines(warploom.sdpa.activate().remove, files)):
        handle = warploom.sdpa.activate()
        with pytest.raises(KeyboardInterrupt):
            lines(handle.remove, files, point)
        handle.remove()
        assert not active(), point
        assert attention.current_flash_attention_impl() is None, point
        with warploom.sdpa.activate():
            assert active()


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
