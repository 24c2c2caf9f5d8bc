"""What tests of integrations share: Warploom in place of torch on CPU tensors, and what it ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sdpa_torchs import torchs

import warploom
from warploom.integrations import devices, linear, quantized_linear, sdpa_activation, sdpa_rules
from warploom.runtime.families.gemm.layer import Layer
from warploom.runtime.families.mixed_gemm import layer as mixed_gemm_layer


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's kernels ran, where Warploom may be activated for CPU tensors."""
    noted: list[str] = []
    monkeypatch.setattr(sdpa_activation, "_KEY", "CPU")
    monkeypatch.setattr(sdpa_activation, "torch_kernels", lambda *_: torchs(noted))
    monkeypatch.setattr(sdpa_rules, "elsewhere", lambda tensor: None)
    return noted


@pytest.fixture
def activated(ran: list[str]) -> Iterator[list[str]]:
    with warploom.sdpa.activate():
        yield ran


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The calls of gemm by linear layers, which are decided as on a GPU; the reference computes."""
    calls: list[dict[str, Any]] = []

    def gemm(a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> torch.Tensor:
        calls.append({"a": a, "b": b, **keywords})
        return warploom.gemm(a, b, **keywords)

    monkeypatch.setitem(devices.reasons, -1, None)
    monkeypatch.setattr(linear, "gemm", gemm)
    for name in ("again", "call"):
        computes: Any = getattr(Layer, name)

        def counting(self: Layer, *given: Any, _computes: Any = computes) -> Any:  # noqa: ANN401
            found = _computes(self, *given)
            if found is not None:
                calls.append({"given": given})
            return found

        monkeypatch.setattr(Layer, name, counting)
    return calls


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The inputs of mixed_gemm's calls by layers, which are decided as on a GPU."""
    calls: list[torch.Tensor] = []

    def mixed_gemm(a: torch.Tensor, weight: Any, **keywords: Any) -> torch.Tensor:  # noqa: ANN401
        calls.append(a)
        return warploom.mixed_gemm(a, weight, **keywords)

    monkeypatch.setitem(devices.reasons, -1, None)
    monkeypatch.setattr(quantized_linear, "mixed_gemm", mixed_gemm)
    for name in ("again", "call"):
        computes: Any = getattr(mixed_gemm_layer.Layer, name)

        def counting(
            self: mixed_gemm_layer.Layer,
            call: Any,  # noqa: ANN401
            read: tuple[torch.Tensor, ...],
            _computes: Any = computes,  # noqa: ANN401
        ) -> Any:  # noqa: ANN401
            found = _computes(self, call, read)
            if found is not None:
                calls.append(read[0])
            return found

        monkeypatch.setattr(mixed_gemm_layer.Layer, name, counting)
    return calls


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often transformers' attention was computed `by_kernels` and `by_torch`."""
    from warploom.integrations import transformers_attention  # imports transformers

    transformers_attention.register()
    counted: Counter[str] = Counter()
    for name in ("by_kernels", "by_torch"):
        computes = getattr(transformers_attention, f"_{name}")

        def counting(
            *arguments: Any,
            _computes: Any = computes,  # noqa: ANN401
            _name: str = name,
        ) -> torch.Tensor:
            counted[_name] += 1
            result: torch.Tensor = _computes(*arguments)
            return result

        monkeypatch.setattr(transformers_attention, f"_{name}", counting)
    return counted


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch, computed: Counter[str]) -> Counter[str]:
    """The same, with Warploom's reference in place of kernels on the CPU."""
    from warploom.integrations import transformers_attention  # imports transformers

    monkeypatch.setattr(transformers_attention, "elsewhere", lambda tensor: None)
    monkeypatch.setitem(devices.reasons, -1, None)
    return computed
