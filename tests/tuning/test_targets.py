"""A GPU can be named where there is none, and calls there choose as a store built ahead has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from warploom.errors import UnknownNameError
from warploom.generator import records_file
from warploom.generator.gpus import file_name
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.targets import names, target
from warploom.runtime import driver, records, targets

H200 = DeviceLimits(132, "NVIDIA H200")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of records of this test's own, beside those that came with the package."""
    monkeypatch.setenv("WARPLOOM_RECORDS_DIR", str(tmp_path))
    records.forget()
    yield tmp_path
    records.forget()


@pytest.mark.parametrize("name", ["NVIDIA H200", "nvidia h200", "H200", " h200 "])
def test_a_gpu_is_named_as_people_do(name: str) -> None:
    assert target(name) == H200


def test_a_part_of_a_gpu_and_one_that_nothing_is_kept_of_take_their_multiprocessors() -> None:
    assert target("h200:66") == DeviceLimits(66, "NVIDIA H200")
    assert target("NVIDIA H100 PCIe:114") == DeviceLimits(114, "NVIDIA H100 PCIe")


@pytest.mark.parametrize("name", ["NVIDIA H300", "", ":132", "H200:", "H200:0", "H200:-1", "../H"])
def test_a_gpu_that_nothing_is_kept_of_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"must be one .*, NVIDIA H200: .*:114"):
        target(name)


def test_a_gpu_that_was_tuned_on_is_known_and_a_damaged_file_hides_no_other(folder: Path) -> None:
    shipped = records_file.read(records_file.shipped("NVIDIA H200") or Path())
    text = records_file.text(shipped).replace("NVIDIA H200", "NVIDIA H100 NVL")
    (folder / file_name("NVIDIA H100 NVL")).write_text(text)
    (folder / "nvidia_h20.json").write_text('{"schema"')
    assert target("H100 NVL") == DeviceLimits(132, "NVIDIA H100 NVL")
    assert names() == ["NVIDIA H100 80GB HBM3", "NVIDIA H100 NVL", "NVIDIA H200"]
    with pytest.raises(UnknownNameError):
        target("H20")


def test_where_nothing_is_compiled_the_compiler_at_hand_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store built with one NVRTC lacked the kernels that calls beside another one asked for."""
    monkeypatch.setattr(driver, "limits", lambda device: H200)
    monkeypatch.setattr(records, "nvrtc", lambda: "13.7")
    assert targets.at_hand(-1) == NO_GPU
    assert targets.at_hand(0) == DeviceLimits(132, "NVIDIA H200", "13.7")
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    assert targets.at_hand(0) == H200 == target("H200")
