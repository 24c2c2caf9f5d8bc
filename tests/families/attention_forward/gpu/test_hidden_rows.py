"""Rows that a large finite bias hides have the mean of v, as torch's math path has it.

Guards against scores that overflow to -inf with the bias, and against a maximum whose product with
the scale is rounded by more than 1, which makes weights of 0, of 2^60 or of NaN.
"""

from __future__ import annotations

import attention_arena as arena
import attention_hidden_cases as hidden
import pytest
from attention_cases import operation, short
from attention_hidden_cases import LENGTHS, SHAPE, VALUES

from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kernel", hidden.FORWARD, ids=short)
def test_rows_that_a_finite_bias_hides_are_right(kernel: KernelSpec, value: float) -> None:
    keywords = hidden.keywords(operation(kernel), value)
    if operation(kernel).lengths == "packed":
        made = arena.packed(kernel, *LENGTHS, **keywords)
    else:
        made = arena.call(kernel, SHAPE, **keywords)
    # The plain expression rounds scores to 16 bits, a large bias with them: it is off by anything.
    arena.verify(made, beside_plain=False)
