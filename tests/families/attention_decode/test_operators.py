"""torch.compile and torch.library see decoding as an operator that behaves as torch expects."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from decode_calls import BF16, Case, ends, fixed, ints, paged, random
from torch._subclasses.fake_tensor import FakeTensorMode

import warploom

SCALES: dict[str, Any] = {"scale_k": torch.rand(2), "scale_v": torch.rand(2)}
CALLS: dict[str, Case] = {
    "plain": fixed((17, 40), rows=2),
    "paged": paged((17, 40)),
    "all": paged((17, 40), rows=3, cache=torch.int8).given(
        window=(9, None), softcap=2.0, scale=0.3, sinks=torch.randn(4), **SCALES
    ),
    "packed": Case(
        random(3, 4, 64),
        *(random(23, 2, 64, seed=seed) for seed in (1, 2)),
        {"cu_seqlens_q": ends(2, 1), "max_seqlen_q": 2, "cu_seqlens_k": ends(17, 6)},
    ),
}


def decode(case: Case, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = warploom.attention_decode(q, case.k, case.v, return_lse=True, **case.keywords)
    return out * 2, lse + 1


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_takes_every_keyword_without_a_graph_break(name: str) -> None:
    case = CALLS[name]
    expected = decode(case, case.q)
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(case, case.q), expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_torch_compile_writes_to_out() -> None:
    case = CALLS["paged"]

    def into(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.attention_decode(q, case.k, case.v, out=out, **case.keywords) + 1

    compiled = torch.compile(into, fullgraph=True, backend="aot_eager")
    out, expected = torch.zeros_like(case.q), torch.zeros_like(case.q)
    assert torch.equal(compiled(case.q, out), into(case.q, expected))
    assert torch.equal(out, expected)


def test_torch_compile_reads_lengths_and_tables_anew_each_time() -> None:
    """A step of a server changes what is in them, and nothing else."""
    case = paged((17, 40))
    lengths, table = ints(17, 40), case.keywords["page_table"].clone()

    def step(q: torch.Tensor) -> torch.Tensor:
        return warploom.attention_decode(q, case.k, case.v, cache_seqlens=lengths, page_table=table)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for one in ((17, 40), (1, 33), (0, 16)):
        lengths.copy_(ints(*one))
        assert torch.equal(compiled(case.q), step(case.q))
    table[0], table[1] = table[1].clone(), table[0].clone()
    assert torch.equal(compiled(case.q), step(case.q))


def test_torch_compile_follows_batches_that_vary() -> None:
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager", dynamic=True)
    for lengths in ((17, 40), (3, 1, 40), (9, 9, 9, 9)):
        case = paged(lengths)
        for found, wanted in zip(compiled(case, case.q), decode(case, case.q), strict=True):
            assert torch.equal(found, wanted)


def test_a_kernel_can_be_named_inside_torch_compile() -> None:
    case = fixed((17, 40))
    given = (case.q, case.k, case.v)
    name = warploom.explain(warploom.attention_decode, *given, **case.keywords).kernel
    compiled = torch.compile(
        lambda q: warploom.attention_decode(q, case.k, case.v, spec=name, **case.keywords),
        fullgraph=True,
        backend="eager",
    )
    assert torch.equal(compiled(case.q), case.run()[0])


def test_a_gradient_is_refused_inside_torch_compile() -> None:
    case = fixed((17, 40))
    compiled = torch.compile(decode, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="has no gradient"):
        compiled(case, case.q.clone().requires_grad_())
    with torch.no_grad():
        compiled(case, case.q.clone().requires_grad_())


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_no_fault_with_the_operators(name: str) -> None:
    case = CALLS[name]
    given = {
        "cache_seqlens": None,
        "cache_leftpad": None,
        "page_table": None,
        "causal": True,
        "left": (case.keywords.get("window") or (None, None))[0],
        "right": None,
        "softcap": None,
        "scale": None,
        "sinks": None,
        "scale_k": None,
        "scale_v": None,
        "cu_seqlens_q": None,
        "cu_seqlens_k": None,
        "max_seqlen_q": None,
        "max_seqlen_k": None,
        "batch_invariant": False,
        "spec": None,
    }
    given |= {name: value for name, value in case.keywords.items() if name != "window"}
    arguments = (case.q, case.k, case.v, *given.values())
    torch.library.opcheck(torch.ops.warploom.attention_decode.default, arguments)
    into = {"out": torch.empty_like(case.q)}
    torch.library.opcheck(torch.ops.warploom.attention_decode_out.default, arguments, into)


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_memory_have_results_without(kind: str) -> None:
    case = CALLS["packed"]
    mode = FakeTensorMode()

    def bare(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.Tensor):
            return value
        return value.to("meta") if kind == "meta" else mode.from_tensor(value)

    q, k, v = (bare(one) for one in (case.q, case.k, case.v))
    given = {name: bare(value) for name, value in case.keywords.items()}
    with mode if kind == "fake" else nullcontext():
        out, lse = warploom.attention_decode(q, k, v, return_lse=True, **given)
    assert (out.shape, lse.shape) == ((3, 4, 64), (4, 3))
    assert (out.dtype, lse.dtype, out.device) == (BF16, torch.float32, q.device)
