"""The checks of plain arguments, which every public function shares."""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from warploom.arguments import require_boolean, require_count, require_dtype, require_number
from warploom.errors import ProblemError


@pytest.mark.parametrize(
    "value", ["yes", "no", "", 0, 1, 1.0, None, [], numpy.True_, torch.ones(1)]
)
def test_only_booleans_are_booleans(value: object) -> None:
    """A string that is not empty was taken as True, "false" among them."""
    require_boolean("causal", True)
    require_boolean("causal", False)
    with pytest.raises(ProblemError, match=r"causal .*must be True or False"):
        require_boolean("causal", value)


def test_an_optional_boolean_may_be_none() -> None:
    """None is a third value where a function says so, and the message tells."""
    require_boolean("deterministic", None, optional=True)
    with pytest.raises(ProblemError, match="must be True, False or None"):
        require_boolean("deterministic", "false", optional=True)


@pytest.mark.parametrize(
    "value", [1e39, "1", True, None, math.inf, math.nan, 1j, torch.ones(1), {}]
)
def test_only_finite_numbers_are_numbers(value: object) -> None:
    """A tensor as a number raised AttributeError from within, and True counted as 1."""
    for fine in (0, 1, -2.5, numpy.float32(2), numpy.int64(3)):
        require_number("beta", fine)
    with pytest.raises(ProblemError, match=r"beta .*must be a finite number"):
        require_number("beta", value)


@pytest.mark.parametrize("value", [10**5000, -(10**5000), [10**5000], "x" * 5000], ids=range(4))
def test_a_value_of_any_length_is_told_of_in_a_few_words(value: object) -> None:
    """The repr of an int of 5,000 digits raises ValueError, and that was what a caller got."""
    for require in (require_number, require_boolean):
        with pytest.raises(ProblemError, match=r"beta .*must be") as caught:
            require("beta", value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", ["3", 2.5, True, -1, None, torch.ones(1), [1]])
def test_only_ints_of_at_least_0_are_counts(value: object) -> None:
    """A length that is text raised TypeError, and True counted as 1."""
    require_count("seq_q", 0)
    require_count("seq_q", 7)
    with pytest.raises(ProblemError, match=r"seq_q .*must be an int of at least 0"):
        require_count("seq_q", value)


@pytest.mark.parametrize("value", [{}, "bfloat16", torch.float64, None, [torch.bfloat16], 3])
def test_only_known_dtypes_are_dtypes(value: object) -> None:
    """A dict as a dtype raised TypeError, since a plan's key cannot be hashed with it."""
    known = (torch.float16, torch.bfloat16)
    require_dtype("out_dtype", torch.bfloat16, known)
    with pytest.raises(
        ProblemError, match=r"out_dtype .*must be a torch.dtype: one of torch\.float16"
    ):
        require_dtype("out_dtype", value, known)
