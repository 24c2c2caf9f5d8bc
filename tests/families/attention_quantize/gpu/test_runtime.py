"""Memory, streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attention_quantize_cases as cases
import pytest
import torch
from rooms import assert_repeats

import warploom
from warploom import QuantizedAttention
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_quantize.api import transpose_values
from warploom.runtime.sampled import differ

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
KEYWORDS: dict[str, dict[str, Any]] = {
    "int8": {},
    "e4m3": {"scores": "e4m3"},
    "as it is": {"smooth": False},
}
over_keywords = pytest.mark.parametrize("name", KEYWORDS)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(
    batch: int = 2, heads: int = 4, kv_heads: int = 2, seq: int = 300, dim: int = 64, seed: int = 0
) -> Operands:
    random = torch.Generator("cuda").manual_seed(seed)
    q, k, v = (
        torch.randn(batch, count, seq, dim, generator=random, device="cuda").bfloat16()
        for count in (heads, kv_heads, kv_heads)
    )
    return q, k + 1, v


def same(found: QuantizedAttention, right: QuantizedAttention) -> bool:
    return all(
        other is None if one is None else other is not None and not differ(one, other).any()
        for one, other in zip(found, right, strict=True)
    )


@pytest.mark.parametrize("kernel", cases.SMOKE, ids=cases.short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 2, 8, 4, 333, 3001, pad=16)
    integers = [one.view(cases.INTEGERS[one.dtype.itemsize]).clone() for one in made.verify()]

    def run() -> list[torch.Tensor]:
        return [one.view(cases.INTEGERS[one.dtype.itemsize]) for one in made.run()]

    assert_repeats(run, integers, made.guarded, runs=100)


@over_keywords
def test_a_call_runs_on_the_current_stream_behind_what_is_there(name: str) -> None:
    q, k, v = operands(seq=2048)
    wanted = warploom.attention_quantize(q, k, v, **KEYWORDS[name])
    held = torch.zeros_like(k)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.copy_(k)
        found = warploom.attention_quantize(q, held, v, **KEYWORDS[name])
    torch.cuda.current_stream().wait_stream(stream)
    for one in found:
        if one is not None:
            one.record_stream(torch.cuda.current_stream())
    assert same(found, wanted)


def test_calls_of_several_streams_do_not_share_what_they_count() -> None:
    given = [operands(seq=2000 + 100 * i, seed=i) for i in range(4)]
    wanted = [warploom.attention_quantize(*one) for one in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, one in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(warploom.attention_quantize(*one))
        torch.cuda.synchronize()
        assert all(same(one, right) for one, right in zip(found, wanted, strict=True))


def test_calls_of_several_threads_on_one_stream_do_not_meet() -> None:
    """Launches of one call may come between the two of another, and share what is kept as zeros."""
    given = [operands(seq=300 + 100 * i, seed=i) for i in range(4)]
    wanted = [warploom.attention_quantize(*one) for one in given]
    torch.cuda.synchronize()

    def repeated(index: int) -> bool:
        found = [warploom.attention_quantize(*given[index]) for _ in range(100)]
        return all(same(one, wanted[index]) for one in found)

    with ThreadPoolExecutor(len(given)) as pool:
        assert all(pool.map(repeated, range(len(given))))


@over_keywords
def test_a_captured_call_runs_again_on_what_is_new(name: str) -> None:
    q, k, v = operands()
    warploom.attention_quantize(q, k, v, **KEYWORDS[name])  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = warploom.attention_quantize(q, k, v, **KEYWORDS[name])
    for _ in range(3):
        for one in (q, k, v):
            one.normal_()
        graph.replay()
        assert same(found, warploom.attention_quantize(q, k, v, **KEYWORDS[name]))


VIEWS: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "dense": (lambda: torch.randn(2, 2, 300, 64, device="cuda"), 0),
    "rows before heads": (lambda: torch.randn(2, 300, 2, 64, device="cuda").transpose(1, 2), 0),
    "part of a row": (lambda: torch.randn(2, 2, 300, 96, device="cuda")[..., 8:72], 0),
    "one row for all": (lambda: torch.randn(1, 1, 1, 64, device="cuda").expand(2, 2, 300, 64), 0),
    "an address between": (lambda: torch.randn(2, 2, 300, 96, device="cuda")[..., 3:67], 1),
    "columns before rows": (lambda: torch.randn(2, 2, 64, 300, device="cuda").mT, 1),
}


def view_of(name: str) -> tuple[torch.Tensor, int]:
    """A view in bf16 that lies as it was made, and how often it is copied."""
    make, copies = VIEWS[name]
    made = make()
    whole = made._base if made._base is not None else made
    room = whole.bfloat16()
    return room.as_strided(made.shape, made.stride(), made.storage_offset()), copies


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_a_view_is_copied_only_where_its_rows_cannot_be_read(operand: str, name: str) -> None:
    view, copies = view_of(name)
    given = dict(zip("qkv", operands(heads=2), strict=True))
    expected = warploom.attention_quantize(**{**given, operand: view.contiguous()})
    for _ in range(2):
        before = warploom.counters.copies
        found = warploom.attention_quantize(**{**given, operand: view})
        assert warploom.counters.copies - before == copies
        assert same(found, expected)


def test_a_negated_view_is_resolved() -> None:
    q, k, v = operands()
    negated = torch._neg_view(k)
    assert same(warploom.attention_quantize(q, negated, v), warploom.attention_quantize(q, -k, v))


@over_keywords
def test_a_warm_call_plans_and_copies_nothing_and_launches_twice(name: str) -> None:
    given = operands()
    warploom.attention_quantize(*given, **KEYWORDS[name])
    before = warploom.counters.as_dict()
    warploom.attention_quantize(*given, **KEYWORDS[name])
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 2
    assert after == before


def test_v_alone_is_one_launch() -> None:
    v = operands()[2].to(torch.float8_e4m3fn)
    transpose_values(v)
    before = warploom.counters.launches
    transpose_values(v)
    assert warploom.counters.launches - before == 1


@over_keywords
def test_compiled_code_calls_the_operator(name: str) -> None:
    def scaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        found = warploom.attention_quantize(q * 2, k, v, **KEYWORDS[name])
        return [one.float() * 2 for one in found if one is not None]

    given = operands()
    compiled = torch.compile(scaled, fullgraph=True)
    for one, other in zip(compiled(*given), scaled(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_torch_finds_no_fault_with_the_operator() -> None:
    q, k, v = operands()
    warploom.attention_quantize(q, k, v)  # the operator is registered when the runtime is used
    operator = torch.ops.warploom.attention_quantize.default
    torch.library.opcheck(operator, (v, q, k, "int8", True, None))


def test_nothing_is_launched_for_no_keys() -> None:
    before = warploom.counters.launches
    for sizes in ({"batch": 0}, {"seq": 0}):
        found = warploom.attention_quantize(*operands(**sizes))  # type: ignore[arg-type]
        assert found.v.numel() == 0
    assert warploom.counters.launches == before
