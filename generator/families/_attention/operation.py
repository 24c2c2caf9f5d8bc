"""What the operations of both passes share."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from warploom.generator.elements import Element, element
from warploom.generator.families._attention.modifiers import MODIFIERS, Modifier, declare
from warploom.generator.knob import frozen, knob

Dim = Literal[32, 64, 96, 128, 192, 256]
DIMS: tuple[int, ...] = get_args(Dim)
# Of q and k, and of v where that is another, that there are kernels of.
UNLIKE_DIMS = ((96, 64), (128, 64), (64, 128), (192, 128))
GRADIENT_DIMS = ((192, 128),)  # the same of gradients


@lru_cache(maxsize=1024)  # each is asked for a few times in a row
def _modifiers_of(operation: Any) -> tuple[Modifier, ...]:  # noqa: ANN401 (of a pass, or decoding)
    """The modifiers that an operation has, with their values."""
    names = type(operation).__dataclass_fields__
    return tuple(
        kind(operation)
        for kind in MODIFIERS
        if kind.name in names and getattr(operation, kind.name) != kind.default
    )


class Modified:
    """An operation with fields of modifiers."""

    __slots__ = ()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 (a modifier's field)

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The modifiers that it has, with their values."""
        return _modifiers_of(self)


@frozen
@declare(MODIFIERS, later=True)
class Operation(Modified):
    """The operation of either pass. The fields of modifiers are declared by these."""

    element: Literal["fp16", "bf16"] = knob(
        doc="element type of all tensors whose type no other field names; accumulators are fp32"
    )
    dim: Dim = knob(
        name="dim{}", doc="head dimension of q and k; a kernel serves every multiple of 8 up to it"
    )
    mask: Literal["none", "causal", "window"] = knob(
        default="none",
        doc="none: each row sees all keys; causal: column <= row + right; window: row - left "
        "<= column <= row + right",
    )
    lengths: Literal["fixed", "packed"] = knob(
        default="fixed",
        doc="fixed: every sequence has seq_q rows and seq_k keys; packed (varlen): sequences "
        "of different lengths follow each other, and cu_seqlens_q and cu_seqlens_k hold "
        "where they begin",
    )
    dim_v: Literal[0, 64, 128] = knob(
        default=0,
        name="v{}",
        later=True,
        doc="head dimension of v and of the output; 0, or the value of `dim`: that of q and k",
    )

    def __post_init__(self) -> None:
        """An operation whose tensors all have one dimension has one form."""
        if self.dim_v == self.dim:
            object.__setattr__(self, "dim_v", 0)

    def reasons_of_dims(self, pairs: tuple[tuple[int, int], ...]) -> list[str]:
        """Why v may not have another dimension than q and k; `pairs` are those that it may."""
        if (self.dim, self.dim_v) in pairs:
            return []
        named = " or ".join(f"{dim} and {dim_v}" for dim, dim_v in pairs)
        return [
            f"dim {self.dim} with dim_v {self.dim_v}: where they differ they must be {named}; "
            "kernels fill with zeros what tensors have less"
        ]

    @property
    def value_dim(self) -> int:
        """The head dimension of v and of the output."""
        return self.dim_v or self.dim

    @property
    def caps(self) -> bool:
        """Whether scores are bent before anything is added to them."""
        return any(modifier.caps for modifier in self.modifiers)

    @property
    def scored(self) -> bool:
        """Whether scores are changed between the products and the mask."""
        return any(modifier.adds or modifier.hides for modifier in self.modifiers)

    @property
    def staged(self) -> bool:
        """Whether what changes scores comes by shared memory: a bias of 16 bits, or a mask."""
        return any(modifier.staged_bytes for modifier in self.modifiers)

    @property
    def trims(self) -> bool:
        """Whether tiles that a mask of keys hides are left out."""
        return any(modifier.trims for modifier in self.modifiers)

    @property
    def mask_alone(self) -> bool:
        """Whether a mask is all that changes scores."""
        return self.hides and not any(modifier.adds for modifier in self.modifiers)

    @property
    def placed(self) -> bool:
        """Whether what is added to a score depends on its row or column."""
        return any(modifier.placed for modifier in self.modifiers)

    @property
    def leans(self) -> bool:
        """Whether all that changes scores falls or rises evenly on a side of the diagonal."""
        changing = [one for one in self.modifiers if one.adds or one.hides]
        return bool(changing) and all(modifier.leans for modifier in changing)

    @property
    def hides(self) -> bool:
        """Whether any score may be left out, wherever it is."""
        return any(modifier.hides for modifier in self.modifiers)

    @property
    def column(self) -> bool:
        """Whether rows have a sum without a key, too."""
        return any(modifier.column for modifier in self.modifiers)

    @property
    def masks_rows(self) -> bool:
        """Whether a row of a tile that is worked on may be fully masked."""
        empty = self.lengths == "packed" and self.column  # a sequence without keys
        return self.mask != "none" or self.hides or self.blocks or empty

    @property
    def eight(self) -> bool:
        """Whether q and k are of 8 bits, which forward passes take."""
        return False

    def element_of(self, tensor: str) -> Element:
        """The type of an operand."""
        return element(self.element)

    @property
    def family(self) -> str:
        """The name of the family."""
        raise NotImplementedError
