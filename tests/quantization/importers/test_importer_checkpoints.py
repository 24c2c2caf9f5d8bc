"""A layer is found in a checkpoint of any size and kind; its words may have any strides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from importer_cases import FIXTURES, NAME, SOURCES, load
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization.importers import import_weight
from warploom.quantization.importers.layer import fields


class Watched(Mapping[str, Tensor]):
    """A checkpoint that counts what is asked of it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors, self.asked = tensors, 0

    def __getitem__(self, name: str) -> Tensor:
        self.asked += 1
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        self.asked += len(self.tensors)
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@pytest.mark.parametrize("source", SOURCES)
def test_a_layer_costs_the_same_in_a_checkpoint_of_any_size(source: str) -> None:
    """37 ms a layer among 92,160 tensors: half an hour to read none of them twice."""
    case = load(FIXTURES / f"{source}.safetensors")[0]
    expert = 0 if source == "mxfp4" else None
    others = {f"model.layers.{i}.mlp.up_proj.weight": torch.empty(0) for i in range(1, 5000)}
    asked = []
    for tensors in (dict(case.tensors), {**others, **case.tensors}):
        watched = Watched(tensors)
        import_weight(
            watched, case.config, name=NAME, metadata=case.metadata, expert=expert,
            activations="e4m3" if source == "mxfp4" else "16-bit",
        )  # fmt: skip
        asked.append(watched.asked)
    assert asked[0] == asked[1] < 100


@pytest.mark.parametrize("source", SOURCES)
def test_an_open_file_is_read_as_its_tensors(source: str, tmp_path: Path) -> None:
    """What safe_open gives is no mapping, and is what large checkpoints are read with."""
    for case in load(FIXTURES / f"{source}.safetensors"):
        path = tmp_path / "model.safetensors"
        save_file({key: one.contiguous() for key, one in case.tensors.items()}, path)
        given: dict[str, Any] = {"name": NAME, "metadata": case.metadata}
        if source == "mxfp4":
            given |= {"expert": 1, "activations": "e4m3"}
        with safe_open(path, "pt") as file:
            found = import_weight(file, case.config, **given)
            with pytest.raises(ProblemError, match=r"no tensors of the layer 'model.layers.7'"):
                import_weight(file, case.config, **{**given, "name": "model.layers.7"})
            with pytest.raises(ProblemError, match=r"a checkpoint's tensors and no name|experts"):
                import_weight(file, case.config)
        expected = import_weight(case.tensors, case.config, **given)
        assert found.metadata == expected.metadata
        assert torch.equal(found.data, expected.data)


@pytest.mark.parametrize("bits", [4, 8])
def test_fields_of_words_are_read_whatever_their_strides(bits: int) -> None:
    """A dimension of size 1 may have any stride, and is contiguous all the same."""
    base = torch.randint(-(2**31), 2**31 - 1, (6, 12), generator=torch.Generator().manual_seed(0))
    base = base.to(torch.int32)
    for view in (
        base, base.t(), base[:, :1], base[:1], base[:1].t(), base[:, :1].t(), base[::2, ::3],
        base[:1, :1], base[:0], base[:, :0], base[:, 3:4].t(), base[0].expand(4, 12),
    ):  # fmt: skip
        shifts = torch.arange(0, 32, bits)
        expected = (view.long()[..., None] >> shifts) & ((1 << bits) - 1)
        assert torch.equal(fields(view, bits), expected.flatten(-2).to(torch.uint8))
