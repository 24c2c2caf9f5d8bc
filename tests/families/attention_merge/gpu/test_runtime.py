"""Memory, streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import attention_merge_cases as cases
import attention_merge_mutants as mutants
import pytest
import torch
from rooms import assert_repeats

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def parts(*rows: int, dim: int = 128) -> Parts:
    torch.manual_seed(sum(rows))
    a, b = (torch.randn(*rows, dim, device="cuda").bfloat16() for _ in range(2))
    return a, torch.randn(rows, device="cuda"), b, torch.randn(rows, device="cuda")


@pytest.mark.parametrize("kernel", cases.SMOKE, ids=cases.short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 3, 333, pad=8)
    wanted = [one.clone() for one in made.verify()]
    assert_repeats(made.run, wanted, [made.out, made.lse], runs=100)


def test_results_may_be_operands() -> None:
    for kernel in (cases.spec(), cases.spec(96, 64, 4), cases.spec(64, 128, 8)):
        mutants.in_place(kernel, 0)


VIEWS: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "dense": (lambda: torch.randn(4, 6, 66, 64, device="cuda"), 0),
    "heads before rows": (lambda: torch.randn(4, 66, 6, 64, device="cuda").transpose(1, 2), 0),
    "part of a row": (lambda: torch.randn(4, 6, 66, 96, device="cuda")[..., 8:72], 0),
    "one row for all": (lambda: torch.randn(1, 1, 1, 64, device="cuda").expand(4, 6, 66, 64), 0),
    "an address between": (lambda: torch.randn(4, 6, 66, 96, device="cuda")[..., 3:67], 1),
    "columns before rows": (lambda: torch.randn(4, 6, 64, 66, device="cuda").mT, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_copied_only_where_its_rows_cannot_be_read(name: str) -> None:
    make, copies = VIEWS[name]
    view, (_, lse_a, other, lse_b) = make(), parts(4, 6, 66, dim=64)
    expected = warploom.merge_state(view.contiguous(), lse_a, other, lse_b)
    lse_a = lse_a.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for _ in range(2):
        before = warploom.counters.copies
        found = warploom.merge_state(view, lse_a, other, lse_b)
        assert warploom.counters.copies - before == copies
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))


def test_a_call_runs_on_the_current_stream_behind_what_is_there() -> None:
    given = parts(2048, 8)
    wanted = warploom.merge_state(*given)
    held = torch.zeros_like(given[0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.copy_(given[0])
        found = warploom.merge_state(held, *given[1:])
    torch.cuda.current_stream().wait_stream(stream)
    for one, other in zip(found, wanted, strict=True):
        one.record_stream(torch.cuda.current_stream())
        assert torch.equal(one, other)


def test_a_captured_call_runs_again_on_what_is_new() -> None:
    given = parts(100, 8)
    total, logs = given[0].float(), given[1].clone()
    warploom.merge_state(total, logs, *given[2:], out=total, lse=logs)  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.merge_state(total, logs, *given[2:], out=total, lse=logs)
    for _ in range(3):
        given[2].normal_()
        total.normal_()
        expected = warploom.merge_state(total, logs, *given[2:])
        graph.replay()
        assert torch.equal(total, expected[0]) and torch.equal(logs, expected[1])


def test_a_warm_call_plans_and_copies_nothing() -> None:
    given = parts(64)
    warploom.merge_state(*given)
    before = warploom.counters.as_dict()
    warploom.merge_state(*given)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 1
    assert after == before


def test_compiled_code_calls_the_operator() -> None:
    def merged(*given: torch.Tensor) -> torch.Tensor:
        a, lse_a, b, lse_b = given
        total, logs = a.float(), lse_a.clone()
        warploom.merge_state(total, logs, b, lse_b, out=total, lse=logs)
        return total * 2 + logs[..., None]

    given = parts(12, 20)
    compiled = torch.compile(merged, fullgraph=True)
    torch.testing.assert_close(compiled(*given), merged(*given))


def test_torch_finds_no_fault_with_the_operator() -> None:
    operands = parts(7, 5)
    warploom.merge_state(*operands)  # the operator is registered when the runtime is first used
    operator = torch.ops.warploom.attention_merge.default
    torch.library.opcheck(operator, (*operands, torch.float32, None))


def test_nothing_is_launched_for_no_rows() -> None:
    before = warploom.counters.launches
    assert warploom.merge_state(*parts(0, 3))[0].shape == (0, 3, 128)
    assert warploom.counters.launches == before
