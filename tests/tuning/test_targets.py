"""A GPU can be named where there is none, and calls there choose as a store built ahead has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import warploom
from warploom.cli import main
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


@pytest.mark.parametrize("name", ["NVIDIA H200", "nvidia h200", "H200", " h200 ", "H200 SXM"])
def test_a_gpu_is_named_as_people_do(name: str) -> None:
    assert target(name) == H200


@pytest.mark.parametrize(
    ("name", "multiprocessors", "gpu"),
    [
        ("H100 SXM", 132, "NVIDIA H100 80GB HBM3"),
        ("h100 80gb hbm3", 132, "NVIDIA H100 80GB HBM3"),
        ("H100 PCIe", 114, "NVIDIA H100 PCIe"),
        ("h100 nvl", 132, "NVIDIA H100 NVL"),
        ("H100 80GB HBM2e", 114, "NVIDIA H100 80GB HBM2e"),
        ("H100 SXM 64GB", 132, "NVIDIA H100"),
        ("H200 NVL", 132, "NVIDIA H200 NVL"),
        ("H800", 132, "NVIDIA H800"),
        ("H800 PCIe", 114, "NVIDIA H800 PCIe"),
        ("H800 NVL", 132, "NVIDIA H800 NVL"),
        ("h20", 78, "NVIDIA H20"),
        ("H20-3e", 78, "NVIDIA H20-3e"),
        ("GH200 120GB", 132, "NVIDIA GH200 120GB"),
        ("GH200 480GB", 132, "NVIDIA GH200 480GB"),
        ("GH200 144G", 132, "NVIDIA GH200 144G HBM3e"),
    ],
)
def test_every_product_of_the_architecture_is_found_by_its_short_name(
    name: str, multiprocessors: int, gpu: str
) -> None:
    assert target(name) == DeviceLimits(multiprocessors, gpu)


def test_a_name_that_several_kinds_share_is_refused_with_theirs() -> None:
    """The driver calls the 64 GB module alone `NVIDIA H100`; people who write that mean another."""
    for name in ("H100", "NVIDIA H100", "H100:132"):
        with pytest.raises(UnknownNameError, match=r"did you mean .*H100 80GB HBM3 or"):
            target(name)


def test_a_part_of_a_gpu_takes_its_multiprocessors() -> None:
    assert target("h200:66") == DeviceLimits(66, "NVIDIA H200")
    assert target("NVIDIA H100 PCIe:114") == target("H100 PCIe")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA GH200 96GB:132", DeviceLimits(132, "NVIDIA GH200 96GB")),
        ("gh200 96GB: 132", DeviceLimits(132, "NVIDIA GH200 96GB")),
        (
            "nvidia h100 80GB HBM3 MIG 1g.10gb:16",
            DeviceLimits(16, "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
        ),
        ("H200 MIG 3g.71gb:60", DeviceLimits(60, "NVIDIA H200 MIG 3g.71gb")),
        ("NVIDIA H20-3e:78", DeviceLimits(78, "NVIDIA H20-3e")),
        ("H100 CNX:114", DeviceLimits(114, "NVIDIA H100 CNX")),
        ("h100 sxm MIG 1c.3g.40gb:20", DeviceLimits(20, "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb")),
    ],
)
def test_any_variant_of_a_product_is_taken_with_its_multiprocessors(
    name: str, found: DeviceLimits
) -> None:
    """`NVIDIA GH200 96GB:132` was refused with the advice to give a Hopper product with its SMs."""
    assert target(name) == found


def test_a_refusal_lists_the_products_that_are_taken() -> None:
    with pytest.raises(UnknownNameError, match=r"NVIDIA GH200, .*NVIDIA H100, NVIDIA H20, .*H800"):
        target("NVIDIA A100:108")


UNKNOWN = [
    *("NVIDIA H300", "", ":132", "../H", "../H200", "h200!", "h_200"),
    *("H", "NVIDIA", "GPU", "132", "H200:132:132", "sm_90a"),
    *("NVIDIA A100:108", "A100", "NVIDIA A100-SXM4-80GB:108", "NVIDIA L40S:142", "B200:148"),
    *("NVIDIA B200", "NVIDIA GB200:152", "NVIDIA GeForce RTX 4090:128", "AMD H100:132"),
    *("NVIDIA H100 PCIe 2", "NVIDIA H200x", "NVIDIA NVIDIA H200", "H100 PCI", "NVIDIA H200x:132"),
    *("NVIDIA H1000:10", "NVIDIA B200:148", "NVIDIA B200 H200:132", "NVIDIA:132", "MIG 1g.10gb:16"),
    *("NVIDIA A100-SXM4-40GB MIG 3g.20gb:42", "A100 MIG 3g.20gb:42", "B200 MIG 3g.90gb:60"),
]


@pytest.mark.parametrize("name", [*UNKNOWN, None, 132, b"H200", ["H200"]])
def test_a_gpu_that_nothing_is_kept_of_is_refused_with_the_names_there_are(name: str) -> None:
    """`NVIDIA A100:108` had kernels of sm_90a compiled for it."""
    with pytest.raises(UnknownNameError, match=r"must be one .*, NVIDIA H200, .*:114"):
        target(name)


@pytest.mark.parametrize(
    "name",
    ["H200:", "H200:0", "H200:-1", "H200:1e2", "H200:²", "H200 :six", "cuda:00", "H200:99999"],
)
def test_what_is_no_number_of_multiprocessors_is_told(name: str) -> None:
    """`H100 SXM:0` was answered with the question whether `H100 SXM` was meant."""
    with pytest.raises(UnknownNameError, match=r"number of SMs after the colon, which '.*' is not"):
        target(name)


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3 MIG 3g.40gb", "h100 sxm mig 3G.40GB"])
def test_a_slice_without_its_multiprocessors_is_told_to_have_them_beside_it(name: str) -> None:
    """It was answered with the question whether the whole GPU was meant."""
    wanted = "followed by its number of SMs.*'NVIDIA H100 80GB HBM3 MIG 3g.40gb:SMS'"
    with pytest.raises(UnknownNameError, match=wanted):
        target(name)
    assert target(f"{name}:60") == DeviceLimits(60, "NVIDIA H100 80GB HBM3 MIG 3g.40gb")


@pytest.mark.parametrize(
    "profile", ["MIG", "MIG 40gb", "MIG 9g.40gb", "MIG 3g.900gb", "MIG 3g.40gb MIG 1g.10gb"]
)
def test_a_profile_that_the_gpu_has_not_is_refused(profile: str) -> None:
    """`H100 SXM MIG 9g.900gb:60` was a GPU that kernels were compiled for."""
    with pytest.raises(UnknownNameError, match="must be a MIG profile"):
        target(f"H100 SXM {profile}:60")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("H2000", "did you mean NVIDIA H200"),
        ("NVIDIA H100 PCI", "did you mean NVIDIA H100 PCIe"),
        ("gh200 480", "did you mean NVIDIA GH200 480GB"),
        ("h100 80gb", "did you mean NVIDIA H100 80GB HBM2e or NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_name_that_is_nearly_one_is_told_which(name: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        target(name)


@pytest.mark.parametrize(
    ("name", "most"), [("H200:133", 132), ("H100 PCIe:115", 114), ("H20:79", 78)]
)
def test_no_gpu_has_more_multiprocessors_than_its_product(name: str, most: int) -> None:
    with pytest.raises(UnknownNameError, match=f"has at most {most} SMs"):
        target(name)


def test_a_file_of_records_makes_no_gpu_of_another_architecture_known(folder: Path) -> None:
    shipped = records_file.read(records_file.shipped("NVIDIA H200") or Path())
    text = records_file.text(shipped).replace("NVIDIA H200", "NVIDIA A100-SXM4-80GB")
    (folder / file_name("NVIDIA A100-SXM4-80GB")).write_text(text)
    for name in ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB:108"):
        with pytest.raises(UnknownNameError):
            target(name)
    assert "NVIDIA A100-SXM4-80GB" not in names()


@pytest.mark.parametrize("name", ["NVIDIA A100:108", "A100", ""])
def test_every_way_to_name_a_gpu_refuses_the_same_names(name: str) -> None:
    x, linear = torch.ones(8, 64).bfloat16(), warploom.nn.Linear(64, 64, dtype=torch.bfloat16)
    q = torch.ones(1, 2, 8, 64).bfloat16()
    half = torch.nn.functional.pad(q, (0, 1))  # of 65: torch's kernel computes it
    asked: list[Callable[[], object]] = [
        lambda: warploom.explain(x, x.t(), gpu=name),
        lambda: warploom.explain(linear, x, gpu=name),
        lambda: warploom.explain(linear, x.double(), gpu=name),
        lambda: warploom.explain(q, q, q, gpu=name),
        lambda: warploom.explain(warploom.sdpa, q, q, q, gpu=name),
        lambda: warploom.explain(warploom.sdpa, half, half, half, gpu=name),
        lambda: warploom.records_digest(name),
        lambda: targets.ahead_of_time(name),
    ]
    for one in asked:
        with pytest.raises(UnknownNameError, match="must be one that is known"):
            one()
    listed = ["compile", "gemm", "--shapes", "64x64x64", "--gpu", name]
    told = CliRunner().invoke(main, listed)
    assert told.exit_code == 1 and "must be one that is known" in told.output


def test_a_gpu_that_was_tuned_on_is_known_and_a_damaged_file_hides_no_other(folder: Path) -> None:
    shipped = records_file.read(records_file.shipped("NVIDIA H200") or Path())
    text = records_file.text(shipped).replace("NVIDIA H200", "NVIDIA H100 CNX")
    (folder / file_name("NVIDIA H100 CNX")).write_text(text)
    (folder / "nvidia_h100_x.json").write_text('{"schema"')
    assert target("H100 CNX") == DeviceLimits(132, "NVIDIA H100 CNX")
    assert "NVIDIA H100 CNX" in names() and "NVIDIA H100 X" not in names()
    with pytest.raises(UnknownNameError):
        target("H100 X")


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
