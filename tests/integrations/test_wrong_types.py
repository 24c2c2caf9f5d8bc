"""Options of another type are refused by name: "no" is not True, and 1 is no boolean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom import flash_attn
from warploom.errors import ProblemError
from warploom.flashinfer import BatchDecodeWithPagedKVCacheWrapper
from warploom.nn import Linear, QuantizedLinear

Q = torch.zeros(1, 4, 2, 16).bfloat16()
STEP = torch.zeros(1, 1, 2, 64).bfloat16()
CACHE = torch.zeros(1, 16, 2, 64).bfloat16()
ENDS = torch.tensor([0, 4], dtype=torch.int32)
PAGES = torch.zeros(1, 2, 16, 2, 64).bfloat16()


def patch(**options: Any) -> object:
    return warploom.patch(torch.nn.Sequential(torch.nn.Linear(8, 8)), **options)


def plan(**options: Any) -> BatchDecodeWithPagedKVCacheWrapper:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    pages = (ENDS // 4, torch.zeros_like(ENDS[1:]), ENDS[1:])
    sizes = {"num_qo_heads": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}
    wrapper.plan(*pages, **{**sizes, "q_data_type": torch.bfloat16, **options})
    return wrapper


def run(**options: Any) -> object:
    return plan().run(**{"q": STEP[0], "paged_kv_cache": PAGES, **options})


def varlen(**options: Any) -> object:
    given: dict[str, Any] = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
    given |= {"max_seqlen_q": 4, "max_seqlen_k": 4}
    return flash_attn.flash_attn_varlen_func(Q[0], Q[0], Q[0], **{**given, **options})


def packed(**options: Any) -> object:
    return flash_attn.flash_attn_qkvpacked_func(Q[:, :, None].expand(1, 4, 3, 2, 16), **options)


BOOLEANS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    "patch": (patch, ("linear", "attention")),
    "Linear": (lambda **given: Linear(8, 8, **given), ("bias", "accumulate_into_main_grad")),
    "QuantizedLinear": (lambda **given: QuantizedLinear(128, 8, **given), ("bias",)),
    "func": (
        lambda **given: flash_attn.flash_attn_func(Q, Q, Q, **given),
        ("causal", "deterministic", "return_attn_probs"),
    ),
    "varlen": (varlen, ("causal", "deterministic", "return_attn_probs")),
    "packed": (packed, ("causal", "deterministic", "return_attn_probs")),
    "kvcache": (
        lambda **given: flash_attn.flash_attn_with_kvcache(STEP, CACHE, CACHE, **given),
        ("causal", "rotary_interleaved", "return_softmax_lse"),
    ),
    "wrapper": (
        lambda **given: BatchDecodeWithPagedKVCacheWrapper(torch.empty(1), **given),
        ("use_cuda_graph", "use_tensor_cores"),
    ),
    "plan": (plan, ("non_blocking", "disable_split_kv")),
    "run": (run, ("return_lse",)),
}


@pytest.mark.parametrize("value", ["fp8", "no", "", 1, 0, None, 2.5, [], torch.ones(2)], ids=repr)
@pytest.mark.parametrize(
    ("case", "name"), [(case, name) for case, (_, names) in BOOLEANS.items() for name in names]
)
def test_what_is_no_boolean_is_refused(case: str, name: str, value: object) -> None:
    call, _ = BOOLEANS[case]
    with pytest.raises(ProblemError, match=rf"^{name} .*must be (one of )?(True|False)"):
        call(**{name: value})


@pytest.mark.parametrize("case", BOOLEANS)
def test_booleans_are_taken(case: str) -> None:
    call, names = BOOLEANS[case]
    for name in names:
        call(**{name: False})


OTHERS: dict[str, tuple[Callable[..., object], dict[str, tuple[object, ...]]]] = {
    "patch": (patch, {"weights": (True, 4, ["int4"]), "model": ("llama", None)}),
    "Linear": (
        BOOLEANS["Linear"][0],
        {"dtype": ("bf16", 16), "activation": (True, 0, torch.ones(2)), "recipe": (True, 0)},
    ),
    "QuantizedLinear": (BOOLEANS["QuantizedLinear"][0], {"dtype": ("bf16",), "format": (4, True)}),
    "func": (
        BOOLEANS["func"][0],
        {
            "softcap": ("1", True, None, float("nan")),
            "softmax_scale": ("1", True),
            "dropout_p": ("", "0.1", True, None),
            "window_size": ((True, 0), (1.5, 0), "ab"),
        },
    ),
    "varlen": (varlen, {"max_seqlen_q": (True, "4", 4.0), "cu_seqlens_k": ([0, 4],)}),
    "wrapper": (
        lambda **given: BatchDecodeWithPagedKVCacheWrapper(
            **{"float_workspace_buffer": torch.empty(1), **given}
        ),
        {"kv_layout": ([], 1), "float_workspace_buffer": (None, 128)},
    ),
    "plan": (
        plan,
        {
            "logits_soft_cap": ("1", True, float("nan")),
            "sm_scale": ("1", True),
            "head_dim": ("64", 0, True),
            "window_left": ("no", True, None),
            "fixed_split_size": ("yes", True),
        },
    ),
    "run": (run, {"q": (None, [1]), "out": ("yes", torch.ones(2)), "lse": ("yes",),
                  "q_scale": ("1", True, float("nan")), "q_len_per_req": (True, "1")}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [
        (case, name, value)
        for case, (_, options) in OTHERS.items()
        for name, values in options.items()
        for value in values
    ],
)
def test_other_types_are_refused_by_name(case: str, name: str, value: object) -> None:
    """Not by whatever Python raises of them within, nor taken as something else."""
    call, _ = OTHERS[case]
    if case == "patch" and name == "model":
        call = warploom.patch
    said = "weight format" if name == "format" else name
    with pytest.raises(ProblemError, match=f"^{said}"):
        call(**{name: value})
