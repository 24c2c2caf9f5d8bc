"""Which columns a row attends to, by the emitted text: its ranges and masks run on the CPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from attention_text import host_text
from host import needs_compiler, run_each

from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.specification import KernelSpec


@needs_compiler
@pytest.mark.parametrize("tile", [(64, 48), (128, 128), (128, 176), (192, 80)], ids=str)
def test_every_row_is_stored_once_and_attends_to_its_columns_once(
    tile: tuple[int, int], tmp_path: Path
) -> None:
    schedule = AttentionSchedule(*tile, pingpong=tile[0] > 64)  # type: ignore[arg-type]
    texts = {}
    for mask, lengths in product(("none", "causal", "window"), ("fixed", "packed")):
        operation = AttentionOperation("bf16", 32, mask, lengths=lengths)  # type: ignore[arg-type]
        texts[f"{mask}, {lengths}"] = host_text(KernelSpec("sm_90a", operation, schedule))
    run_each(texts, tmp_path, '#include "_attention/ranges.h"\n', more=("set",))


@needs_compiler
def test_tiles_of_8_bits_have_their_columns_once(tmp_path: Path) -> None:
    schedule = AttentionSchedule(128, 128, overlap=False)
    texts = {}
    for mask, lengths in product(("none", "causal", "window"), ("fixed", "packed")):
        operation = AttentionOperation(
            "bf16",
            64,
            mask,  # type: ignore[arg-type]
            lengths=lengths,  # type: ignore[arg-type]
            scores="e4m3",
            weights="e4m3",
        )
        texts[f"{mask}, {lengths}"] = host_text(KernelSpec("sm_90a", operation, schedule))
    run_each(texts, tmp_path, '#include "_attention/ranges.h"\n', more=("set",))


@needs_compiler
@pytest.mark.parametrize("tile", [(64, 48), (128, 128)], ids=str)
def test_every_row_attends_once_to_what_a_mask_of_keys_shows_of_its_columns(
    tile: tuple[int, int], tmp_path: Path
) -> None:
    schedule = AttentionSchedule(*tile, pingpong=tile[0] > 64)  # type: ignore[arg-type]
    texts = {}
    for mask, lengths in product(("none", "causal", "window"), ("fixed", "packed")):
        for alibi in (False, True):  # beside which the mask is read of every tile
            operation = AttentionOperation(
                "bf16",
                32,
                mask,  # type: ignore[arg-type]
                lengths=lengths,  # type: ignore[arg-type]
                masked=True,
                alibi=alibi,
            )
            text = host_text(KernelSpec("sm_90a", operation, schedule))
            texts[f"{mask}, {lengths}, {alibi}"] = text
    run_each(texts, tmp_path, '#include "_attention/ranges.h"\n', more=("set",))
