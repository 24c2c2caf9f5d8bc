"""What the guide says of formats, their bits and their errors, is what they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from warploom.generator.formats import FORMATS
from warploom.quantization import quantize

GUIDE = Path(__file__).parents[2] / "docs" / "guide.md"
ROW = re.compile(r"^\| `(\w+)` \| (\d+|None) \| ([\d.]+) \| ([\d.]+) % \|", re.MULTILINE)
ROWS = ROW.findall(GUIDE.read_text())


def test_every_format_is_told() -> None:
    assert {name for name, *_ in ROWS} == set(FORMATS)


@pytest.mark.parametrize(("name", "group", "bits", "error"), ROWS)
def test_bits_and_errors_are_those_of_normal_weights(
    name: str, group: str, bits: str, error: str
) -> None:
    """A quantiser that lost a tenth of its codes would be told better than it is."""
    weight = torch.randn(128, 4096, generator=torch.Generator().manual_seed(0))
    packed = quantize(weight, name, None if group == "None" else int(group))
    report = packed.error(weight)
    assert float(bits) == pytest.approx(report.bits, abs=0.006)
    assert float(error) == pytest.approx(100 * report.relative, rel=0.03, abs=0.05)
