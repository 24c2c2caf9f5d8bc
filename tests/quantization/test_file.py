"""Files of packed weights come back whole, and what is not whole is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from packed_samples import KINDS, packed, same
from safetensors import safe_open

from warploom.errors import ProblemError
from warploom.quantization import PackedWeight, load, save

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def samples() -> dict[str, PackedWeight]:
    return {f"layers.{i}.{kind[0]}": packed(*kind, 65, 256) for i, kind in enumerate(KINDS)}


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save(samples(), path)
    found = load(str(path))
    assert found.keys() == samples().keys()
    for name, weight in samples().items():
        assert found[name].metadata == weight.metadata
        pairs = zip(found[name].tensors().items(), weight.tensors().items(), strict=True)
        assert all(one[0] == other[0] and same(one[1], other[1]) for one, other in pairs)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.safetensors"]


def test_weights_go_to_the_device_that_is_asked_for(tmp_path: Path) -> None:
    save({"w": packed(*KINDS[0], 65, 256)}, tmp_path / "w")
    assert load(tmp_path / "w", device="meta")["w"].device.type == "meta"


def test_the_file_that_was_there_stays_where_a_save_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w"
    save({"w": packed(*KINDS[0], 65, 256)}, path)
    before = path.read_bytes()

    def full(*arguments: object, **more: object) -> None:
        path.with_name("partly").write_bytes(b"")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("warploom.quantization.file.save_file", full)
    with pytest.raises(ProblemError, match=r"No space left on device: cannot be written"):
        save({"w": packed(*KINDS[1], 65, 256)}, path)
    assert path.read_bytes() == before
    assert {p.name for p in tmp_path.iterdir()} == {"w", "partly"}


def test_what_cannot_be_saved_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"^weight 'w': tensor.*: must be a PackedWeight, by a"):
        save({"w": torch.ones(2)}, tmp_path / "w")  # type: ignore[dict-item]
    with pytest.raises(ProblemError, match=r"no/w: .*No such file.*: cannot be written"):
        save(samples(), tmp_path / "no" / "w")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save(
        {"a": packed("uint4", None, "bf16", "16-bit", 3, 128), "b": packed(*KINDS[0], 3, 128)}, path
    )
    return path


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999])
def test_a_file_that_ends_early_is_refused(path: Path, part: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    with pytest.raises(ProblemError, match=r"w.safetensors: .*must be a file that .*save wrote"):
        load(path)


def test_no_byte_can_change_unseen(path: Path) -> None:
    """A bit of a scale that flips is a wrong result for good, and nothing else would say so."""
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        for place in (entry["data_offsets"][0], entry["data_offsets"][1] - 1):
            changed = bytearray(content)
            changed[length + place] ^= 4
            path.write_bytes(changed)
            with pytest.raises(ProblemError, match=rf"{name}: its checksum differs: must be a"):
                load(path)


def rewritten(path: Path, change: Change) -> None:
    """Write the file again with its tensors and text as `change` leaves them."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        text = json.loads(file.metadata()["warploom.packed_weights"])
    change(tensors, text)
    header = {"warploom.packed_weights": json.dumps(text)}
    safetensors.torch.save_file(tensors, path, metadata=header)


def exchanged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two weights by each other's names: the tensors that both have, and no more."""
    swapped = {f"{'ba'['ab'.index(key[0])]}{key[1:]}": one for key, one in tensors.items()}
    tensors.clear()
    return swapped


