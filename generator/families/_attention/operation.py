"""What the operations of both passes share."""

from __future__ import annotations

from typing import Literal, get_args

from warploom.generator.knob import frozen, knob

Dim = Literal[32, 64, 96, 128, 192, 256]
DIMS: tuple[int, ...] = get_args(Dim)


@frozen
class Operation:
    """The operation of either pass."""

    element: Literal["fp16", "bf16"] = knob(doc="of all tensors; sums are fp32")
    dim: Dim = knob(name="dim{}", doc="of a head; a kernel serves any multiple of 8 up to it")
    mask: Literal["none", "causal", "window"] = knob(
        default="none",
        doc="none; causal: column <= row + right; window: row - left <= column <= row + right",
    )
    softcap: bool = knob(default=False, doc="s = softcap * tanh(s / softcap) before the softmax")
    lengths: Literal["fixed", "packed"] = knob(
        default="fixed",
        doc="fixed: every sequence is seq_q by seq_k; packed: cu_seqlens_q and cu_seqlens_k say",
    )
    sinks: Literal["none", "same", "fp32"] = knob(
        default="none",
        name="sinks_{}",
        later=True,
        doc="a score of each query head that counts in the sum, with no value; same: of q's type",
    )
    blocks: bool = knob(
        default=False,
        later=True,
        doc="only tiles that lists name are worked on, of which some have a mask of bits",
    )
    alibi: bool = knob(
        default=False,
        later=True,
        doc="-slope abs(row + seq_k - seq_q - column) is added to scores, by slopes of heads",
    )
    bias: Literal["none", "fp16", "bf16", "fp32"] = knob(
        default="none",
        name="bias_{}",
        later=True,
        doc="a number for each score that is added to it, by its element type",
    )
    masked: bool = knob(
        default=False, later=True, doc="a truth value for each score: those of false do not count"
    )
    dropout: bool = knob(
        default=False,
        later=True,
        doc="weights are dropped behind the softmax, those that are kept divided by `keep`",
    )

    @property
    def scored(self) -> bool:
        """Whether scores are changed between the products and the mask."""
        return self.alibi or self.bias != "none" or self.masked

    @property
    def staged(self) -> bool:
        """Whether what changes scores comes by shared memory: a bias of 16 bits, or a mask."""
        return self.bias in ("fp16", "bf16") or self.masked

    @property
    def trims(self) -> bool:
        """Whether tiles that a mask of keys hides are left out."""
        return self.masked

    @property
    def mask_alone(self) -> bool:
        """Whether a mask is all that changes scores."""
        return self.masked and self.bias == "none" and not self.alibi

    @property
    def hides(self) -> bool:
        """Whether any score may be left out, wherever it is."""
        return self.bias != "none" or self.masked

    @property
    def masks_rows(self) -> bool:
        """Whether a row of a tile that is worked on may be fully masked."""
        empty = self.lengths == "packed" and self.sinks != "none"  # a sequence without keys
        return self.mask != "none" or self.hides or self.blocks or empty

    @property
    def family(self) -> str:
        """The name of the family."""
        raise NotImplementedError
