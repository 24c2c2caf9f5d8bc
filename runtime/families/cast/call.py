"""One call: what its arguments ask for, and what is done with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from warploom.arguments import require_boolean, require_dtype
from warploom.generator.families.cast import CastOperation, CastProblem, CastShape
from warploom.generator.families.cast.schedule import COLUMNS, Block, most_tiles
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import Arguments, declared, named_spec, option, result, tensor
from warploom.runtime.call import Draft
from warploom.runtime.elements import LARGEST, NAMES
from warploom.runtime.families._product.groups import ends_of
from warploom.runtime.families.cast import checks, reference
from warploom.runtime.families.cast.reference import Results
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device

WRITTEN = {"amax": "Tensor(a!)?"}
_ALIGNMENT = 16  # bytes that rows of q are a multiple of, as TMA and kernels want them
_SCALES = 4  # that columns of scales are a multiple of, likewise


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    copies: tuple[str, ...]  # of x, scales and gradient, those whose rows are not one pitch apart


@declared
class Cast(Arguments[Details, Results]):
    """What calls of `cast` have in common, whether their rows are in groups or not.

    out, scale_out, out_t, scale_t_out, ends_out   where results go; None: they are made
    """

    function = "cast"
    no_gradient = (
        "x or scales that require grad",
        "cast is not differentiable",
        "call it under torch.no_grad()",
    )
    x: torch.Tensor = tensor(aligned=False)
    dtype: torch.dtype = option(schema="ScalarType")
    block: str | tuple[int, int] = option(default="tensor", schema="str")
    transpose: bool = option(default=False, schema="bool")
    scale: torch.Tensor | None = tensor(default=None, aligned=False)
    pow2: bool = option(default=False, schema="bool")
    rounding: str = option(default="nearest", schema="str")
    rounding_state: torch.Tensor | None = tensor(default=None, aligned=False, kernel="state")
    amax: torch.Tensor | None = tensor(default=None, schema="", aligned=False)
    scale_layout: str = option(default="column_major", schema="str")
    gate: str | None = option(default=None, schema="str?")
    gradient: torch.Tensor | None = tensor(default=None, aligned=False)
    spec: KernelSpec | str | None = named_spec(default=None)
    scale_t: torch.Tensor | None = tensor(default=None, schema="Tensor?=None", aligned=False)

    @property
    def offsets(self) -> torch.Tensor | None:
        """Where groups of rows end."""
        return None

    @property
    def blocks(self) -> Block:
        """The blocks that share a scale, as kernels are named by them."""
        return checks.BLOCKS[self.block]

    @property
    def extents(self) -> tuple[int, int]:
        """The rows of x, through all leading dimensions, and its columns: half, of a gate."""
        columns = self.x.shape[-1]
        is_half = self.gate is not None and self.gradient is None
        # torch.Size.numel() would make constants of sizes that torch.compile keeps dynamic.
        return math.prod(self.x.shape[:-1]), columns // 2 if is_half else columns

    @property
    def groups(self) -> int:
        """The groups that rows are in; 0 where they are in none."""
        return 0 if self.offsets is None else self.offsets.shape[0]

    @property
    def transposes_scales(self) -> bool:
        """Whether x.T has scales of its own."""
        return self.transpose and self.blocks in ("row", "1x128", "1x32")

    @property
    def columns_t(self) -> int:
        """The columns of q of x.T: with groups as many as these may have, wherever they end."""
        m, _ = self.extents
        return m if self.offsets is None else most_tiles(m, self.groups) * COLUMNS

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are given for a kernel to write."""
        results = Arguments.written(self)
        return results if self.amax is None else [("amax", self.amax), *results]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_dtype("dtype", self.dtype, tuple(LARGEST))
        for name in ("transpose", "pow2"):
            require_boolean(name, getattr(self, name))
        checks.require_words(self)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        checks.check(self)
        m, n = self.extents
        operation = CastOperation(
            NAMES[self.x.dtype],  # type: ignore[arg-type]
            NAMES[self.dtype],  # type: ignore[arg-type]
            self.blocks,
            static=self.scale is not None,
            transpose=self.transpose,
            pow2=self.pow2,
            rounding=self.rounding,  # type: ignore[arg-type]
            amax=self.amax is not None,
            gate=self.gate or "none",  # type: ignore[arg-type]
            gradient=self.gradient is not None,
            offsets=self.offsets is not None,
        )
        choice = dispatch.choose(operation, CastShape(m, n), spec=self.kernel, device=target)
        read = [(name, getattr(self, name)) for name in ("x", "scale", "gradient", "scale_t")]
        copies = tuple(name for name, one in read if one is not None and not _fits(name, one))
        problem = None if self._is_empty() else self._problem(copies)
        return Draft(choice, problem, self.addressed(), (), copies, Details(copies))

    def _is_empty(self) -> bool:
        """Whether there is nothing to cast."""
        m, n = self.extents
        return not (m and n) or (self.offsets is not None and not self.groups)

    def _problem(self, copies: tuple[str, ...]) -> CastProblem:
        """Where everything lies: of what is copied or made, as it will."""
        (m, n), x = self.extents, self.x
        q, scale, q_t, scale_t = self._results(torch.device("meta"))[:4]
        if self.scale is not None:
            scale = _read("scale", self.scale, copies)
        if self.scale_t is not None:
            scale_t = _read("scale_t", self.scale_t, copies)
        return CastProblem(
            m,
            n,
            x.shape[-1] if "x" in copies else _down(x),
            0 if q is None else _down(q),
            (0, 0) if scale is None else self._steps(scale),
            0 if q_t is None else _down(q_t),
            (0, 0) if scale_t is None else self._steps(scale_t),
            self._gradient_pitch("gradient" in copies),
            self.groups,
        )

    def _gradient_pitch(self, is_copied: bool) -> int:
        if self.gradient is None:
            return 0
        return self.gradient.shape[-1] if is_copied else _down(self.gradient)

    def _steps(self, scale: torch.Tensor) -> tuple[int, int]:
        """Elements to the scale below and to the next: none where a tensor or a row has one."""
        if self.blocks == "tensor":
            return 0, 0
        return _down(scale), 0 if self.blocks == "row" else scale.stride(-1)

    def _results(self, device: torch.device) -> Results:
        """What is computed: tensors that were given for it, or new ones on a device."""
        (m, n), columns = self.extents, self.columns_t
        rows, places = self.x.shape[:-1], list[_Place | None]()
        places.append(_row_major((*rows, n), self.dtype, _ALIGNMENT))
        scales = self._scales(checks.scale_shape(self), m)
        places.append(scales if self.scale is None else None)
        places.append(_row_major((n, columns), self.dtype, _ALIGNMENT) if self.transpose else None)
        places.append(self._scales(checks.scale_t_shape(self), n) if self.computed()[3] else None)
        if self.offsets is not None:
            places.append(_row_major((self.groups,), torch.int32, 1))
        outs = [getattr(self, name) for name in self.declaration.results]
        return tuple(
            None
            if place is None
            else torch.empty_strided(place[0], place[1], dtype=place[2], device=device)
            if out is None
            else out
            for place, out in zip(places, outs, strict=True)
        )

    def _scales(self, shape: torch.Size, rows: int) -> _Place:
        """Where scales lie: those of 1x128 one column after the other, unless asked otherwise."""
        if self.blocks == "1x32":
            return _row_major(shape, torch.float8_e8m0fnu, 1)
        if self.blocks != "1x128" or self.scale_layout == "row_major":
            return _row_major(shape, torch.float32, 1)
        _, strides, dtype = _row_major((*shape[:-1], 1), torch.float32, 1)
        return shape, (*strides[:-1], _multiple(rows, _SCALES)), dtype

    def results(self, details: Details) -> Results:
        """Where results go: as they were given, or new; None where one is not computed."""
        return self._results(self.x.device)

    def computed(self) -> tuple[bool, ...]:
        """Of scales, where none are given; of x.T, where it is asked for; of groups, likewise."""
        own = self.transposes_scales and self.scale_t is None
        of_groups = () if self.offsets is None else (True,)
        return True, self.scale is None, self.transpose, own, *of_groups

    def fake(self) -> Results:
        """Those that are computed."""
        checks.require_words(self)
        return self._results(self.x.device)

    def crossing(self) -> tuple[list[Any], dict[str, torch.Tensor | None]]:
        """What the operator is handed: a block by its name, and amax to be written."""
        values, _ = Arguments.crossing(self)
        values[[name for name, _ in self.declaration.crossing].index("block")] = self.blocks
        return values, {"amax": self.amax}

    def check(self, details: Details, results: Results) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        made = zip(self.declaration.results, results, strict=True)
        written = [("amax", self.amax), *made]
        require_memory([*self.named(), *written])
        seen = [(name, one) for name, one in self.read() if name != "amax"]
        for name, one in written:
            if one is not None:
                refuse_overlap(one, seen, "do not overlap", name)
                seen.append((name, one))

    def compute(self, details: Details, results: Results) -> None:
        """Compute all by plain torch operations; scales of nothing are 1."""
        (m, n), amax, offsets = self.extents, self.amax, self.offsets
        options = reference.Options(
            self.dtype, self.blocks, self.transpose, self.pow2, self.rounding_state
        )
        with torch.no_grad(), torch.autocast(self.x.device.type, enabled=False):
            ends = [0] if self._is_empty() or offsets is None else ends_of("offsets", offsets, m)
            if self._is_empty() or (offsets is not None and not ends[-1]):
                for one in (results[1], results[3]):
                    if one is not None and one.numel():
                        one.fill_(1.0)
                if offsets is not None and results[4] is not None:
                    results[4].zero_()
                return
            x, scale = reference.gated(self.x, self.gate, self.gradient).reshape(m, n), self.scale
            if scale is not None:
                down, across = reference.sizes(self.blocks, m, n)
                scale = scale.reshape(-(-m // down), -(-n // across))
            scales = scale, self.scale_t
            if offsets is not None:
                x = x[: ends[-1]]  # other rows are neither read nor written
                found = reference.cast_groups(x, options, scales, ends)
                places = tuple(
                    one if one is None or value is None else _part(one, value.shape)
                    for one, value in zip(results, found, strict=True)
                )
            else:
                found, places = reference.cast(x, options, scales), results
            for one, value in zip(places, found, strict=True):
                if one is not None and value is not None:
                    one.copy_(value.reshape(one.shape))
            if amax is not None:
                amax.copy_(torch.maximum(amax, x.abs().amax().float()))


@declared
class CastCall(Cast):
    """The arguments of `cast`, which says what they mean."""

    outputs = ("q", "scale", "q_t", "scale_t")

    out: torch.Tensor | None = result(default=None, aligned=False, public=False)
    scale_out: torch.Tensor | None = result(default=None, aligned=False, public=False)
    out_t: torch.Tensor | None = result(default=None, aligned=False, public=False)
    scale_t_out: torch.Tensor | None = result(default=None, aligned=False, public=False)


@declared
class GroupedCastCall(Cast):
    """The same with `offsets`, whose results say where groups end, too."""

    outputs = ("q", "scale", "q_t", "scale_t", "ends")

    # Always given; operators have a default for it, as they have for what comes before it.
    offsets: torch.Tensor | None = tensor(default=None, schema="Tensor?=None", aligned=False)
    out: torch.Tensor | None = result(default=None, aligned=False, public=False)
    scale_out: torch.Tensor | None = result(default=None, aligned=False, public=False)
    out_t: torch.Tensor | None = result(default=None, aligned=False, public=False)
    scale_t_out: torch.Tensor | None = result(default=None, aligned=False, public=False)
    ends_out: torch.Tensor | None = result(default=None, aligned=False, public=False)


_Place = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, type


AnyCast = CastCall | GroupedCastCall


def call_of(
    x: torch.Tensor,
    dtype: torch.dtype,
    *,
    offsets: torch.Tensor | None = None,
    **keywords: Any,
) -> AnyCast:
    """The call of the arguments of `cast`."""
    if offsets is None:
        return CastCall(x, dtype, **keywords)
    return GroupedCastCall(x, dtype, offsets=offsets, **keywords)


def _part(result: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What of a result there is: behind the last group it is left as it is."""
    for dim, extent in enumerate(shape if result.dim() == len(shape) else ()):
        result = result.narrow(dim, 0, extent)
    return result


def _multiple(extent: int, of: int) -> int:
    """An extent, or the next multiple of a number."""
    return -(-extent // of) * of


def _row_major(shape: tuple[int, ...], dtype: torch.dtype, alignment: int) -> _Place:
    """A tensor whose rows are as far apart as their elements, and a multiple of `alignment`."""
    strides = [1]
    step = _multiple(shape[-1], alignment) if shape else 1
    for extent in reversed(shape[:-1]):
        strides.insert(0, step)
        step *= extent
    return shape, tuple(strides) if shape else (), dtype


def _down(tensor: torch.Tensor) -> int:
    """Elements from row to row, where one pitch leads through all."""
    return checks.pitch(tensor) or 0


def _read(name: str, scale: torch.Tensor, copies: tuple[str, ...]) -> torch.Tensor:
    """Given scales as kernels read them: as they are stored, or as a copy of them will be."""
    return scale.new_empty(scale.shape, device="meta") if name in copies else scale


def _fits(name: str, tensor: torch.Tensor) -> bool:
    """Whether kernels can read a tensor where it lies."""
    if name not in ("scale", "scale_t"):
        return checks.is_dense(tensor)
    return tensor.dim() == 0 or checks.pitch(tensor) is not None