FOREIGN: list[tuple[Change, str]] = [
    (lambda t, m: t.pop("a.data"), r"tensors a.data: must be a file"),
    (lambda t, m: t.update(more=torch.ones(1)), r"tensors more: must be a file"),
    (lambda t, m: m.pop("b"), r"tensors b.data: must be a file"),
    (
        lambda t, m: m["a"].pop("checksums"),
        r"warploom.packed_weights in its header: 'checksums': must be",
    ),
    (lambda t, m: m["a"].update(crc32=m["a"].pop("checksums")), r"a\.\w+: its checksum differs"),
    (lambda t, m: m["a"].update(checksums=["data"]), r".*checksums must be by the names of parts"),
    (lambda t, m: m["a"]["metadata"].update(n=4), r"a\.\w+: its checksum differs"),
    (lambda t, m: m["a"]["metadata"].update(k=127), r"a\.\w+: its checksum differs"),
    (lambda t, m: m["b"]["metadata"].update(n=1 << 31), r"b: n 2147483648: must be a positive"),
    (
        lambda t, m: m.update(a=m["b"], b=m["a"]) or t.update(exchanged(t)),
        r"[ab]\.\w+: its checksum differs",
    ),
    (
        lambda t, m: m["a"]["metadata"].update(version=7),
        r"a: quantized weight of version 7: must be of version 2: pack the weight again",
    ),
    (
        lambda t, m: m["a"].update(metadata={"version": 1, "step": 16}),
        r"a: quantized weight of version 1: must be of version 2: pack the weight again",
    ),
    (lambda t, m: m["a"]["metadata"].update(n=65), r"a: data torch.uint8 \[1, 1, 4096\]: must be"),
    (lambda t, m: m["a"]["metadata"].update(format="x"), r"a: weight format 'x': must be one of"),
    (lambda t, m: m["b"]["metadata"].pop("k"), r"b: metadata of a quantized weight .*: must have"),
    (
        lambda t, m: t.update({"a.channel_scales": t["a.channel_scales"].float()}),
        r"a: channel_scales torch.float32 \[64\]: must be torch.bfloat16",
    ),
]


@pytest.mark.parametrize(("change", "message"), FOREIGN, ids=[text for _, text in FOREIGN])
def test_what_is_not_as_it_was_saved_is_refused(path: Path, change: Change, message: str) -> None:
    rewritten(path, change)
    with pytest.raises(ProblemError, match=rf"w.safetensors: {message}"):
        load(path)


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": torch.ones(2)}, path)
    with pytest.raises(ProblemError, match=r"no warploom.packed_weights in its header: must be a"):
        load(path)
    with pytest.raises(ProblemError, match=r"none: .*must be a file that"):
        load(tmp_path / "none")
    with pytest.raises(ProblemError, match=r"must be a file that"):
        load(tmp_path)


def test_no_bit_of_the_header_can_change_unseen(tmp_path: Path) -> None:
    """Another n, k or name was loaded without a word: checksums were of the tensors alone."""
    path = tmp_path / "w"
    weights = {"a": packed(*KINDS[0], 3, 128), "c": packed("uint4", None, "bf16", "16-bit", 3, 128)}
    save(weights, path)
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    accepted = []
    # A digit becomes another one by its lower bits; of other bytes one bit each is enough.
    numbers = [8 * i + bit for i in range(length) if chr(content[i]).isdigit() for bit in range(3)]
    for bit in {*numbers, *(8 * i + i % 8 for i in range(length))}:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            found = load(path)
        except ProblemError:
            continue
        alike = found.keys() == weights.keys() and all(
            found[name].metadata == one.metadata
            and all(same(found[name].tensors()[part], x) for part, x in one.tensors().items())
            for name, one in weights.items()
        )
        accepted += [] if alike else [bit]
    assert accepted == []


def test_names_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"its name must be Unicode text"):
        save({"\ud800": packed(*KINDS[0], 3, 128)}, tmp_path / "w")
    with pytest.raises(ProblemError, match=r"^weights \[\]: must be a mapping"):
        save([], tmp_path / "w")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_messages_of_a_hostile_header_are_short(path: Path) -> None:
    rewritten(path, lambda t, m: m["a"]["metadata"].update(format="x" * 100_000))
    with pytest.raises(ProblemError) as caught:
        load(path)
    assert len(str(caught.value)) < 1000 + len(str(path))
