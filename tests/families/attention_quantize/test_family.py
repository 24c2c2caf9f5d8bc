"""What the generator says of the family: rules, launches, text and registers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from precompiled import reports

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeProblem,
    AttentionQuantizeSchedule,
    AttentionQuantizeShape,
)
from warploom.generator.families.attention_quantize.schedule import CHUNK, complete
from warploom.generator.launches import NO_GPU, Address
from warploom.generator.model import rank
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

FAMILY = family("attention_quantize")
SMOOTH = AttentionQuantizeOperation("bf16", 128, "int8", smooth=True)
PLAIN = AttentionQuantizeOperation("bf16", 128, "e4m3")
ALONE = AttentionQuantizeOperation("e4m3", 128, "none")
PACKED = replace(ALONE, lengths="packed")
STRIDES = (1 << 20, 128, 2048)
PROBLEM = AttentionQuantizeProblem(2, 16, 4, 1000, 4099, *[STRIDES] * 5)


def spec(operation: AttentionQuantizeOperation = SMOOTH, threads: int = 0) -> KernelSpec:
    schedule = AttentionQuantizeSchedule(threads) if threads else complete("", operation, {})  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, schedule)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dim": 80}, "dim 80: must be a positive multiple of 32"),
        ({"dim": 288}, "dim 288: must be 16 to 256"),
        ({"element": "fp32"}, "must be one of fp16, bf16, e4m3"),
        ({"scores": "fp8"}, "must be one of int8, e4m3, none"),
        ({"scores": "none", "smooth": False}, "scores none of element bf16: must be int8 or e4m3"),
        ({"element": "e4m3"}, "scores int8 of element e4m3: must be none"),
        ({"element": "e4m3", "scores": "none"}, "smooth with scores none: must be left out"),
        ({"lengths": "packed"}, "lengths packed of element bf16: only e4m3 v has them"),
    ],
)
def test_what_is_not_legal_is_told(change: dict[str, object], said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        spec(replace(SMOOTH, **change))  # type: ignore[arg-type]


def test_threads_hold_one_to_eight_rows_each() -> None:
    for dim, fewest, most in ((32, 64, 256), (64, 64, 512), (128, 128, 512), (256, 256, 512)):
        operation = replace(SMOOTH, dim=dim)
        for threads in (64, 128, 256, 512):
            if fewest <= threads <= most:
                spec(operation, threads)
            else:
                with pytest.raises(SpecificationError, match=f"threads {threads} of dim {dim}"):
                    spec(operation, threads)


def test_a_name_says_what_is_special() -> None:
    name = "attention_quantize_sm90a_bf16_d128_scores_int8_smooth_threads256_"
    assert spec(SMOOTH, 256).name.startswith(name)


@pytest.mark.parametrize("lengths", [(1, 1), (0, 300), (128, 128), (129, 257), (1000, 4099)])
def test_ctas_have_every_tile_once(lengths: tuple[int, int]) -> None:
    seq_q, seq_k = lengths
    problem = replace(PROBLEM, seq_q=seq_q, seq_k=seq_k)
    tiles_q, tiles_k, chunks = -(-seq_q // 128), -(-seq_k // 128), -(-seq_k // CHUNK)
    statistics, launch = FAMILY.launches(spec(), problem, NO_GPU)
    assert statistics.entry == f"{spec().name}_statistics" and launch.entry == spec().name
    assert statistics.parameters == launch.parameters and statistics.early and launch.early
    assert statistics.grid == 2 * 4 * chunks
    assert launch.grid == 2 * (2 * 4 * tiles_k + 16 * tiles_q)
    assert launch.parameters["key_tiles"] == 2 * 2 * 4 * tiles_k
    (alone,) = FAMILY.launches(spec(ALONE), problem, NO_GPU)
    assert alone.grid == 2 * 4 * tiles_k and "key_tiles" not in alone.parameters
    packed = replace(problem, batch=1, sequences=3)
    (alone,) = FAMILY.launches(spec(PACKED), packed, NO_GPU)
    assert alone.grid == 4 * ((seq_k + 3 * 127) // 128)


def tensors(operation: AttentionQuantizeOperation) -> set[str]:
    """Those that a launch is handed."""
    launch = FAMILY.launches(spec(operation), PROBLEM, NO_GPU)[-1]
    return {one.tensor for one in launch.parameters.values() if isinstance(one, Address)}


def test_a_launch_is_handed_what_its_operation_has_alone() -> None:
    assert tensors(ALONE) == {"v", "v_out"}
    assert tensors(PACKED) == {"v", "v_out", "cu_seqlens"}
    plain = {"q", "k", "q_out", "k_out", "q_descale", "k_descale", "v_descale"}
    plain |= {"v", "v_out", "v_factor", "partial_peaks", "arrivals"}
    assert tensors(PLAIN) == plain
    assert tensors(SMOOTH) == plain | {"partial_sums", "k_mean", "score_shift"}


def test_workspaces_have_room_for_every_chunk() -> None:
    """What says how many chunks are done is zeros for the stream's next call."""
    chunks = -(-4099 // CHUNK)
    rooms = {one.tensor: one for one in FAMILY.workspaces(spec(), PROBLEM)}
    assert {name for name, one in rooms.items() if one.kept} == {"arrivals"}
    assert rooms["partial_sums"].bytes == 2 * 4 * chunks * 128 * 4
    assert rooms["partial_peaks"].bytes == 2 * 4 * chunks * 4
    assert rooms["arrivals"].bytes == rooms["v_factor"].bytes == 2 * 4 * 4
    assert FAMILY.workspaces(spec(ALONE), PROBLEM) == []
    assert "partial_sums" not in [one.tensor for one in FAMILY.workspaces(spec(PLAIN), PROBLEM)]


@pytest.mark.parametrize(
    "sizes", [{"seq_k": 2**31 - 1}, {"seq_q": 2**31 - 1}, {"batch": 2**22, "seq_k": 2**20}], ids=str
)
def test_what_takes_more_than_32_bits_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(), replace(PROBLEM, **sizes), NO_GPU)


