"""What users call: `warploom.gemm` and `warploom.plan`, and how autograd sees a call.

Autograd sees the launch as one function. What it keeps are the operands that a wanted gradient is a
GEMM of, scales, and what the activation needs; see gradient_rule.py. A second derivative is refused
when it is computed, not before.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, TypedDict, Unpack, cast

import torch
from torch.autograd import forward_ad

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.epilogue import LAST, MOST_CHARACTERS, GateLayout
from warploom.generator.locks import remember
from warploom.generator.specification import KernelSpec
from warploom.renamed import current
from warploom.runtime import driver
from warploom.runtime.counters import launch_numbers
from warploom.runtime.dispatch import Choice, named
from warploom.runtime.elements import name_of
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.call import Checked, WarmProducts
from warploom.runtime.families._product.epilogue import ITEMS, Item, Keywords, defaults
from warploom.runtime.families._product.epilogue import items as epilogue_items
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.scatter import (
    check_index,
    index_of,
    refuse_batches,
    scattered,
)
from warploom.runtime.families.gemm import fp32, operators, strassen
from warploom.runtime.families.gemm.block_scales import without_gradients
from warploom.runtime.families.gemm.call import GemmCall, check_gradient_options
from warploom.runtime.families.gemm.gradient import Tensors, gradients, once
from warploom.runtime.families.gemm.gradient_plans import Ways, simple
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    GradientOptions,
    Preactivation,
    Rule,
    kept_type,
    numbers_of,
    reads_of,
    rule,
    storing_items,
    way_of,
)
from warploom.runtime.function import WarmCalls
from warploom.runtime.kinds import alike
from warploom.runtime.launch_plan import Bound, LaunchPlan
from warploom.runtime.operator import is_distributed
from warploom.runtime.philox import drawn
from warploom.runtime.plan import Plan, increment_versions, make, planned
from warploom.runtime.tensors import (
    WithoutMemoryError,
    explained,
    inside_vmap,
    lowered,
    require_one_device,
    shown,
)

Fits = Callable[..., bool]
Launch = Callable[[int, int], tuple[object, ...]]  # returns the driver's status, 0 being success

_READY = 1 << 14  # calls of plans remembered, over all plans, by addresses and stream
_ready: OrderedDict[tuple[int, ...], tuple[Fits, Launch, Bound]] = OrderedDict()
_numbers = itertools.count()

os.register_at_fork(after_in_child=_ready.clear)


@dataclass
class GemmPlan(Plan[Checked, torch.Tensor], of=GemmCall):
    """What a kind of call needs: its kernel and launch, and which operands are copied first.

    `plan(a, b, out, ...)` runs it for tensors of the planned shapes, strides and types; it is what
    `warploom.gemm` itself runs after looking the plan up.
    """

    rules: dict[tuple[object, ...], Any] = field(default_factory=dict)  # of gradients
    reads: tuple[int, ...] | None = None  # the items whose tensors are read
    saving: GemmPlan | None = None  # stores what the activation is given, too
    _fits: Fits | None = None  # of the tensors that it ran on last
    _warm: WarmCalls[torch.Tensor] | None = None  # of its own calls
    _number: int = field(default_factory=_numbers.__next__)  # of no other plan of the process

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        **keywords: Unpack[Keywords],
    ) -> torch.Tensor:
        """Run the plan with the keywords that it was made with, and tensors like those.

        A launch that ran before, on the same addresses and stream, is only fired again: that it may
        be is seen in less time than the driver's own, and all that follows takes some times it.
        """
        key = None
        dual = forward_ad._current_level >= 0
        traced = torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if out is not None and self.device >= 0 and not (keywords or dual or traced):
            stream = driver.current_stream(self.device)
            key = (self._number, a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
            ready = _ready.get(key)
            if ready is not None:
                fits, launch, bound = ready
                if fits(a, b, out) and not launch(bound[1], 0)[0]:
                    next(launch_numbers)
                    increment_versions((out,))
                    return out
        values = None
        if not traced and keywords.keys() <= _DEFAULTS.keys():
            given = [*map(keywords.get, _DEFAULTS, _PLAIN)] if keywords else _PLAIN
            values = (a, b, out, *given, *self.key[1:3], "save", None, None)
            d = None if self._warm is None else self._warm.again(values)
            if d is not None:
                return d
        listed = epilogue.items(**keywords) if keywords else ()
        options: tuple[Any, ...] = self.key[1:4]  # that decide a plan
        call = GemmCall(a, b, listed, out, *options)
        if traced:  # compilers, and modes that decide by operator
            call.preactivation = "recompute"
            return operators.call(call)
        try:
            same = call.signature() == self.key
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
        if not same:
            raise ProblemError(
                f"a {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype}",
                rule="must have the shapes, strides, dtypes and alignment that the plan was made "
                "for",
                fix="call warploom.plan again, or warploom.gemm",
            )
        if dual:
            call.refuse_tangents()
        laid_out, details = self.launch, self.details
        wanted = torch.is_grad_enabled() and call.requiring_grad() is not None
        if key is None or laid_out is None or not self._repeatable or wanted:
            d = run(self, call)
            if values is not None:
                _keep(self._known(), values, call, self, d)
            return d
        results = call.results(details)
        arguments = call.arguments(details, results)
        (launched,), bound = laid_out.run(*arguments, call.check, details, results)
        if not launched.roams:
            last = self._fits
            fits = last if last and last(a, b, results) else alike(a, b, results)
            self._fits = fits
            remember(_ready, key, (fits, launched.launch, bound), _READY)
        increment_versions((results,))
        return results

    def relaunch(self, choice: Choice, launch: LaunchPlan) -> None:
        """Run these launches from now on; what was ready to be fired again is not."""
        super().relaunch(choice, launch)
        self._number = next(_numbers)

    def __repr__(self) -> str:
        shape, dtype = self.details.out_shape, self.details.out_dtype
        return self.described(f"{list(shape)} {name_of(dtype, 'out')}")

    def _known(self) -> WarmCalls[torch.Tensor]:
        """The calls of this plan that ran before."""
        if self._warm is None:
            spec = self.key[3]
            made: Callable[..., Any] = _warm.made  # a call of gemm
            self._warm = _warm.of_keywords(lambda values: replace(made(values), spec=spec))
        return self._warm

    @property
    def _repeatable(self) -> bool:
        """True when a call is one launch and nothing else: no copies, no workspaces."""
        launch = self.launch
        alone = launch is not None and len(launch.launches) == 1 and not launch.workspaces
        return alone and not self.copies


_CHARACTERS = 48  # of what is put into an epilogue for gradients, in the name of its kernel


def run(plan: GemmPlan, call: GemmCall) -> torch.Tensor:
    """Run a planned call, so that autograd can differentiate it where a gradient is wanted.

    Raises ProblemError for what autograd would have to know of: `out`, and outputs of steps that
    require grad.
    """
    if not torch.is_grad_enabled() or call.requiring_grad() is None:
        return plan.run(call)
    a, b, listed = call.a, call.b, call.listed
    if plan.details.scales:
        raise without_gradients()
    if call.out is not None:
        call.refuse()
    if plan.reads is None:
        plan.reads = tuple(reads_of(listed))
    if len(plan.reads) < len(listed):  # some items have no tensor, an output or no gradient
        call.refuse()
    tensors = (a, b, *[listed[index][1] for index in plan.reads])
    kind = call.preactivation, _needed(tensors), call.main_grad is None
    how, ways = plan.rules.get(kind) or _rule(call, plan, tensors, kind)
    with torch.no_grad():
        if how.way == "save":
            d, stored = _saving(call, plan)
        else:
            d = stored = plan.run(call)
    run: Callable[..., Tensors]
    if ways is not None:
        run = ways.run
    else:
        numbers = numbers_of(listed) if how.numbered else ()
        run = partial(gradients, how, numbers, call.gradient_options)
    return _apply(how, run, (d, stored), *tensors)


def _needed(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    return tuple([one.requires_grad for one in tensors])


class _Gemm(torch.autograd.Function):
    """D that was computed, differentiable in what was read.

    Nothing of its arguments is a tensor with a graph, which would escape hooks and be kept alive.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        how: Rule,
        run: Callable[..., Tensors],
        computed: tuple[torch.Tensor, torch.Tensor],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        kept = [*map(tensors.__getitem__, how.kept)]
        if how.way in ("save", "output"):
            kept.append(computed[1])
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        ctx.run = run
        return computed[0]

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dd: torch.Tensor | None,
    ) -> Tensors:
        """Return the gradients that are wanted."""
        found: Tensors = (None,) * len(ctx.needs_input_grad[3:])
        if dd is not None:
            found = once(ctx.run, dd, *ctx.saved_tensors)
        return None, None, None, *found


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Gemm).apply


