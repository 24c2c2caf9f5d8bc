"""Timing functions of your own as Warploom times its kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch

from warploom.arguments import is_number, require_boolean, shown
from warploom.errors import DeviceError, ProblemError
from warploom.generator.architectures import served
from warploom.runtime.alone import alone
from warploom.runtime.measure import Call, Sampler, graph_sampler
from warploom.runtime.trial import uncollected

__all__ = ["do_bench"]

Mode = Literal["min", "max", "mean", "median", "all"]
MODES: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
}
_FEWEST = 5  # samples, however long one takes


def do_bench(
    fn: Call | Sequence[Call],
    warmup: float = 25.0,
    rep: float = 100.0,
    *,
    quantiles: Sequence[float] | None = None,
    return_mode: Mode = "mean",
    grad_to_none: Sequence[torch.Tensor] | None = None,
    flush: bool = True,
    graph: bool = False,
) -> Any:  # noqa: ANN401 (a float or a list of them, as in triton.testing)
    """Time a function on the current GPU and stream, in milliseconds.

    It is called as `triton.testing.do_bench` is. A single call is timed by two events on the GPU
    (runtime/alone.py), with the L2 cache flushed before it: operands come from memory and the GPU
    is at its full clock, as between the other kernels of a model. The GPU waits until the host has
    enqueued the whole call, so that a function of several kernels is not charged with the host's
    time. To compare functions, `warploom bench` measures them in turns.

    Args:
        fn: The function, without arguments; or several that do the same on buffers of their own,
            which are called in turn. What they return is dropped.
        warmup: Milliseconds of wall time that it runs before it is timed.
        rep: Milliseconds of wall time that it is timed for; there are at least five samples.
        quantiles: Numbers from 0 to 1: these quantiles of the times are returned, in place of what
            `return_mode` says.
        return_mode: "min", "max", "mean" or "median" of the times, or "all" of them.
        grad_to_none: Tensors whose `grad` is set to None before each call.
        flush: Flush L2 before each call. False: what the call before it read may still be there.
        graph: Capture the calls into a CUDA graph and time its replays, each of many calls. Calls
            must not wait for the GPU. Nothing is flushed: give several functions whose buffers
            outlast L2 together.

    Returns:
        Milliseconds: a float; for "all" and for several `quantiles` a list of floats.

    Raises:
        ProblemError: An argument is none of these.
        DeviceError: There is no GPU.

    Example:
        milliseconds = warploom.testing.do_bench(lambda: warploom.gemm(x, weight.t()))
    """
    calls = _calls(fn)
    _require(warmup, rep, quantiles, return_mode)
    cleared = _cleared(grad_to_none)
    require_boolean("flush", flush)
    require_boolean("graph", graph)
    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU",
            rule="do_bench times what runs on a GPU",
            fix=f"run it where there is one of {served()}",
        )
    with uncollected():  # a collection would be part of some call's time
        sample = graph_sampler(calls) if graph else alone(calls, flushed=flush)
        _sampled(sample, warmup, cleared, fewest=0)
        times = _sampled(sample, rep, cleared, fewest=_FEWEST)
    return _summary([1e3 * one for one in times], quantiles, return_mode)


def _sampled(
    sample: Sampler, milliseconds: float, cleared: Sequence[torch.Tensor], *, fewest: int
) -> list[float]:
    """Samples that are taken in so much time, and no fewer than these."""
    found: list[float] = []
    until = time.perf_counter() + 1e-3 * milliseconds
    while len(found) < fewest or time.perf_counter() < until:
        for one in cleared:
            one.grad = None
        found.append(sample())
    return found


def _calls(fn: object) -> Sequence[Call]:
    calls: Any = [fn] if callable(fn) else fn
    if not isinstance(calls, list | tuple) or not calls or not all(map(callable, calls)):
        raise ProblemError(
            f"fn {shown(fn)} of type {type(fn).__name__}",
            rule="must be a function without arguments, or a list of such functions",
            fix="pass lambda: warploom.gemm(a, b)",
        )
    return calls


def _cleared(tensors: object) -> Sequence[torch.Tensor]:
    found: Any = () if tensors is None else tensors
    listed = isinstance(found, list | tuple)
    if not listed or not all(isinstance(one, torch.Tensor) for one in found):
        raise ProblemError(
            f"grad_to_none {shown(tensors)} of type {type(tensors).__name__}",
            rule="must be a list of tensors",
            fix="for example [x, weight]; leave it out where no gradient is computed",
        )
    return cast("Sequence[torch.Tensor]", found)


def _summary(
    times: list[float], quantiles: Sequence[float] | None, return_mode: str
) -> float | list[float]:
    if quantiles is not None:
        ordered = torch.tensor(times, dtype=torch.float64)
        found = torch.quantile(ordered, torch.tensor(quantiles, dtype=torch.float64)).tolist()
        return cast("list[float]", found) if len(found) > 1 else float(found[0])
    return times if return_mode == "all" else float(MODES[return_mode](times))


def _require(warmup: object, rep: object, quantiles: object, return_mode: object) -> None:
    for name, value in (("warmup", warmup), ("rep", rep)):
        if not is_number(value) or not 0 <= cast("float", value) < float("inf"):
            raise ProblemError(
                f"{name} {shown(value)}",
                rule="must be milliseconds, 0 or more",
                fix="leave it out for the usual time",
            )
    if quantiles is not None:
        listed = quantiles if isinstance(quantiles, list | tuple) else ()
        if not listed or not all(is_number(one) and 0 <= one <= 1 for one in listed):
            raise ProblemError(
                f"quantiles {shown(quantiles)}",
                rule="must be a list of numbers from 0 to 1",
                fix="for example [0.5, 0.2, 0.8]",
            )
    if return_mode not in (*MODES, "all"):
        raise ProblemError(
            f"return_mode {shown(return_mode)}",
            rule=f"must be one of {', '.join((*MODES, 'all'))}",
            fix='leave it out for "mean"',
        )
