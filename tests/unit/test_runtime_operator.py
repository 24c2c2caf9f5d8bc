"""Operators keep their schemas: graphs that torch exported name them, and are read back later."""

from __future__ import annotations

import itertools

import pytest
import torch

import warploom
from warploom.generator import families
from warploom.runtime.families import family

FUNCTION = (
    "str? causal, SymInt? left, SymInt? right, float? softcap, float? scale, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt? max_seqlen_q, SymInt? max_seqlen_k"
)
OPTIONS = "bool? deterministic, str? backward_spec"
# These joined later, with defaults: graphs that were exported before do without them.
FURTHER = (
    "Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? mask=None, "
    "Tensor? dropout_state=None, float? dropout_p=None"
)
PRODUCT = (
    "Tensor a, Tensor b, str[] kinds, Tensor[] operands, float[] numbers, ScalarType out_dtype, "
    "str accumulation, str? spec"
)
DECODE = (
    "(Tensor q, Tensor k, Tensor v, Tensor? lengths, Tensor? starts, Tensor? page_table, "
    "bool causal, SymInt? left, SymInt? right, float? softcap, float? scale, Tensor? sinks, "
    "Tensor? scale_k, Tensor? scale_v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, bool batch_invariant"
)
GATE_GRADIENTS = ", ".join(
    f"Tensor({letter}!)? {function}_gate_gradient{layout}=None"
    for letter, (layout, function) in zip(
        "ghijklmnop",
        itertools.product(
            ("", "_interleaved"), ("relu", "gelu", "gelu_tanh", "silu", "swiglu_oai")
        ),
        strict=True,
    )
)
SCHEMAS = {
    "gemm": f"({PRODUCT}) -> Tensor",
    "gemm_out": f"({PRODUCT}, *, Tensor(a!) out, Tensor(b!)? amax=None, "
    "Tensor(c!)? preactivation=None, Tensor(d!)? column_sum=None, Tensor(e!)? quantize=None, "
    f"Tensor(f!)? quantize_pow2=None, {GATE_GRADIENTS}, Tensor(q!)? mean_square=None) -> ()",
    "gemm_outputs": f"({PRODUCT}, str[] written_kinds, Tensor[] written, str preactivation, "
    "Tensor? accumulate_into, ScalarType? gradient_dtype) -> Tensor[]",
    "gemm_unseen": "(Tensor a, Tensor b, ScalarType out_dtype, str name) -> Tensor",
    "activation_backward": "(Tensor dy, Tensor? z, str? activation, bool sums, "
    "ScalarType? out_dtype, str? spec) -> (Tensor, Tensor)",
    "attention": f"(Tensor q, Tensor k, Tensor v, {FUNCTION}, str? spec, {OPTIONS}, "
    f"{FURTHER}) -> (Tensor, Tensor)",
    "attention_into": f"(Tensor q, Tensor k, Tensor v, {FUNCTION}, str? spec, Tensor(a!) result, "
    f"{FURTHER}) -> Tensor",
    "attention_append": "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, "
    "Tensor lengths, Tensor? page_table, Tensor? cu_seqlens, Tensor? q, Tensor? cos, Tensor? sin, "
    "bool interleaved, Tensor? scale_k, Tensor? scale_v, str? spec, *, "
    "Tensor(c!)? scales_k=None, Tensor(d!)? scales_v=None, Tensor(e!)? lengths_after=None)"
    " -> Tensor",
    "attention_decode": f"{DECODE}, str? spec) -> (Tensor, Tensor)",
    "attention_decode_out": f"{DECODE}, str? spec, *, Tensor(a!) out) -> Tensor",
    "attention_merge": "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, "
    "ScalarType? out_dtype, str? spec) -> (Tensor, Tensor)",
    "attention_quantize": "(Tensor v, Tensor? q, Tensor? k, str scores, bool smooth, str? spec, "
    "Tensor? cu_seqlens=None)"
    f" -> ({', '.join(['Tensor'] * 8)})",
    "cast": "(Tensor x, ScalarType dtype, str block, bool transpose, Tensor? scale, bool pow2, "
    "str rounding, Tensor? rounding_state, str scale_layout, str? gate, Tensor? gradient, "
    "str? spec, Tensor? scale_t=None, *, "
    "Tensor(a!)? amax=None) -> (Tensor, Tensor, Tensor, Tensor)",
    "route": "(Tensor ids, int experts, int? first_expert, str? spec) -> (Tensor, Tensor, Tensor)",
    "combine": "(Tensor rows, Tensor inverse, Tensor? weights, str? spec) -> Tensor",
    "permute": "(Tensor hidden, Tensor inverse, Tensor? weights, Tensor? combined, "
    "Tensor? offsets, str? spec, SymInt? count=None) -> (Tensor, Tensor)",
    "attention_backward": "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {FUNCTION}, {OPTIONS}, {FURTHER}) -> (Tensor, Tensor, Tensor)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_have_the_schemas_that_graphs_were_exported_with(name: str) -> None:
    for one in families.names():
        family(one)
    found = str(getattr(torch.ops.warploom, name).default._schema)
    assert found == f"warploom::{name}{SCHEMAS[name]}"


def test_a_renamed_argument_is_taken_by_the_name_that_graphs_have() -> None:
    family("attention_decode")
    q, k = torch.randn(2, 4, 1, 64).bfloat16(), torch.randn(2, 4, 9, 64).bfloat16()
    lengths, starts = torch.tensor([3, 9]).int(), torch.tensor([1, 2]).int()
    operator = torch.ops.warploom.attention_decode.default
    given: dict[str, object] = {one.name: None for one in operator._schema.arguments}
    given |= {"q": q, "k": k, "v": k, "causal": True, "batch_invariant": False}
    found, _ = operator(**{**given, "lengths": lengths, "starts": starts})
    expected = warploom.attention_decode(q, k, k, cache_seqlens=lengths, cache_leftpad=starts)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not torch.equal(found, operator(**{**given, "lengths": lengths})[0])
