"""What is wrong with a call is told; and what compilers see of one, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from append_arguments import BF16, CASES, bits, given

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.family import written

REQUIRED = AttentionAppendCall.declaration.required

# ---- Errors --------------------------------------------------------------------------------------

INT = torch.int32


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"k": [1.0]}, "must be a torch tensor"),
        ({"lengths": None}, "must be a torch tensor"),
        ({"k": torch.zeros(4, 2, 2, 32)}, "k torch.float32: must be float16 or bfloat16"),
        ({"k": torch.zeros(4, 2, 32).to(BF16)}, "pass cu_seqlens with packed k and v"),
        ({"k": torch.zeros(4, 2, 2, 40).to(BF16)}, "a multiple of 16 numbers, at most 512"),
        ({"v": torch.zeros(4, 2, 3, 32).to(BF16)}, r"v \[4, 2, 3, 32\]: must be \[4, 2, 2, 32\]"),
        ({"v": torch.zeros(4, 2, 2, 32).half()}, "v torch.float16: must be bfloat16"),
        ({"q": torch.zeros(4, 4, 32).to(BF16)}, r"must be \[batch, heads, seq_q, dim\]"),
        ({"k_cache": torch.zeros(4, 24, 2, 32).to(BF16)}, "whose rows come before heads"),
        ({"v_cache": torch.zeros(4, 2, 24, 32).half()}, "v_cache torch.float16: must be bfloat16"),
        ({"v_cache": torch.zeros(4, 2, 16, 32).to(BF16)}, "must be .* with k_cache"),
        ({"k_cache": torch.zeros(4, 2, 24, 33).to(BF16)[..., :32]}, "multiples of 16 bytes"),
        ({"k_cache": torch.zeros(1, 2, 24, 32).to(BF16).expand(4, -1, -1, -1)}, "no two elements"),
        ({"lengths": torch.zeros(4).long()}, "lengths torch.int64: must be int32"),
        ({"lengths": torch.zeros(3, dtype=INT)}, r"lengths \[3\]: must be \[4\]"),
        ({"lengths_after": torch.zeros(8, dtype=INT)[::2]}, "must be contiguous"),
        ({"page_table": torch.zeros(4, 3)}, "page_table torch.float32: must be int32"),
        ({"page_table": torch.zeros(3, 4, dtype=INT)}, r"must be \[4, pages of a sequence\]"),
        ({"cu_seqlens": torch.zeros(5, dtype=INT)}, r"must be \[tokens, kv_heads, dim\]"),
        ({"cos": None}, "must be passed together"),
        ({"cos": None, "sin": None}, "without them nothing is rotated"),
        ({"cos": torch.zeros(28, 16).half()}, "cos torch.float16: must be float32 or bfloat16"),
        ({"sin": torch.zeros(28, 16).to(BF16)}, "sin torch.bfloat16: must be float32"),
        ({"cos": torch.zeros(28, 32), "sin": torch.zeros(28, 32)}, "at most 32"),
        ({"cos": torch.zeros(28, 12), "sin": torch.zeros(28, 12)}, "rotary a multiple of 16"),
        ({"sin": torch.zeros(27, 16)}, r"sin \[27, 16\]: must be \[28, 16\]"),
        ({"scale_k": torch.ones(())}, "scale_k and scale_v that are not both there"),
        ({"scale_k": torch.ones(()), "scale_v": torch.ones(())}, "only caches of 8 bits have any"),
        ({"out": torch.zeros(4, 4, 2, 32)}, "out torch.float32"),
        ({"out": torch.zeros(4, 2, 4, 32).to(BF16)}, "out .* must be"),
        ({"out": torch.zeros(4, 4, 2, 33).to(BF16)[..., :32]}, "multiples of 16 bytes"),
        ({"q": torch.zeros(4, 4, 2, 32).to(BF16).requires_grad_()}, "not differentiable"),
        ({"k": torch.zeros(4, 2, 2, 32).to(BF16).requires_grad_()}, "not differentiable"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(ProblemError, match=rule):
        warploom.append_kv_cache(**{**given(rotary=32), **wrong})


def test_what_is_wrong_with_scales_is_told() -> None:
    arguments = given(cache=torch.int8)
    with pytest.raises(ProblemError, match="by which values become int8"):
        warploom.append_kv_cache(**arguments)
    one, heads, rows = torch.ones(()), torch.ones(2), torch.ones(4, 2, 24)
    for k, v, rule in (
        (one.double(), one, "must be float32"),
        (torch.ones(3), heads, r"must be one number, \[2\] for the heads, or \[4, 2, 24\]"),
        (one, heads, "must be of one shape"),
        (rows, one, "must be of one shape"),
        (torch.ones(()).expand(4, 2, 24), rows, "no two elements"),
    ):
        with pytest.raises(ProblemError, match=rule):
            warploom.append_kv_cache(**arguments, scale_k=k, scale_v=v)


def test_what_is_wrong_with_where_rows_go_is_told() -> None:
    arguments = given()
    with pytest.raises(ProblemError, match="a row of caches for each"):
        caches = {name: arguments[name][:3] for name in ("k_cache", "v_cache")}
        warploom.append_kv_cache(**{**arguments, **caches})
    with pytest.raises(ProblemError, match="must not be one tensor"):
        warploom.append_kv_cache(**{**arguments, "v_cache": arguments["k_cache"]})
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.append_kv_cache(**{**arguments, "k": arguments["k_cache"][:, :, :2]})
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.append_kv_cache(**arguments, lengths_after=arguments["lengths"])
    with pytest.raises(ProblemError, match="it is q, turned"):
        warploom.append_kv_cache(**arguments, out=arguments["k"])
    arguments = given(rotary=32)
    with pytest.raises(ProblemError, match="do not overlap, but where out is q"):
        room = torch.zeros(4, 4, 3, 32).to(BF16)
        warploom.append_kv_cache(**{**arguments, "q": room[:, :, :2], "out": room[:, :, 1:]})


# ---- The operator --------------------------------------------------------------------------------


def operands(arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the operator takes: scales of tokens are written."""
    names = (*REQUIRED, "page_table", "cu_seqlens", "q", "cos", "sin")
    positional = [arguments.get(name) for name in names]
    scales = [arguments.get("scale_k"), arguments.get("scale_v")]
    token = scales[0] is not None and scales[0].dim() == 3
    read = (None, None) if token else tuple(scales)
    keywords = dict(zip(("scales_k", "scales_v"), scales, strict=True)) if token else {}
    return (*positional, arguments.get("interleaved", False), *read, None), keywords