def test_a_kernel_has_what_its_operation_needs_alone() -> None:
    smooth, plain, alone = (render(spec(one)) for one in (SMOOTH, PLAIN, ALONE))
    assert "struct Mean" in smooth and "struct Mean" not in plain
    assert "Int8" in smooth and "Int8" not in plain
    assert "_statistics(" in plain and "partial_sums" not in plain
    for word in ("_statistics", "E4m3", "quantize_keys", "key_tiles"):
        assert word not in alone


def test_no_kernel_spills(update_golden: bool) -> None:
    operations = (SMOOTH, replace(PLAIN, element="fp16"), ALONE, PACKED)
    dims = (32, 64, 96, 128, 160, 256)
    listed = [spec(replace(one, dim=dim)) for dim in dims for one in operations]
    path = Path(__file__).with_suffix(".json")
    for name, one in reports(listed, path, renew=update_golden).items():
        assert name in one.resources
        assert all(entry.clean for entry in one.resources.values()), name


def test_the_model_knows_that_memory_limits_it() -> None:
    """16,384 tokens of 2,048: 436 MB, where k and v are read twice; of v alone 67."""
    shape = AttentionQuantizeShape(1, 16, 16, 16384, 16384)
    assert 1e-4 < rank(None, [spec()], shape, 132)[0].seconds < 1.3e-4
    assert 8e-5 < rank(None, [spec(PLAIN)], shape, 132)[0].seconds < 1.1e-4
    alone = AttentionQuantizeShape(1, 0, 16, 0, 16384)
    assert 1.5e-5 < rank(None, [spec(ALONE)], alone, 132)[0].seconds < 3e-5
