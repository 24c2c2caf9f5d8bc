"""A product with weights of few bits as a user names it: which result is computed.

A [M, K] is row-major; W [N, K] lies in slabs (generator/slabs.py), as a torch weight does in rows:
D = epilogue(A W'). C and D are row-major.
"""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import Element, element
from warploom.generator.epilogue import EpilogueStep
from warploom.generator.families._product import ProductOperation
from warploom.generator.formats import (
    STEPS,
    Activations,
    WeightFormat,
    activations_of,
    weight_format,
)
from warploom.generator.knob import frozen, knob
from warploom.generator.slabs import DEPTH, SlabLayout

Input = Literal["fp16", "bf16", "e4m3", "int8"]
Format = Literal["int4", "uint4", "int8", "e4m3", "mxfp4", "mxfp8", "nvfp4", "int2", "ternary"]
Output = Literal["fp16", "bf16", "fp32", "e4m3", "e5m2", "int8"]
Scales = Literal["fp16", "bf16", "fp32", "e8m0", "e4m3"]
Groups = Literal["none", "rows"]


@frozen
class MixedGemmOperation(ProductOperation):
    """What is computed: D = epilogue(A W^T), where W is scale * (code - zero point).

    Accumulators are fp32. Code minus zero point is exact. For 16-bit activations, `scaled` of
    the schedule says whether scales multiply the accumulators of a group, or the weights, which
    are then rounded. For 8-bit activations the tensor core accumulates each group, int8 in
    int32, and the sums are scaled and added up in fp32; with scales per channel, e4m3 is added
    up in fp32 for each 128 of K, and int8 only after all of K.
    """

    a: Input = knob(name="{}_{}_{}", doc="element type of A [M, K]")
    b: Format = knob(
        name="",
        doc="format of W [N, K]; activations in e4m3 take int4, uint4, e4m3, mxfp4 and mxfp8; "
        "those in int8 take int4, uint4, int8, int2 and ternary, whose codes they "
        "represent exactly",
    )
    d: Output = knob(name="", doc="element type of D [M, N]")
    group: Literal[0, 16, 32, 64, 128] = knob(
        name="g{}_{}",
        doc="values along K that share a scale and a zero point; 0: all of K, one scale per "
        "channel",
    )
    scale: Scales = knob(
        name="", doc="element type of the scales: e8m0 for mxfp4 and mxfp8, e4m3 for nvfp4"
    )
    epilogue: tuple[EpilogueStep, ...] = knob(
        default=(),
        doc="up to 8 steps that are applied to the accumulators, in order, before D is stored",
    )
    groups: Groups = knob(
        default="none",
        name="groups_{}",
        later=True,
        doc="rows: grouped GEMM, as in a mixture of experts: the rows of A [S, K] and of D [S, N] "
        "are divided into groups, which end at offsets in device memory, each with its own "
        "matrix of W [G, N, K]",
    )
    family: Literal["mixed_gemm"] = knob(default="mixed_gemm", doc="the kernel family")

    @property
    def batched(self) -> bool:
        """Groups have operands of their own, as batches have."""
        return self.groups == "rows"

    @property
    def by_rows(self) -> bool:
        """Whether its batches are groups of D's rows, each with a W, wherever these begin."""
        return self.batched

    @property
    def accumulator(self) -> Element:
        """The element type of a tile's sums, which those of groups are added to."""
        return element("fp32")

    @property
    def promoted(self) -> int:
        """The k that the tensor core adds up, where scales do not depend on it: a group, or, of
        8-bit floats, whose accumulators keep few bits, 128 of k at most. 0: all of it.
        """
        return self.group or (DEPTH if element(self.a).is_fp8 else 0)

    @property
    def step(self) -> int:
        """The k of one wgmma, which packed weights are in order for."""
        return STEPS[self.activations]

    @property
    def activations(self) -> Activations:
        """What packed weights are in order for."""
        return activations_of(self.a)

    @property
    def weight(self) -> WeightFormat:
        """The row of W's format."""
        return weight_format(self.b)

    @property
    def slab(self) -> SlabLayout:
        """How W lies; SpecificationError where the format is not packed so."""
        return SlabLayout(self.b, self.group or None, self.scale, self.activations)