@pytest.mark.parametrize("name", ["plain", "halves", "int8, scales of tokens", "packed, in pages"])
def test_torch_finds_no_fault_with_the_operator(name: str) -> None:
    positional, keywords = operands(given(**CASES[name]))
    operator = torch.ops.warploom.attention_append.default
    torch.library.opcheck(operator, positional, keywords)


@pytest.mark.parametrize("name", ["halves", "e4m3, scales of tokens", "packed, in pages"])
def test_compiled_code_writes_the_caches_that_it_was_given(name: str) -> None:
    """Functionalised, it writes a copy of them, and copies that back: all of it is there after."""

    def step(
        arguments: dict[str, torch.Tensor], after: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = warploom.append_kv_cache(**arguments, lengths_after=after)  # type: ignore[arg-type]
        assert q is not None
        return q + 1, arguments["k_cache"].float().sum() + after.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, theirs = given(**CASES[name]), given(**CASES[name])
    after = torch.zeros(2, 4, dtype=torch.int32)
    found, expected = compiled(ours, after[0]), step(theirs, after[1])
    assert torch.equal(after[0], after[1]) and after.sum() > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for one, other in zip(
        written(AttentionAppendCall(**ours)).values(),
        written(AttentionAppendCall(**theirs)).values(),
        strict=True,
    ):
        assert torch.equal(bits(one), bits(other))


def test_fake_tensors_get_what_calls_return() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    arguments = given(rotary=32)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(one) if isinstance(one, torch.Tensor) else one
            for name, one in arguments.items()
        }
        found = warploom.append_kv_cache(**fakes)
        assert found is not None and found.shape == arguments["q"].shape and found.is_contiguous()
        plain = {name: fakes[name] for name in REQUIRED}
        assert warploom.append_kv_cache(**plain) is None


def test_dual_tensors_are_refused() -> None:
    from torch.autograd import forward_ad

    arguments = given()
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="no forward-mode derivative"):
        dual = forward_ad.make_dual(arguments["k"], arguments["k"])
        warploom.append_kv_cache(**{**arguments, "k": dual})
