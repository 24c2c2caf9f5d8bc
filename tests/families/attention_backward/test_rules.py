"""The attention backward's rules: what is legal, and what is said of what is not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from attention_backward_specs import ARCH, FAMILY, OPERATION, SCHEDULE, SMALL

from warploom.errors import SpecificationError
from warploom.generator.families._attention import DIMS
from warploom.generator.specification import KernelSpec


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ({"q_tile": 100}, "q_tile 100: must be a positive multiple of 16"),
        ({"q_tile": 0}, "q_tile 0: must be a positive multiple of 16"),
        ({"q_tile": 272}, "q_tile 272: must be what wgmma takes: multiples of 8, at most 256"),
        ({"kv_tile": 192}, "kv_tile 192: must be one of 64, 128"),
        ({"stages": 0}, "stages 0: must be 1 to 8"),
        ({"stages": 9}, "stages 9: must be 1 to 8"),
        ({"accumulate": "later"}, "accumulate 'later': must be one of bulk, direct"),
        ({"cluster": 3}, "cluster 3: must be one of 1, 2, 4, 8"),
        ({"q_tile": 96}, "244 registers expected, 240 to have"),
        ({"stages": 1, "overlap": True}, "stages 1 with overlap: the next q arrives before"),
        ({"stages": 1, "single_do": True}, "stages 1 with single_do: q has one stage as well"),
        ({"v_in_registers": "half", "overlap": True}, "v_in_registers half: only without overlap"),
        ({"v_in_registers": "all"}, "248 registers expected, 240 to have"),
        ({"v_in_registers": "some"}, "v_in_registers 'some': must be one of none, half, all"),
        ({"cluster_split": "heads"}, "cluster_split 'heads': must be one of columns, rows"),
        (
            {"cluster_split": "rows"},
            "cluster_split rows: a block has room for all gradients of a head of 128; take",
        ),
        ({"q_tile": 80, "kv_tile": 64}, "q_tile 80 with kv_tile 64: 1 warpgroups cannot share dq"),
        ({"stages": 4}, "shared memory 248832 bytes: sm_90a gives a block 232448"),
    ],
)
def test_a_schedule_that_breaks_one_rule_is_told_that_rule(
    schedule: dict[str, Any], reason: str
) -> None:
    found = FAMILY.reasons(ARCH, OPERATION, replace(SCHEDULE, **schedule))
    assert any(one.startswith(reason) for one in found), found


@pytest.mark.parametrize(
    ("operation", "schedule", "reason"),
    [
        ({"deterministic": True}, {"accumulate": "direct"}, "accumulate direct: a deterministic"),
        ({"softcap": True, "deterministic": True}, {"q_tile": 80}, "244 registers expected, 240"),
        (
            {"dim": 64, "softcap": True},
            {"q_tile": 144, "kv_tile": 64},
            "260 registers expected, 240 to have",
        ),
        (
            {"dim": 64, "softcap": True},
            {"q_tile": 112},
            "q_tile 112 with dim 64, softcap and no overlap: it spills registers; take another",
        ),
        (
            {"dim": 256},
            {"q_tile": 32, "v_in_registers": "half"},
            "v_in_registers half: only without overlap",
        ),
        ({"dim": 256}, {}, "shared memory 313344 bytes"),
        (
            {"dim": 256},
            {"cluster_split": "rows", "kv_tile": 64},
            "cluster_split rows with kv_tile 64: two blocks have 64 rows each; take 128",
        ),
        (
            {"dim": 256},
            {"cluster_split": "rows", "cluster": 2},
            "cluster_split rows with cluster 2: the two blocks are a cluster already; take "
            "cluster 1",
        ),
    ],
)
def test_a_schedule_that_does_not_fit_its_operation_is_told_why(
    operation: dict[str, Any], schedule: dict[str, Any], reason: str
) -> None:
    found = FAMILY.reasons(ARCH, replace(OPERATION, **operation), replace(SCHEDULE, **schedule))
    assert any(one.startswith(reason) for one in found), found


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        ({"element": "fp32"}, "element 'fp32': must be one of fp16, bf16"),
        ({"dim": 80}, "dim 80: must be one of 32, 64, 96, 128, 192, 256"),
        ({"mask": "alibi"}, "mask 'alibi': must be one of none, causal, window"),
        ({"lengths": "ragged"}, "lengths 'ragged': must be one of fixed, packed"),
        ({"softcap": 30.0}, "softcap 30.0: must be one of False, True"),
        ({"deterministic": 1.5}, "deterministic 1.5: must be one of False, True"),
    ],
)
def test_an_operation_that_is_not_legal_says_why(operation: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecificationError, match=re.escape(reason)):
        KernelSpec("sm_90a", replace(OPERATION, **operation), SCHEDULE)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_operation_has_a_legal_schedule(
    dim: int, mask: str, lengths: str, softcap: bool, deterministic: bool
) -> None:
    fields = {"dim": dim, "mask": mask, "lengths": lengths, "softcap": softcap}
    operation = replace(OPERATION, **fields, deterministic=deterministic)
    assert FAMILY.reasons(ARCH, operation, SMALL) == []
