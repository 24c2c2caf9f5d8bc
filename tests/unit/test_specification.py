"""A spec's identity: what it is made of, what its name says, and what never becomes one."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from warploom.errors import SpecificationError, UnknownNameError
from warploom.generator import families, names
from warploom.generator.epilogue import Activation, Bias, Residual, Scale
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec, parse_name

PLAIN = KernelSpec("sm_90a", GemmOperation("bf16", "bf16", "fp32"), GemmSchedule((128, 256, 64), 3))
NAME = "gemm_sm90a_bf16_bf16_fp32_128x256x64_stages3"
LONG = (  # as version 0.1.0 named it
    "gemm_sm90a_bf16_bf16_fp32_row_col_cooperative_128x256x64_cluster1x1_consumers2_stages3_"
    "along_m_group8_tma"
)


DIGEST = hashlib.sha256(
    b'{"arch":"sm_90a","operation":{"a":"bf16","accumulation":"fast","b":"bf16","batched":false,'
    b'"d":"fp32","epilogue":[],"family":"gemm","layout_a":"row","layout_b":"col"},"schedule":'
    b'{"cluster":[1,1],"consumers":2,"group":8,"l2_promotion":256,"producer_registers":40,'
    b'"raster":"along_m","roles":"cooperative","split":1,"stages":3,"store":"tma","swap":false,'
    b'"tile":[128,256,64]}}'
).hexdigest()


def with_epilogue(*steps: Any) -> KernelSpec:
    return replace(PLAIN, operation=GemmOperation("bf16", "bf16", "fp32", epilogue=steps))


def test_identity_is_every_field_in_canonical_order() -> None:
    assert PLAIN.digest == DIGEST
    assert PLAIN.name == f"{NAME}_{DIGEST[:8]}"
    assert parse_name(PLAIN.name) == parse_name(f"{LONG}_{DIGEST[:8]}") == PLAIN


def test_a_name_shows_every_field_that_is_not_the_usual_one() -> None:
    fields = {"swap_ab": True, "producer_registers": 24, "l2_promotion": 128, "store": "direct"}
    operation = GemmOperation("e5m2", "e4m3", "int8", accumulation="promoted", batched=True)
    schedule = GemmSchedule((24, 128, 128), 3, **fields)  # type: ignore[arg-type]
    spec = KernelSpec("sm_90a", operation, schedule)
    assert "_e5m2_e4m3_int8_promoted_batched_24x128x128_stages3_direct_swap_" in spec.name
    assert "_swap_producer24_l2x128_" in spec.name
    assert parse_name(spec.name) == spec
    shared = replace(PLAIN, schedule=GemmSchedule((128, 128, 64), 3, cluster_split_k=4))
    assert "_stages3_split4_" in shared.name
    assert parse_name(shared.name) == shared


def test_a_name_shows_no_field_that_is_the_usual_one() -> None:
    """Names are read in lists and traces, whose columns cut what is long."""
    plain = GemmOperation("bf16", "bf16", "bf16")
    spec = KernelSpec("sm_90a", plain, GemmSchedule((128, 256, 64), 4, (2, 1)))
    assert spec.name == f"gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_{spec.digest[:8]}"
    assert len(spec.name) < 64
    turned = replace(spec, operation=replace(plain, layout_a="col"))
    assert "_bf16_col_col_128x256x64_" in turned.name
    assert names.full(plain) == "bf16_bf16_bf16_row_col_fast"


def test_the_order_of_steps_is_part_of_the_identity() -> None:
    one, other = (
        with_epilogue(Scale("row"), Bias("bf16")),
        with_epilogue(Bias("bf16"), Scale("row")),
    )
    assert one != other
    assert one.digest != other.digest


def test_a_step_whose_name_begins_like_anothers_is_parsed_as_itself() -> None:
    steps = (Activation("gelu"), Activation("gelu_tanh"), Activation("gelu"), Residual("fp32"))
    spec = with_epilogue(*steps)
    assert "_gelu_gelu_tanh_gelu_residual_fp32_" in spec.name
    assert parse_name(spec.name) == spec


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "a name is family_arch_operation_schedule_digest"),
        ("gemm", "a name is family_arch_operation_schedule_digest"),
        (f"{NAME}_0123456", "a name is family_arch_operation_schedule_digest"),
        (f"{NAME}_stages3_{DIGEST[:8]}", "a name is family_arch_operation_schedule_digest"),
        (f"{NAME.replace('_stages3', '')}_{DIGEST[:8]}", "a name is family_arch"),
        (f"{NAME}_group9_{DIGEST[:8]}", "its digest is"),
        (f"{LONG}_00000000", "its digest is"),
        (f"{NAME}_00000000", "its digest is"),
        (f"{NAME.replace('128x', '0128x')}_00000000", "its digest is"),
        (f"{NAME.replace('128x', '96x')}_00000000", "tile m 96: must be one of 64, 128, 256"),
        (f"{NAME}_split0_00000000", "cluster_split_k 0: must be 1 to 8"),
        (f"{NAME}_split{'9' * 5000}_00000000", "a name is family_arch_operation_schedule_digest"),
        (f"{NAME.replace('128x', '9' * 5000 + 'x')}_00000000", "a name is family_arch"),
        (f"{LONG.replace('_tma', '_silu')}_00000000", "a name is family_arch"),
        (f"{NAME.replace('sm90a', 'sm100a')}_00000000", "a name is family_arch"),
    ],
)
def test_a_name_that_names_no_kernel_of_this_version_is_an_error(name: str, problem: str) -> None:
    with pytest.raises(UnknownNameError, match="kernel name") as caught:
        parse_name(name)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        ({"a": "fp32", "b": "fp32"}, "a 'fp32': must be one of fp16, bf16, tf32, e4m3, e5m2, int8"),
        ({"layout_a": "diagonal"}, "layout_a 'diagonal': must be one of row, col"),
        ({"b": "fp16"}, "b fp16: must be of the type of a, bf16"),
        ({"d": "int32"}, "d int32 from bf16 with 0 epilogue steps"),
        ({"accumulation": "slow"}, "accumulation 'slow': must be one of fast, promoted"),
        (
            {"a": "int8", "b": "int8", "accumulation": "promoted"},
            "accumulation promoted of int8: must be fast",
        ),
        (
            {"accumulation": "promoted", "block_scales": "row_block"},
            "block_scales row_block of bf16 with accumulation promoted: must be of fp8",
        ),
        ({"epilogue": (Bias("bf16"),) * 9}, "epilogue of 9 steps: at most 8"),
        ({"epilogue": (Bias("e4m3"),)}, "epilogue step 'bias_e4m3': must be one of scale_host"),
    ],
)
def test_an_illegal_operation_never_becomes_a_spec(operation: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecificationError) as caught:
        replace(PLAIN, operation=replace(PLAIN.operation, **operation))
    assert problem in str(caught.value)


def test_an_unknown_architecture_or_family_is_named() -> None:
    with pytest.raises(
        UnknownNameError, match=r"architecture 'sm_80': templates exist for: sm_90a"
    ):
        replace(PLAIN, arch="sm_80")
    with pytest.raises(
        UnknownNameError,
        match=f"family 'conv': must be one of {', '.join(families.names())}",
    ):
        replace(PLAIN, operation=replace(PLAIN.operation, family="conv"))