def _rule(
    call: GemmCall, plan: GemmPlan, tensors: Sequence[torch.Tensor], kind: tuple[Any, ...]
) -> tuple[Rule, Ways | None]:
    """How the calls of a kind are differentiated. A kernel that was named stores nothing more."""
    needed = kind[1]
    asked = call.preactivation if call.spec is None else "recompute"
    stored = plan.details.out_dtype in FLOATS
    way = way_of(call.listed, needed, preactivation=asked, stored=stored)
    written = sum(len(step.token) + 1 for step in plan.details.epilogue.steps)
    if way in ("save", "recompute") and written + _CHARACTERS > MOST_CHARACTERS:
        way = "composite"
    how, options = rule(tensors, call.listed, needed, way), call.gradient_options
    ways = None
    plain = options.accumulation == "fast" and options.accumulate_into is None
    if plain and plan.details.out_dtype == call.b.dtype and simple(tensors, call.listed, how):
        ways = Ways(how, partial(gradients, how, (), options), of_weight=False)
    plan.rules[kind] = how, ways
    return how, ways


def _saving(call: GemmCall, plan: GemmPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """D, and what its activation was given, by a plan of its own that is found once."""
    details, listed = plan.details, call.listed
    shape = (*details.out_shape[:-1], call.b.shape[-1])  # a gate is given twice as many columns
    z = call.a.new_empty(shape, dtype=kept_type(details.out_dtype, call.a.dtype))
    storing = GemmCall(
        call.a, call.b, storing_items(listed, z), None, call.out_dtype, call.use_fast_accum
    )
    if plan.saving is None:
        plan.saving = make(storing, GemmPlan)
    return plan.saving.run(storing), z


# ---- Calls like an earlier one -------------------------------------------------------------------


def multiplied(a: torch.Tensor, b: torch.Tensor, listed: Sequence[Item] = ()) -> torch.Tensor:
    """D of a call with a list of items that autograd does not see, as `gemm` has it."""
    values: tuple[Any, ...] = (a, b, None, *_PLAIN, None, True, "save", None, None)
    warm: WarmCalls[torch.Tensor] | None = _warm.keywords
    if listed:
        warm, values = _warm.of_list(values, listed)
    d = None if warm is None else warm.again(values)
    if d is None:
        call = GemmCall(a, b, listed)
        plan = planned(call, GemmPlan)
        d = plan.run(call)
        if warm is not None:
            warm.keep(values, call, plan, d)
    return d


def _keep(
    warm: WarmCalls[torch.Tensor],
    values: tuple[Any, ...],
    call: GemmCall,
    plan: GemmPlan,
    d: torch.Tensor,
) -> None:
    """Keep what is known of a call that ran, for others like it."""
    if not d.requires_grad:
        warm.keep(values, call, plan, d)
        return
    listed, places = call.listed, warm.places
    try:
        derive = _Derive.of(call, plan, places)
    except KeyError:  # an item of a kind that no argument is called by
        return
    if derive.how.way != "save" or plan.saving is None:
        warm.keep(values, call, plan, d, derive)
        return

    def storing_again(pool: tuple[Any, ...]) -> GemmCall:
        again = cast("GemmCall", warm.call_of(pool))
        return replace(again, listed=storing_items(again.listed, pool[-1]))

    z = d.new_empty((*d.shape[:-1], call.b.shape[-1]), dtype=kept_type(d.dtype, call.a.dtype))
    storing = replace(call, listed=storing_items(listed, z))
    warm.keep(values, storing, plan.saving, d, derive, {"preactivation": z}, storing_again)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Derive:
    """What has autograd know of D of calls like an earlier one.

    how, ways   as `_rule` has it
    tensors     takes from a pool what is read
    numbers     where it has the items' numbers that gradients depend on
    into        where it has `main_grad`, which `options` lack
    """

    how: Rule
    ways: Ways | None
    tensors: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]
    numbers: tuple[int, ...]
    options: GradientOptions
    into: int

    @classmethod
    def of(cls, call: GemmCall, plan: GemmPlan, places: Mapping[str, int]) -> _Derive:
        """That of a call which was differentiated, with the places of its arguments."""
        listed = [call.listed[index] for index in plan.reads or ()]
        tensors = (call.a, call.b, *[item[1] for item in listed])
        kind = call.preactivation, _needed(tensors), call.main_grad is None
        how, ways = plan.rules[kind]
        numbers = ITEMS.numbered(call.listed) if how.numbered else ()
        return cls(
            how,
            ways,
            itemgetter(*[places[name] for name in ("a", "b", *[item[0] for item in listed])]),
            tuple([places[name] for name in numbers]),
            call.gradient_options._replace(accumulate_into=None),
            places["main_grad"],
        )

    def __call__(self, pool: tuple[Any, ...], d: torch.Tensor) -> torch.Tensor:
        how = self.how
        if self.ways is not None:
            run: Callable[..., Tensors] = self.ways.run
        else:
            options = self.options._replace(accumulate_into=pool[self.into])
            run = partial(gradients, how, tuple([pool[at] for at in self.numbers]), options)
        stored = pool[-1] if how.way == "save" else d
        return _apply(how, run, (d, stored), *self.tensors(pool))


