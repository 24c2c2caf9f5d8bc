"""What a packed weight is, beside its tensors: frozen, and plain data for a file or a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from warploom.errors import ProblemError, WarploomError
from warploom.generator.slabs import DEPTH, ROWS, SlabLayout
from warploom.printable import brief, cut

VERSION = 2  # of the packed layout: what lies where in which bits
BIAS_OF_E8M0 = 127


@dataclass(frozen=True, slots=True)
class Metadata:
    """Format, group, scale type and activations (see SlabLayout), and the weight's N and K.

    ProblemError where the version is another one, N or K is no size, or groups do not divide K.
    """

    format: str
    group: int | None
    scale: str
    activations: str
    n: int
    k: int
    version: int = VERSION

    def __post_init__(self) -> None:
        _require_version(self.version)
        for name, size in (("n", self.n), ("k", self.k)):
            if not isinstance(size, int) or isinstance(size, bool) or not 0 < size < 1 << 31:
                raise ProblemError(
                    f"{name} {brief(size)}", rule="must be a positive integer below 2^31"
                )
        try:
            groups = self.slab.row.groups
        except WarploomError as error:
            raise ProblemError(error.value, rule=error.rule, fix=error.fix) from None
        if self.group is not None and self.k % self.group:
            able = [str(group) for group in groups if group is None or self.k % group == 0]
            raise ProblemError(
                f"group {self.group}",
                rule=f"must divide k, which is {self.k}",
                fix=f"groups of {self.format} that do: {', '.join(able) or 'none'}",
            )

    @property
    def slab(self) -> SlabLayout:
        """What each slab is made of."""
        return SlabLayout(self.format, self.group, self.scale, self.activations)

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.k // self.group if self.group else 1

    @property
    def row_blocks(self) -> int:
        """Slabs along n."""
        return -(-self.n // ROWS)

    @property
    def slabs_of_k(self) -> int:
        """Slabs along k."""
        return -(-self.k // DEPTH)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type of the scales, as torch has it."""
        return dtype_of(self.slab.scale_type.torch)

    @property
    def code_dtype(self) -> torch.dtype:
        """The type of the codes, as torch has it."""
        return dtype_of(self.slab.row.codes)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and type of each tensor of a packed weight of this kind."""
        slab, rows = self.slab, (self.row_blocks * ROWS,)
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "data": ((self.row_blocks, self.slabs_of_k, slab.bytes), torch.uint8)
        }
        if self.group is None:
            found["channel_scales"] = (rows, self.scale_dtype)
            if slab.row.has_zeros:
                found["channel_zeros"] = (rows, torch.uint8)
        elif slab.row.scaled_twice:
            found["channel_scales"] = (rows, torch.float32)
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all the tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.tensors().values())

    @property
    def bits(self) -> float:
        """Bits of memory for each weight, with scales, zero points and padding."""
        return 8 * self.nbytes / (self.n * self.k)

    def as_dict(self) -> dict[str, int | str | None]:
        """Plain data, which `from_dict` reads."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Metadata:
        """Read what `as_dict` gave. ProblemError names what is missing, unknown or wrong."""
        known = {field.name for field in fields(cls)}
        if isinstance(data, Mapping) and "version" in data:
            _require_version(data["version"])  # first: another one has other names
        if not isinstance(data, Mapping) or set(data) != known:
            raise ProblemError(
                f"metadata of a quantized weight {brief(data)}",
                rule=f"must have {', '.join(sorted(known))}, and nothing else",
            )
        try:
            return cls(**data)  # type: ignore[arg-type]
        except TypeError as error:
            what = f"metadata of a quantized weight {brief(data)}"
            raise ProblemError(f"{what}: {cut(str(error), 80)}") from None


def _require_version(version: object) -> None:
    if version != VERSION:
        raise ProblemError(
            f"quantized weight of version {brief(version)}",
            rule=f"must be of version {VERSION}",
            fix="pack the weight again with this release",
        )


def dtype_of(name: str) -> torch.dtype:
    """Torch's type of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def e8m0(scale: float) -> int:
    """Return the bits of a power of two."""
    return math.frexp(scale)[1] - 1 + BIAS_OF_E8M0
