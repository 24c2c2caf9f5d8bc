"""Kernels count in 32 bits: from which extents on a call is refused, before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from edges import H200

from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families.gemm import GemmOperation, GemmProblem, complete
from warploom.generator.shapes import LARGEST, refuse_beyond
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime import driver
from warploom.runtime import launch_plan as plan


def test_what_fits_32_bits_is_let_through() -> None:
    refuse_beyond({"m 5": LARGEST, "n 6": 0})
    with pytest.raises(ProblemError, match="n 6: must be smaller: kernels count to 2147483647, "):
        refuse_beyond({"m 5": LARGEST, "n 6": LARGEST + 1})


def test_nothing_is_built_for_a_call_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*_: object) -> None:
        raise AssertionError("a kernel is built")

    operation = GemmOperation("bf16", "bf16", "bf16")
    wide = complete("sm_90a", operation, {"tile": (128, 256, 64), "cluster": (2, 1)})
    spec = KernelSpec("sm_90a", operation, wide)
    product = GemmProblem(8, 8, 64, pitch_a=64, pitch_b=64, pitch_d=8)
    monkeypatch.setattr(driver, "limits", lambda _: H200)
    monkeypatch.setattr(plan, "kernel", build)
    with pytest.raises(ProblemError, match="m 2147483647: must be smaller"):
        plan.plan_launches(spec, replace(product, m=LARGEST), 0, ("a", "b", "d"), ())
    with pytest.raises(AssertionError, match="a kernel is built"):
        plan.plan_launches(spec, product, 0, ("a", "b", "d"), ())


@pytest.mark.parametrize(
    ("fits", "changes"),
    [
        (True, {}),
        (True, {"extents": (64, 2**32)}),
        (False, {"extents": (64, 2**32 + 1)}),
        (False, {"extents": (0, 8)}),
        (True, {"pitches": (2**40 - 16,)}),
        (False, {"pitches": (2**40,)}),
        (False, {"pitches": (-16,)}),  # of packed rows more than 2^34 bytes apart
        (False, {"pitches": (24,)}),
    ],
)
def test_a_tensor_map_is_refused_beyond_what_tma_takes(fits: bool, changes: dict[str, Any]) -> None:
    described = TensorMap("a", element("bf16"), (64, 8), (128,), (64, 8), 128)
    assert replace(described, **changes).fits(1024) is fits
    assert not replace(described, **changes).fits(1032)