# ---- The functions -------------------------------------------------------------------------------


_EPILOGUE = Keywords.__annotations__.keys()


class _Older(TypedDict, total=False):
    """Keywords that have a new name."""

    accumulation: str
    accumulate_into: torch.Tensor | None


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    gate: str | None = None,
    gate_layout: GateLayout = "halves",
    scale_a: float | torch.Tensor | None = None,
    scale_b: float | torch.Tensor | None = None,
    scale_d: float | torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    epilogue: Sequence[Item] | None = None,
    rounding: str = "nearest",
    rounding_state: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
    spec: KernelSpec | str | None = None,
    preactivation: Preactivation = "save",
    main_grad: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
    algorithm: str | None = None,
    precision: str | None = None,
    **older: Unpack[_Older],
) -> torch.Tensor:
    """Multiply matrices, and apply scales, a bias, an activation and a residual in the same kernel.

    The result is scale_d * (activation(scale_a * scale_b * (a @ b) + bias) + beta * residual).

    Args:
        a: [.., M, K], fp16, bf16, float8_e4m3fn, float8_e5m2 or int8; fp32 with `precision`.
            Batches broadcast as in torch.matmul.
        b: [.., K, N], of the dtype of a, but e4m3 and e5m2 may be mixed. A torch weight [N, K] is
            passed as weight.t().
        out: The tensor that the result is written to; it may be exactly the residual. It cannot be
            combined with gradients.
        bias: [N], or with the result's batches before; fp16, bf16 or fp32.
        residual: [M, N], or with the result's batches before; fp16, bf16 or fp32.
        beta: The factor of the residual; 0 does not read it.
        activation: "relu", "gelu", "gelu_tanh" or "silu".
        gate: Instead of an activation: one of these functions, or "swiglu_oai". The N columns are
            gate and up, and the result has N / 2 columns, function(gate) * up. N / 2 must be a
            multiple of 8.
        gate_layout: "halves": all gate columns before all up columns, as in a weight [gate; up];
            "interleaved": they alternate.
        scale_a: A number, or an fp32 tensor of one element, [M] or [M, 1]. In block-scaled GEMMs
            [M, K / 128], as `warploom.cast` returns it.
        scale_b: A number, or an fp32 tensor of one element, [N] or [1, N]; in block-scaled GEMMs
            [N / 128, K / 128] or [N, K / 128].
        scale_d: A number, or an fp32 tensor of one element.
        amax: An fp32 tensor of one element, which is raised to the largest magnitude of the result
            before `scale_d`.
        out_dtype: The dtype of the result. By default that of 16-bit operands, int32 for int8
            without an epilogue, else bf16. 8-bit results saturate and keep NaN (int8: 0).
        use_fast_accum: True accumulates over all of K in the tensor core: in fp32 (about 22 bits)
            for 16-bit operands, with about 14 bits for fp8. False adds up partial sums over 128 of
            K (16 bits: 64) in fp32 registers, which is slower. int8 accumulates in int32.
        epilogue: A list of steps in any other order, instead of the keywords, such as
            [("bias", bias), ("activation", "relu")]: docs/families/gemm.md.
        rounding: How the result is rounded: "nearest" (even), or "stochastic", to one of the two
            neighbours at random, with the value as its mean. Gradients ignore it.
        rounding_state: int64 [2] on the device of a: the random numbers are a function of it and of
            the position in the result. None draws a state from torch's generator.
        scatter: int32 or int64 [M], on the device of a: row i is written to row scatter[i] of the
            result, which is of `out`'s rows, [R, N], or of M rows where `out` is None. A row whose
            index is negative, or is not a row of the result, is not written; rows of the result
            that no index names are not written either: `out` keeps them, and in a result that was
            made they are undefined (zeros where it is differentiated). Of rows with one index any
            may come last. The epilogue's operands are in the order of a. a and b are [M, K] and
            [K, N].
        spec: The kernel to run, a KernelSpec or its name.
        preactivation: Where the backward pass has the input of the activation from: "save" keeps it
            in the forward pass, "recompute" computes it again.
        main_grad: fp32 of b's shape: the gradient of b is added to it, and b.grad is left alone.
        gradient_dtype: The dtype in which gradients are multiplied with fp8 operands:
            torch.bfloat16, or torch.float8_e5m2, scaled to its range.
        algorithm: "strassen" multiplies 16-bit matrices by 7 matmuls of half the size instead of 8,
            "strassen2" does so twice: faster for very large matrices, with a larger error.
        precision: Multiply fp32 matrices on tensor cores, with gradients of the same precision.
            "fp32": errors like those of fp32 arithmetic, by two fp16 pieces of each value, or,
            where the device finds that these do not hold the values, three bf16 pieces; "bf16x6":
            always the latter; "bf16x3": errors of about 2^-17; "tf32": values rounded to 10 bits.
            b may also be bf16.
        older: Former names of keywords, which still work: `accumulation`, `accumulate_into`.

    Returns:
        The result, [.., M, N]. It is differentiable, once, in a, b, bias, residual and tensors of
        scales, unless `out` is given.

    Raises:
        ProblemError: For arguments that are not supported, before anything is launched.

    Under autocast, a and b of 16 or 32 bits are converted as for torch.mm. Runs on the current
    stream without waiting. On CPU tensors a reference computes the same.

    Example:
        >>> x, weight = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        >>> warploom.gemm(x, weight.t(), activation="silu").shape
        torch.Size([16, 32])
    """
    if older:
        return gemm(**current(gemm, older, locals()))
    if type(use_fast_accum) is not bool:
        require_boolean("use_fast_accum", use_fast_accum)
    if precision is None and torch._C._is_any_autocast_enabled():
        a, b = lowered(a), lowered(b)
    if main_grad is not None or gradient_dtype is not None or preactivation != "save":
        check_gradient_options(b, preactivation, main_grad, gradient_dtype)
    if rounding == "stochastic" and rounding_state is None and isinstance(a, torch.Tensor):
        rounding_state = drawn(a.device)
    values = (
        a,
        b,
        out,
        bias,
        residual,
        beta,
        activation,
        gate,
        gate_layout,
        scale_a,
        scale_b,
        scale_d,
        amax,
        rounding,
        rounding_state,
        scatter,
        out_dtype,
        use_fast_accum,
        preactivation,
        main_grad,
        gradient_dtype,
    )
    warm = None
    composed = algorithm is not None or precision is not None
    if spec is None and not composed and not torch.compiler.is_dynamo_compiling():
        warm = _warm.keywords
        if epilogue is not None:
            warm, values = _warm.of_list(values, epilogue)
        d = None if warm is None else warm.again(values)
        if d is not None:
            return d
    listed: Sequence[Item] = ()
    if (
        scale_a is not None
        or scale_b is not None
        or bias is not None
        or activation is not None
        or gate is not None
        or residual is not None
        or amax is not None
        or scale_d is not None
        or epilogue is not None
        or rounding != "nearest"
        or rounding_state is not None
        or scatter is not None
        or type(beta) is not float  # a tensor would be waited for
        or beta != 1
        or gate_layout != "halves"
    ):
        listed = epilogue_items(
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias,
            activation=activation,
            gate=gate,
            gate_layout=gate_layout,
            residual=residual,
            beta=beta,
            amax=amax,
            scale_d=scale_d,
            epilogue=epilogue,
            rounding=rounding,
            rounding_state=rounding_state,
            scatter=scatter,
        )
    if forward_ad._current_level >= 0:
        GemmCall(a, b, listed, out).refuse_tangents()
    call = GemmCall(
        *(a, b, listed, out, out_dtype, use_fast_accum),
        spec,  # type: ignore[arg-type]
        *(preactivation, main_grad, gradient_dtype),
    )
    if (scatter is not None or epilogue is not None) and not composed and out is None:
        found = _scattered(call)
        if found is not None:
            return found
    if precision is not None:
        fp32.refuse_algorithm(algorithm, precision)
        return fp32.multiply(call, precision)
    if algorithm is not None:
        return strassen.multiply(call, algorithm)
    # Compilers, and modes that decide by operator (selective checkpoints, fake tensors), see these.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return operators.call(call)
    if spec is not None:
        call.spec = named(spec)
    try:
        plan = planned(call, GemmPlan)
        d = run(plan, call)
        if warm is not None:
            _keep(warm, values, call, plan, d)
        return d
    except WithoutMemoryError:  # torch knows which code is to see these tensors
        return operators.call(call)
    except Exception as error:
        if inside_vmap():  # whose tensors have no memory, and which the operators fold
            return operators.call(call)
        raise explained(error, call.require) from error.__cause__


