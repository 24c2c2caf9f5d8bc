"""Attention of 8 bits as it is measured: what contenders compute, and what baselines are given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.families import Asked
from benchmarks.peers import _attention_eight_bits as eight_bits
from benchmarks.peers import _attention_quantized as quantized
from benchmarks.peers import attention_forward as forward
from benchmarks.peers._attention import sets
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._libraries import EIGHT_BITS
from benchmarks.peers.libraries import cudnn_frontend, flash_attention, vllm_flash_attention
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Arguments, extents

GROUPED = Attention("grouped", 2, 4, 2, 200, 64, causal=True)
FULL = Attention("full", 1, 2, 2, 130, 128)
PROBLEMS = pytest.mark.parametrize("problem", [GROUPED, FULL], ids=lambda one: one.name)
TENSORS = ("q", "k", "v", "out")
OURS = ("warploom", eight_bits.LAID_OUT, eight_bits.WIDE, eight_bits.QUANTIZING)


@PROBLEMS
@pytest.mark.parametrize("kind", eight_bits.KINDS)
def test_our_contenders_are_right_and_baselines_are_absent(problem: Attention, kind: str) -> None:
    for one in eight_bits.contenders(problem, kind, Asked(device="cpu")):
        if one.name in OURS:
            one.calls[0]()
            assert one.error_share is not None and one.error_share() <= 1
        else:
            with pytest.raises(RuntimeError, match=r"cudnn|_vllm_fa3_C"):
                one.calls[0]()


def _exact(one: quantized.Quantized) -> torch.Tensor:
    call = one.call()
    masked = band(call, extents(call))
    return reference.of_call(call.dequantized(), masked, reference.exact)[0]


@PROBLEMS
def test_flash_attention_3_gets_packed_sequences(
    problem: Attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [f"{each}_{of}" for each in ("cu_seqlens", "max_seqlen") for of in "qk"]
    scaled = [f"{of}_descale" for of in "qkv"]
    names = [*"qkv", "k_new", "out", *both, *scaled, "softmax_scale", "is_causal", "softcap"]
    (one,) = quantized.operands(problem, "cpu")

    def operator(**given: Any) -> None:
        assert list(given) == names and given["k_new"] is None
        length = given["max_seqlen_q"]
        starts = list(range(0, (problem.batch + 1) * length, length))
        assert given["cu_seqlens_q"].tolist() == given["cu_seqlens_k"].tolist() == starts
        shape = (problem.batch, length, -1, problem.dim)
        q, k, v = (given[name].view(shape).transpose(1, 2) for name in "qkv")
        scales = [given[f"{name}_descale"] for name in "qkv"]
        read = quantized.Quantized(q, k, v, *scales, one.out, given["is_causal"])
        assert given["softmax_scale"] == problem.dim**-0.5
        given["out"].view(shape).transpose(1, 2).copy_(_exact(read))

    monkeypatch.setattr(vllm_flash_attention, "_operator", lambda: (operator, tuple(names)))
    bound = vllm_flash_attention.flash3_8bit(one)
    bound.call()
    assert bound.share(one) <= 1
    one.out[-1, 0, -1, 3] += 1
    assert bound.share(one) > 1


class _Described:
    """A tensor of a graph of cuDNN's, as far as it is described."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (a method of any name)
        return lambda value: self.said.__setitem__(name, value) or self


class _Graph:
    """A graph of cuDNN's frontend that computes by the reference."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def tensor(self, **said: Any) -> _Described:
        return _Described(**said)

    def sdpa_fp8(self, **given: Any) -> tuple[Any, ...]:
        self.given, self.results = given, tuple(_Described() for _ in range(4))
        return self.results

    def build(self, _heuristics: object) -> None:
        """Nothing."""

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, tensors: dict[Any, torch.Tensor], _room: torch.Tensor, handle: str) -> None:
        assert handle == "handle"
        for found, tensor in tensors.items():
            sizes = found.said.get("dim") or found.said["set_dim"]
            strides = found.said.get("stride") or found.said["set_stride"]
            assert sizes == list(tensor.shape) and strides == list(tensor.stride())
        given = self.given
        names = ("q", "k", "v", "descale_q", "descale_k", "descale_v")
        q, k, v, *scales = (tensors[given[name]] for name in names)
        shape = (q.shape[0], k.shape[1])
        scales = [scale.view(1, 1).expand(shape) for scale in scales]
        read = quantized.Quantized(q, k, v, *scales, q, given["use_causal_mask"])
        assert tensors[given["descale_s"]] * tensors[given["scale_s"]] == 1
        result = _exact(read) * tensors[given["scale_o"]]
        assert result.abs().max() <= 448
        tensors[self.results[0]].copy_(result)


@PROBLEMS
def test_cudnn_gets_a_graph_of_scalars(problem: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = quantized.operands(problem, "cpu")
    kinds = SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32")
    modes = SimpleNamespace(A="A", FALLBACK="fallback")
    module = SimpleNamespace(
        data_type=kinds, heur_mode=modes, pygraph=_Graph, set_stream=lambda **_: None
    )
    monkeypatch.setattr(cudnn_frontend, "_handle", lambda: (module, "handle"))
    monkeypatch.setattr(cudnn_frontend, "_on_this_stream", lambda *_: None)
    bound = cudnn_frontend.cudnn_8bit(one)
    bound.call()
    assert bound.share(one) <= 1
    assert not torch.equal(bound.result().to(one.out.dtype), _exact(one).to(one.out.dtype))


def test_whole_tensors_that_were_cast_are_what_they_were_cast_from() -> None:
    (wide,) = sets(GROUPED, "cpu", once=True)
    one = quantized.by_cast(GROUPED, wide)
    for name in ("q", "k", "v"):
        code, scale = getattr(one, name), getattr(one, f"{name}_descale")
        assert code.shape == getattr(wide, name).shape
        restored = code.float() * scale[0, 0]
        torch.testing.assert_close(restored, getattr(wide, name).float(), rtol=0.07, atol=0.01)
    assert tuple(EIGHT_BITS) == ("fa3_8bit", "cudnn_8bit")


def test_flash_attention_3_of_vllm_takes_v_of_another_dimension(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other builds have no kernel for (192, 128), and the better peer would be missing there."""
    problem = Attention("two dims", 2, 3, 3, 40, 192, causal=True, dim_v=128)
    (one,) = sets(problem, "cpu", once=True)

    def operator(**given: Any) -> None:
        q, k, v, out = (given[name].unflatten(0, (2, 40)).transpose(1, 2) for name in TENSORS)
        call = Arguments(q, k, v, causal=given["is_causal"], scale=given["softmax_scale"])
        out.copy_(reference.of_call(call, band(call, extents(call)), reference.attention)[0])

    names = (*TENSORS, "is_causal", "softmax_scale")
    monkeypatch.setattr(vllm_flash_attention, "_operator", lambda: (operator, names))
    found = flash_attention.flash3(problem, one)
    wanted = forward.expected(problem, one)
    assert forward.error_share(problem, found, wanted) <= 1
