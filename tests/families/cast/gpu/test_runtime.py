"""Memory, streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cast_cases as cases
import pytest
import torch
from rooms import assert_repeats

import warploom
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
E4M3 = torch.float8_e4m3fn
KEYWORDS: dict[str, dict[str, Any]] = {
    "tensor": {"block": "tensor"},
    "tensor, transposed": {"block": "tensor", "transpose": True},
    "row": {"block": "row"},
    "1x128": {"block": (1, 128)},
    "1x128, transposed": {"block": (1, 128), "transpose": True},
    "128x128, transposed": {"block": (128, 128), "transpose": True},
    "1x32, transposed": {"block": (1, 32), "transpose": True},
}
over_keywords = pytest.mark.parametrize("name", KEYWORDS)


def operand(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, device="cuda").bfloat16()


def same(found: tuple[torch.Tensor, ...], right: tuple[torch.Tensor, ...]) -> bool:
    return not any(cases.differ(one, other).any() for one, other in zip(found, right, strict=True))


@pytest.mark.parametrize("kernel", cases.SMOKE, ids=cases.short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 1000, 333, pad=16)
    integers = [one.view(cases.INTEGERS[one.dtype.itemsize]).clone() for one in made.verify()]

    def run() -> list[torch.Tensor]:
        return [one.view(cases.INTEGERS[one.dtype.itemsize]) for one in made.run()]

    assert_repeats(run, integers, made.guarded, runs=100)


@over_keywords
def test_a_call_runs_on_the_current_stream_behind_what_is_there(name: str) -> None:
    x = operand(2048, 1024)
    wanted = warploom.cast(x, E4M3, **KEYWORDS[name])
    held = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.copy_(x)
        found = warploom.cast(held, E4M3, **KEYWORDS[name])
    torch.cuda.current_stream().wait_stream(stream)
    for one in found:
        one.record_stream(torch.cuda.current_stream())
    assert same(found, wanted)


def test_tensors_of_several_streams_do_not_share_their_largest_magnitude() -> None:
    xs = [operand(2048, 512 + 8 * i) * 3.0**i for i in range(4)]
    wanted = [warploom.cast(x, E4M3) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                found.append(warploom.cast(x, E4M3))
        torch.cuda.synchronize()
        assert all(same(one, right) for one, right in zip(found, wanted, strict=True))


def test_calls_of_several_threads_on_one_stream_do_not_meet() -> None:
    """Launches of one call may come between the two of another, and share what is kept as zeros."""
    xs = [operand(300, 512 + 8 * i) * 3.0**i for i in range(4)]
    wanted = [warploom.cast(x, E4M3) for x in xs]
    torch.cuda.synchronize()

    def repeated(index: int) -> bool:
        found = [warploom.cast(xs[index], E4M3) for _ in range(200)]
        return all(same(one, wanted[index]) for one in found)

    with ThreadPoolExecutor(len(xs)) as pool:
        assert all(pool.map(repeated, range(len(xs))))


def test_calls_of_falling_magnitudes_follow_each_other() -> None:
    """The largest magnitude of one call is not left to the next."""
    for exponent in range(10, -10, -1):
        x = operand(300, 1000) * 2.0**exponent
        for keywords in (KEYWORDS["tensor"], KEYWORDS["tensor, transposed"]):
            found, right = (warploom.cast(one, E4M3, **keywords) for one in (x, x.cpu()))
            assert same(tuple(one.cpu() for one in found), right)


@over_keywords
def test_a_captured_call_runs_again_on_what_is_new(name: str) -> None:
    x = operand(1000, 264)
    warploom.cast(x, E4M3, **KEYWORDS[name])  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = warploom.cast(x, E4M3, **KEYWORDS[name])
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert same(found, warploom.cast(x, E4M3, **KEYWORDS[name]))


def test_a_captured_stochastic_call_draws_anew_in_each_replay() -> None:
    x = torch.full((256, 256), 1.05, device="cuda")
    one = torch.ones(1, device="cuda")
    warploom.cast(x, E4M3, scale=one, rounding="stochastic")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, _ = warploom.cast(x, E4M3, scale=one, rounding="stochastic")
    graph.replay()
    first = q.float()
    graph.replay()
    assert not torch.equal(first, q.float())


VIEWS: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
    "dense": (lambda: operand(4, 66, 272), 0),
    "part of a row": (lambda: operand(4, 66, 300)[..., 8:280], 0),
    "an address between": (lambda: operand(4, 66, 301)[..., 3:275], 0),
    "one row for all": (lambda: operand(1, 1, 272).expand(4, 66, 272), 0),
    "heads before rows": (lambda: operand(66, 4, 272).transpose(0, 1), 1),
    "columns before rows": (lambda: operand(4, 272, 66).mT, 1),
}


@pytest.mark.parametrize("view", VIEWS)
@over_keywords
def test_a_view_is_copied_only_where_its_rows_cannot_be_read(view: str, name: str) -> None:
    make, copies = VIEWS[view]
    x = make()
    expected = warploom.cast(x.contiguous(), E4M3, **KEYWORDS[name])
    for _ in range(2):
        before = warploom.counters.copies
        found = warploom.cast(x, E4M3, **KEYWORDS[name])
        assert warploom.counters.copies - before == copies
        assert same(found, expected)


@over_keywords
def test_a_warm_call_plans_and_copies_nothing(name: str) -> None:
    x = operand(64, 128)
    warploom.cast(x, E4M3, **KEYWORDS[name])
    before = warploom.counters.as_dict()
    warploom.cast(x, E4M3, **KEYWORDS[name])
    after = warploom.counters.as_dict()
    launches = 2 if name.startswith("tensor") else 1
    assert after.pop("launches") - before.pop("launches") == launches
    assert after == before


def test_scales_may_lie_anywhere() -> None:
    x = operand(300, 520)
    q, scale = warploom.cast(x, E4M3, block=(1, 128), pow2=True)
    for one in (scale, scale.contiguous(), scale.repeat(1, 2)[:, :5], scale.flip(0).flip(0)):
        found, returned = warploom.cast(x, E4M3, block=(1, 128), scale=one)
        assert returned is one and not cases.differ(found, q).any()


def test_an_amax_is_raised_and_nan_wins() -> None:
    amax, one = torch.full((1,), 2.0, device="cuda"), torch.ones(1, device="cuda")
    for keywords in ({"scale": one}, {}, {"transpose": True}, {"scale": one, "transpose": True}):
        amax.fill_(2.0)
        x = torch.full((300, 300), -1.5, device="cuda")
        warploom.cast(x, E4M3, amax=amax, **keywords)  # type: ignore[call-overload]
        assert amax.item() == 2.0
        x[17, 299] = -7.0
        warploom.cast(x, E4M3, amax=amax, **keywords)  # type: ignore[call-overload]
        assert amax.item() == 7.0
        x[299, 3] = torch.nan
        warploom.cast(x, E4M3, amax=amax, **keywords)  # type: ignore[call-overload]
        assert amax.isnan().all()


@over_keywords
def test_compiled_code_calls_the_operator(name: str) -> None:
    def scaled(x: torch.Tensor) -> list[torch.Tensor]:
        return [one.float() * 2 for one in warploom.cast(x * 2, E4M3, **KEYWORDS[name])]

    x = operand(48, 272)
    compiled = torch.compile(scaled, fullgraph=True)
    for one, other in zip(compiled(x), scaled(x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_torch_finds_no_fault_with_the_operator() -> None:
    x = operand(7, 130)
    warploom.cast(x, E4M3)  # the operator is registered when the runtime is first used
    operator = torch.ops.warploom.cast.default
    given = (
        x,
        torch.int8,
        "1x128",
        True,
        None,
        True,
        "nearest",
        None,
        "row_major",
        None,
        None,
        None,
    )
    torch.library.opcheck(operator, given)


def test_nothing_is_launched_for_no_values() -> None:
    before = warploom.counters.launches
    for keywords in KEYWORDS.values():
        for shape in ((0, 128), (3, 0)):
            q, *_ = warploom.cast(torch.zeros(shape, device="cuda"), E4M3, **keywords)
            assert q.shape == shape
    assert warploom.counters.launches == before