def _scattered(call: GemmCall) -> torch.Tensor | None:
    """D of a call whose rows are scattered, where autograd is to know of it: by torch, whose
    gradient takes its rows by the same indices. None of any other call.
    """
    index = index_of(call.listed)
    if index is None or not torch.is_grad_enabled():
        return None
    if not torch.compiler.is_dynamo_compiling():
        call.require()  # what torch reads below is not seen by a plan
    if call.requiring_grad() is None:
        return None
    if call.spec is not None:
        raise ProblemError(
            f"spec {shown(call.spec)} with scatter and a tensor that requires grad",
            rule="must be left out: torch scatters the rows of what is differentiated",
            fix="leave it out, or call under torch.no_grad()",
        )
    refuse_batches(call.a, call.b)
    for item in call.listed[:-1]:
        if issubclass(step_of(item).step, LAST):
            raise ProblemError(
                f"epilogue with {item[0]} and scatter",
                rule="must be one of them, as each is the last step",
                fix="write the rows to D[index] afterwards",
            )
    index = check_index(index, call.a.shape[0], call.a.get_device())
    require_one_device([("a", call.a), ("b", call.b), ("scatter", index)])
    if is_distributed(call.a) != is_distributed(index):
        raise ProblemError(
            "scatter of one process with distributed tensors, or the other way round",
            rule="must be distributed over the mesh of a and b, or none of them must be",
            fix="torch.distributed.tensor.distribute_tensor(index, mesh), or .to_local()",
        )
    d = gemm(
        *(call.a, call.b),
        epilogue=call.listed[:-1],
        out_dtype=call.out_dtype,
        use_fast_accum=call.use_fast_accum,
        preactivation=call.preactivation,
        main_grad=call.main_grad,
        gradient_dtype=call.gradient_dtype,
    )
    return scattered(d, index)


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    spec: KernelSpec | str | None = None,
    **keywords: Unpack[Keywords],
) -> GemmPlan:
    """Plan a GEMM: build and load its kernel now, and return what runs it with the least overhead.

    Args:
        a: [.., M, K], as for `warploom.gemm`.
        b: [.., K, N], as for `warploom.gemm`.
        out: Whether calls pass a tensor for the result: a tensor like it, or None.
        out_dtype: The dtype of the result, as for `warploom.gemm`.
        use_fast_accum: As for `warploom.gemm`.
        spec: The kernel to run, a KernelSpec or its name.
        keywords: The keywords of the epilogue that calls pass, as for `warploom.gemm`.

    Returns:
        The plan. `plan(a, b, out, ...)` runs tensors of the same shapes, strides, dtypes and
        alignment, with the same keywords, and returns the result. It is not differentiable.

    Raises:
        ProblemError: For arguments that are not supported.

    Example:
        >>> a, b = torch.randn(16, 64).bfloat16(), torch.randn(64, 32).bfloat16()
        >>> plan = warploom.plan(a, b)
        >>> plan(a, b).shape
        torch.Size([16, 32])
    """
    if keywords.keys() - _EPILOGUE:
        older = {name: one for name, one in keywords.items() if name not in _EPILOGUE}
        given: Any = {name: one for name, one in keywords.items() if name in _EPILOGUE}
        return plan(**current(plan, older, locals()), **given)
    own = {"out": out, "out_dtype": out_dtype, "use_fast_accum": use_fast_accum, "spec": spec}
    call = GemmCall.asked(a, b, **own, **keywords)
    call.require()
    return make(call, GemmPlan)


_DEFAULTS = defaults(gemm)  # in the order in which a warm call has these keywords
_PLAIN = (*_DEFAULTS.values(),)
_OPTIONS = ("out_dtype", "use_fast_accum", "preactivation", "main_grad", "gradient_dtype")
_warm = WarmProducts(GemmCall, ("a", "b"), _DEFAULTS, _OPTIONS, lambda a, b: (a, b))


class PlanKeywords(Keywords, total=False):
    """The keywords of `plan`, those of the epilogue and its own, and what `explain` takes too."""

    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    use_fast_accum: bool
    spec: KernelSpec | str | None
    algorithm: str | None
    precision: str | None
