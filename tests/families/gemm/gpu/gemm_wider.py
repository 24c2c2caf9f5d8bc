"""More kernels that gpu tests run: of wider operations, and that share out k, a tile or batches."""

from __future__ import annotations

from gemm_cases import (
    BACKWARD,
    EPILOGUES,
    FORWARD,
    LAYOUTS,
    ORDERS,
    QUANTISED,
    SCALES,
    SCHEDULES,
    SIMPLE,
    SPLIT,
    STORES,
    TWICE,
    TYPES,
    spec,
)
from gemm_chosen import CHOSEN

from warploom.generator.epilogue import (
    STEPS,
    Activation,
    Amax,
    Bias,
    ColumnSum,
    Gate,
    GateGradient,
    MeanSquare,
    Preactivation,
    Quantize,
    Residual,
    RmsScale,
    Scale,
    StochasticRounding,
)

TRAINED = [
    spec(tile, epilogue=steps, **others)
    for steps in (FORWARD, BACKWARD, TWICE)
    for tile, others in (
        ((128, 128), {"kernel_schedule": "pingpong", "cluster": (2, 1)}),
        ((128, 256), {"store": "direct"}),
        ((256, 96), {"cluster": (1, 2), "raster": "along_n", "swizzle_size": 3}),
        ((64, 24), {"consumers": 1, "d": "fp32"}),
        (
            (64, 176),
            {"kernel_schedule": "pingpong", "a": "fp16", "d": "fp16", "layouts": "col row"},
        ),
        ((128, 128), {"a": "e4m3", "d": "e5m2"}),
        ((128, 96), {"a": "e4m3", "b": "e5m2", "accumulation": "promoted"}),
        ((128, 96), {"a": "int8", "store": "direct"}),
        ((128, 96), {"cluster_split_k": 3}),
        ((64, 64), {"cluster_split_k": 8, "consumers": 1, "store": "direct"}),
        ((64, 64), {"cluster_split_k": 4, "swap_ab": True, "consumers": 1}),
        ((16, 64), {"swap_ab": True, "consumers": 1}),
        ((8, 64), {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((32, 128), {"swap_ab": True, "kernel_schedule": "pingpong", "stages": 3}),
        ((64, 128), {"swap_ab": True, "cluster": (1, 2)}),
    )
]
OUTPUTS = [
    *(
        spec((128, 96), a=a, d=d, store=store, epilogue=epilogue)
        for a in ("bf16", "e4m3", "int8")
        for d in ("e4m3", "e5m2", "int8")
        for store, epilogue in (("tma", QUANTISED), ("direct", QUANTISED), ("tma", ()))
    ),
    *(
        spec((128, 128), a=a, d=d, kernel_schedule="pingpong", cluster=(2, 1), epilogue=QUANTISED)
        for a, d in (("bf16", "e4m3"), ("e4m3", "e4m3"), ("int8", "int8"), ("bf16", "bf16"))
    ),
    spec((128, 256), a="e4m3", d="e4m3", cluster=(2, 1), epilogue=QUANTISED),
]

PROMOTED = [
    spec(tile, a=a, b=b, d=d, accumulation="promoted", **others)
    for tile, a, b, d, others in (
        ((128, 160), "e4m3", "e4m3", "bf16", {"cluster": (2, 1)}),
        ((128, 128), "e4m3", "e5m2", "fp32", {"cluster": (1, 2), "raster": "along_n"}),
        ((64, 64), "e5m2", "e4m3", "bf16", {"consumers": 1, "store": "direct"}),
        ((256, 64), "e4m3", "e4m3", "fp16", {}),
        ((256, 128), "e4m3", "e4m3", "bf16", {"cluster": (1, 2)}),
        ((256, 128), "e4m3", "e5m2", "fp16", {"epilogue": ORDERS["layer"]}),
        ((64, 96), "e4m3", "e4m3", "bf16", {"kernel_schedule": "pingpong"}),
        ((128, 96), "e4m3", "e4m3", "bf16", {"epilogue": ORDERS["layer"]}),
        ((32, 128), "e4m3", "e5m2", "bf16", {"swap_ab": True}),
    )
]

_SCALES = {
    "128": ("row_block", "fp32", "fp32"),
    "e8m0": ("row_block", "e8m0", "e8m0"),
    "row": ("row_row", "fp32", "fp32"),
    "mixed": ("row_row", "fp32", "e8m0"),
}
SCALED = [
    spec(tile, scales=_SCALES[scales], **{"a": "e4m3", **others})
    for tile, scales, others in (
        ((128, 128), "128", {}),
        ((128, 128), "128", {"cluster": (2, 1), "d": "fp32"}),
        ((128, 160), "128", {"cluster": (1, 2), "raster": "along_n"}),
        ((128, 96), "128", {"epilogue": ORDERS["layer"]}),
        ((128, 128), "128", {"store": "direct", "stages": 3, "epilogue": ORDERS["vectors"]}),
        ((128, 128), "128", {"cluster": (2, 2), "d": "fp16"}),
        ((64, 128), "128", {"kernel_schedule": "pingpong", "cluster": (2, 1)}),
        ((64, 144), "128", {"kernel_schedule": "pingpong", "stages": 3, "b": "e5m2"}),
        ((256, 64), "128", {}),
        ((256, 128), "128", {"cluster": (2, 1)}),
        ((256, 128), "row", {}),
        ((64, 32), "128", {"consumers": 1}),
        ((64, 96), "128", {"consumers": 1, "cluster_split_k": 4, "l2_promotion": 128}),
        ((128, 64), "128", {"cluster_split_k": 2}),
        ((128, 128), "128", {"split_k": 3}),
        ((128, 128), "128", {"stream_k": True}),
        ((16, 64), "128", {"swap_ab": True, "consumers": 1}),
        ((32, 128), "128", {"swap_ab": True, "consumers": 1, "l2_promotion": 128}),
        ((64, 128), "128", {"swap_ab": True, "store": "direct"}),
        ((48, 64), "128", {"swap_ab": True, "consumers": 1, "cluster_split_k": 3}),
        ((96, 128), "128", {"swap_ab": True, "split_k": 4}),
        ((128, 128), "e8m0", {}),
        ((64, 64), "e8m0", {"swap_ab": True, "consumers": 1}),
        ((128, 128), "row", {"d": "fp32"}),
        ((64, 96), "row", {"kernel_schedule": "pingpong"}),
        ((64, 64), "row", {"swap_ab": True, "consumers": 1, "cluster_split_k": 2}),
        ((128, 64), "mixed", {"a": "e5m2", "b": "e4m3"}),
        # Gates: up has scales of its own, which begin anywhere in a block.
        ((128, 128), "128", {"epilogue": (Gate("silu"),)}),
        ((256, 128), "128", {"epilogue": (Gate("silu"),), "cluster": (1, 2)}),
        ((64, 128), "128", {"epilogue": (Bias("bf16"), Gate("gelu")), "consumers": 1}),
        ((128, 32), "e8m0", {"epilogue": (Gate("relu"),), "stream_k": True}),
        ((64, 64), "128", {"epilogue": (Gate("silu"),), "consumers": 1, "split_k": 3}),
        ((16, 64), "128", {"epilogue": (Gate("silu"),), "swap_ab": True, "consumers": 1}),
        ((32, 128), "128", {"epilogue": (Bias("bf16"), Gate("silu")), "swap_ab": True}),
        ((96, 128), "e8m0", {"epilogue": (Gate("silu"),), "swap_ab": True, "split_k": 2}),
        ((64, 96), "128", {"epilogue": (Gate("swiglu_oai", "interleaved"),), "consumers": 1}),
        (
            (64, 64),
            "128",
            {"epilogue": (Gate("silu", "interleaved"),), "swap_ab": True, "consumers": 1},
        ),
    )
]
SCALED_BATCHED = [
    spec((128, 128), a="e4m3", scales=_SCALES["128"], batched=True),
    spec((64, 64), a="e4m3", scales=_SCALES["row"], batched=True, swap_ab=True, consumers=1),
]

SWAPPED = [
    spec(tile, swap_ab=True, **others)
    for tile, others in (
        ((8, 64), {"consumers": 1, "store": "direct"}),
        ((16, 64), {"consumers": 1}),
        ((24, 128), {"store": "direct", "a": "fp16", "cluster": (2, 1)}),
        ((32, 64), {"consumers": 1, "cluster": (1, 2), "raster": "along_n", "swizzle_size": 3}),
        ((48, 128), {"kernel_schedule": "pingpong", "stages": 3}),
        ((64, 256), {"cluster": (2, 1), "l2_promotion": 128}),
        ((128, 64), {"kernel_schedule": "pingpong", "producer_registers": 24, "swizzle_size": 1}),
        ((256, 128), {"layouts": "col row"}),
        ((64, 128), {"layouts": "row row", "a": "fp16"}),
        ((16, 128), {"a": "e4m3", "l2_promotion": 64}),
        ((32, 128), {"a": "int8", "store": "direct"}),
        (
            (64, 64),
            {"a": "e4m3", "d": "e4m3", "consumers": 1, "store": "direct", "epilogue": QUANTISED},
        ),
        ((64, 64), {"d": "fp32", "consumers": 1, "store": "direct", "epilogue": ORDERS["twice"]}),
        ((32, 128), {"epilogue": ORDERS["vectors"]}),
        ((64, 128), {"epilogue": ORDERS["layer"], "kernel_schedule": "pingpong"}),
        ((24, 64), {"epilogue": ORDERS["six"], "consumers": 1, "store": "direct"}),
        ((16, 64), {"epilogue": QUANTISED, "consumers": 1}),
        *(
            ((16, 64), {"epilogue": (step,), "consumers": 1, "store": store})
            for step in STEPS
            if not isinstance(step, Quantize)  # which has tiles of its own: SCALED
            for store in STORES
        ),
    )
]

BATCHED = [
    spec(tile, batched=True, **others)
    for tile, others in (
        ((128, 128), {"cluster": (2, 1), "kernel_schedule": "pingpong"}),
        ((128, 96), {"store": "direct", "epilogue": ORDERS["vectors"]}),
        ((64, 96), {"consumers": 1, "epilogue": ORDERS["twice"], "raster": "along_n"}),
        ((128, 128), {"layouts": "col row", "cluster": (1, 2)}),
        ((64, 128), {"swap_ab": True, "epilogue": ORDERS["layer"]}),
        ((32, 64), {"swap_ab": True, "layouts": "row row", "consumers": 1, "store": "direct"}),
        ((128, 96), {"a": "e4m3", "accumulation": "promoted", "epilogue": (*SCALES, *QUANTISED)}),
        ((128, 64), {"a": "int8"}),
        ((128, 96), {"epilogue": FORWARD}),
        ((128, 128), {"epilogue": BACKWARD, "kernel_schedule": "pingpong", "cluster": (2, 1)}),
        ((64, 96), {"epilogue": TWICE, "consumers": 1, "store": "direct"}),
        ((32, 64), {"epilogue": TWICE, "swap_ab": True, "consumers": 1}),
        ((64, 64), {"epilogue": BACKWARD, "cluster_split_k": 4, "consumers": 1}),
    )
]
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "one": ((), ()),
    "each": ((3,), (3,)),
    "one B": ((3,), (1,)),
    "one A": ((), (5,)),
    "repeated": ((2, 1), (1, 3)),
    "wrapped": ((3,), (2, 3)),
    "inner": ((2, 3), (2, 1)),
}

# Clusters that share tiles beside blocks that do, every way to hold and to finish what they have;
# only who finishes a tile has its epilogue.
STREAMED = [
    spec(tile, stream_k=True, **others)
    for tile, others in (
        ((128, 256), {"cluster": (2, 1)}),
        ((256, 128), {"cluster": (1, 2), "raster": "along_n", "swizzle_size": 3}),
        ((128, 128), {}),
        ((128, 176), {"store": "direct", "stages": 2}),
        ((64, 8), {"consumers": 1, "stages": 2}),
        ((64, 96), {"a": "fp16", "d": "fp32", "layouts": "col row", "consumers": 1}),
        ((192, 128), {"swap_ab": True}),
        ((16, 64), {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((64, 256), {"cluster_split_k": 8, "consumers": 1}),
        ((64, 64), {"cluster_split_k": 8, "consumers": 1, "store": "direct"}),
        ((128, 96), {"cluster_split_k": 3, "a": "fp16"}),
        ((128, 128), {"cluster_split_k": 2, "swizzle_size": 1}),
        ((64, 64), {"cluster_split_k": 4, "swap_ab": True, "consumers": 1}),
        ((128, 256), {"a": "int8", "cluster": (1, 2)}),
        ((128, 128), {"a": "int8", "cluster_split_k": 4, "store": "direct"}),
        ((128, 256), {"a": "e4m3", "cluster": (2, 1)}),
        ((128, 128), {"a": "e4m3", "b": "e5m2", "accumulation": "promoted", "cluster": (2, 1)}),
        ((128, 64), {"a": "e4m3", "accumulation": "promoted", "cluster_split_k": 4}),
        ((128, 256), {"epilogue": ORDERS["layer"], "cluster": (2, 1)}),
        ((128, 96), {"epilogue": (Scale("host"), Amax(), Residual("bf16"))}),
        ((128, 128), {"epilogue": FORWARD, "cluster": (2, 1)}),
        ((128, 96), {"epilogue": BACKWARD, "cluster_split_k": 3}),
        ((64, 64), {"epilogue": TWICE, "swap_ab": True, "consumers": 1}),
        ((128, 96), {"epilogue": QUANTISED, "a": "e4m3", "d": "e4m3"}),
        ((128, 128), {"batched": True}),
        ((128, 96), {"epilogue": ORDERS["vectors"], "batched": True, "store": "direct"}),
        ((64, 64), {"epilogue": BACKWARD, "batched": True, "cluster_split_k": 4, "consumers": 1}),
        ((128, 128), {"cluster": (4, 1)}),
        ((64, 88), {"cluster": (2, 4), "consumers": 1}),
        ((192, 64), {"cluster": (1, 8), "swap_ab": True, "consumers": 1, "store": "direct"}),
    )
]

# Parts of k that a second launch adds up: it alone has the epilogue, in chunks of its own.
REDUCED = [
    spec(tile, split_k=parts, **others)
    for tile, parts, others in (
        ((128, 128), 4, {}),
        ((128, 256), 2, {"cluster": (2, 1)}),
        ((256, 128), 3, {"cluster": (1, 2), "raster": "along_n", "swizzle_size": 3}),
        ((64, 64), 10, {"consumers": 1, "l2_promotion": 128}),
        ((64, 8), 32, {"consumers": 1, "stages": 2, "store": "direct"}),
        ((64, 48), 5, {"consumers": 1, "cluster": (4, 1)}),
        ((128, 176), 3, {"store": "direct", "stages": 2}),
        ((64, 88), 7, {"consumers": 1, "cluster": (2, 4), "store": "direct"}),
        ((64, 96), 6, {"a": "fp16", "d": "fp32", "layouts": "col row", "consumers": 1}),
        ((128, 96), 2, {"a": "fp16", "layouts": "row row"}),
        ((192, 128), 3, {"swap_ab": True}),
        ((48, 64), 8, {"swap_ab": True, "consumers": 1}),
        ((16, 64), 16, {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((128, 256), 4, {"a": "int8", "cluster": (1, 2)}),
        ((128, 64), 9, {"a": "int8", "store": "direct", "epilogue": SCALES}),
        ((128, 128), 4, {"a": "e4m3", "epilogue": SCALES}),
        ((64, 128), 6, {"a": "e4m3", "consumers": 1, "epilogue": (Scale("device"),) * 2}),
        ((96, 128), 5, {"a": "e4m3", "swap_ab": True}),
        ((128, 128), 2, {"a": "e4m3", "b": "e5m2", "accumulation": "promoted", "cluster": (2, 1)}),
        ((128, 256), 2, {"epilogue": ORDERS["layer"], "cluster": (2, 1)}),
        ((128, 96), 3, {"epilogue": ORDERS["vectors"], "store": "direct"}),
        ((128, 96), 4, {"epilogue": ORDERS["twice"], "d": "fp32"}),
        ((128, 96), 3, {"epilogue": (Scale("host"), Amax(), Residual("bf16"))}),
        ((128, 128), 5, {"epilogue": FORWARD, "cluster": (2, 1)}),
        ((128, 96), 3, {"epilogue": BACKWARD}),
        ((64, 64), 4, {"epilogue": TWICE, "swap_ab": True, "consumers": 1}),
        ((128, 96), 2, {"epilogue": QUANTISED, "a": "e4m3", "d": "e4m3"}),
        ((64, 64), 6, {"epilogue": QUANTISED, "a": "int8", "d": "int8", "consumers": 1}),
        ((128, 128), 3, {"batched": True}),
        ((128, 96), 4, {"epilogue": ORDERS["vectors"], "batched": True, "store": "direct"}),
        ((64, 64), 5, {"epilogue": BACKWARD, "batched": True, "consumers": 1}),
        ((32, 64), 4, {"epilogue": TWICE, "batched": True, "swap_ab": True, "consumers": 1}),
    )
]

# Gate and up in one thread: as columns of wgmma or, swapped, as its rows; steps before and behind.
BIASED = (Bias("bf16"), Gate("silu"))
INTERLEAVED = (Bias("bf16"), Gate("swiglu_oai", "interleaved"))
AROUND = (Bias("fp32"), Preactivation("bf16"), Gate("gelu"), Scale("device"), Residual("bf16"))
STORED = (Preactivation("fp32"), Gate("gelu_tanh", "interleaved"), Amax(), Preactivation("bf16"))
GATED = [
    spec(tile, epilogue=steps, **others)
    for tile, steps, others in (
        ((128, 256), BIASED, {"cluster": (2, 1)}),
        ((128, 256), INTERLEAVED, {"cluster": (1, 2), "raster": "along_n", "swizzle_size": 3}),
        ((128, 128), BIASED, {"kernel_schedule": "pingpong", "cluster": (2, 2)}),
        ((128, 128), AROUND, {"kernel_schedule": "pingpong"}),
        ((128, 128), STORED, {"cluster": (2, 1)}),
        ((64, 256), INTERLEAVED, {"kernel_schedule": "pingpong", "store": "direct"}),
        ((256, 96), (Gate("relu"),), {"a": "fp16", "cluster": (2, 1)}),
        ((64, 16), BIASED, {"consumers": 1, "stages": 2}),
        ((64, 48), STORED, {"consumers": 1, "store": "direct", "d": "fp32"}),
        ((64, 176), AROUND, {"kernel_schedule": "pingpong", "layouts": "col col", "a": "fp16"}),
        ((128, 96), (*SCALES, *BIASED), {"a": "e4m3"}),
        ((128, 96), (*SCALES, Gate("silu")), {"a": "e4m3", "accumulation": "promoted"}),
        ((128, 128), (*SCALES, Gate("gelu"), *QUANTISED), {"a": "e4m3", "d": "e4m3"}),
        ((128, 64), (*SCALES, *INTERLEAVED), {"a": "int8"}),
        ((64, 64), BIASED, {"consumers": 1, "cluster_split_k": 4}),
        ((128, 96), STORED, {"cluster_split_k": 3}),
        ((64, 128), INTERLEAVED, {"consumers": 1, "cluster_split_k": 8, "store": "direct"}),
        ((64, 64), BIASED, {"consumers": 1, "split_k": 5}),
        ((128, 256), AROUND, {"cluster": (2, 1), "split_k": 2}),
        ((128, 96), STORED, {"split_k": 3, "store": "direct"}),
        ((128, 128), BIASED, {"stream_k": True}),
        ((128, 256), STORED, {"stream_k": True, "cluster": (2, 1)}),
        ((128, 128), BIASED, {"batched": True, "kernel_schedule": "pingpong"}),
        ((64, 96), STORED, {"batched": True, "consumers": 1, "store": "direct"}),
        # Swapped: weights are the rows of wgmma.
        ((16, 64), BIASED, {"swap_ab": True, "consumers": 1}),
        ((8, 64), INTERLEAVED, {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((16, 64), STORED, {"swap_ab": True, "consumers": 1}),
        ((32, 128), AROUND, {"swap_ab": True, "kernel_schedule": "pingpong", "stages": 3}),
        ((48, 256), BIASED, {"swap_ab": True, "cluster": (2, 1)}),
        ((64, 128), INTERLEAVED, {"swap_ab": True, "cluster": (1, 2)}),
        ((256, 128), STORED, {"swap_ab": True}),
        ((24, 64), AROUND, {"swap_ab": True, "consumers": 1, "store": "direct", "a": "fp16"}),
        ((32, 128), (*SCALES, *BIASED), {"swap_ab": True, "a": "e4m3"}),
        ((64, 64), BIASED, {"swap_ab": True, "consumers": 1, "cluster_split_k": 4}),
        ((64, 64), STORED, {"swap_ab": True, "consumers": 1, "split_k": 4}),
        ((16, 64), INTERLEAVED, {"swap_ab": True, "consumers": 1, "stream_k": True}),
        ((64, 128), AROUND, {"swap_ab": True, "batched": True}),
    )
]

# The gradient of a gate, each function and layout; what stands before and behind it.
BOTH = (Scale("host"), GateGradient("swiglu_oai", "bf16", "interleaved"), Residual("bf16"))
UNGATED = [
    spec(tile, epilogue=steps, **others)
    for tile, steps, others in (
        (
            (128, 128),
            (GateGradient("silu", "bf16"),),
            {"kernel_schedule": "pingpong", "cluster": (2, 1), "layouts": "row row"},
        ),
        (
            (128, 256),
            (GateGradient("silu", "bf16"),),
            {"cluster": (2, 1), "layouts": "row row"},
        ),
        ((128, 96), BOTH, {"layouts": "row row"}),
        ((128, 96), (GateGradient("gelu", "fp16"), ColumnSum()), {"a": "fp16", "d": "fp16"}),
        ((64, 96), (GateGradient("gelu_tanh", "bf16"),), {"consumers": 1, "d": "fp32"}),
        ((64, 64), (GateGradient("relu", "fp16", "interleaved"),), {"consumers": 1, "a": "fp16"}),
        ((64, 64), (GateGradient("swiglu_oai", "bf16"),), {"consumers": 1, "store": "direct"}),
        ((64, 64), (GateGradient("silu", "bf16", "interleaved"),), {"consumers": 1, "split_k": 4}),
        ((64, 64), (GateGradient("silu", "bf16"),), {"consumers": 1, "cluster_split_k": 4}),
        ((128, 96), (GateGradient("gelu", "bf16"),), {"stream_k": True}),
        ((64, 96), (GateGradient("silu", "bf16"),), {"batched": True, "consumers": 1}),
        ((16, 64), (GateGradient("silu", "bf16"),), {"swap_ab": True, "consumers": 1}),
        ((32, 64), BOTH, {"swap_ab": True, "consumers": 1, "store": "direct"}),
        (
            (32, 64),
            (GateGradient("gelu", "bf16"),),
            {"swap_ab": True, "batched": True, "consumers": 1},
        ),
    )
]

# Blocks of 128 columns of D that have scales: whole in a tile, or cut by the end of D.
QUANTIZED = [
    spec(tile, d="e4m3", epilogue=steps, **others)
    for tile, steps, others in (
        ((128, 128), (Quantize("exact"),), {"kernel_schedule": "pingpong", "cluster": (2, 1)}),
        ((128, 256), (Bias("bf16"), Quantize("pow2")), {"cluster": (2, 1)}),
        ((64, 128), (Bias("fp32"), Residual("bf16"), Quantize("exact")), {"consumers": 1}),
        ((128, 128), (Activation("silu"), Quantize("pow2")), {"store": "direct"}),
        ((128, 256), (*BIASED, Quantize("exact")), {"cluster": (2, 1)}),
        ((64, 256), (*INTERLEAVED, Quantize("pow2")), {"consumers": 1}),
        ((64, 256), (Gate("silu"), Quantize("exact")), {"consumers": 1, "store": "direct"}),
        ((128, 256), (*SCALES, *BIASED, Quantize("exact")), {"a": "e4m3", "cluster": (1, 2)}),
        ((128, 128), (*SCALES, Quantize("exact")), {"a": "e4m3", "accumulation": "promoted"}),
        ((128, 256), (Preactivation("bf16"), Quantize("exact")), {"cluster_split_k": 2}),
        ((128, 256), (Gate("silu"), Quantize("exact")), {"stream_k": True}),
    )
]

# RMSNorm through two epilogues: squares are summed by either side of wgmma, in both launches;
# factors are prepared by one consumer or by all, once or for each tile.
NORMED = (Residual("bf16"), MeanSquare())
SCALED_BY_NORM = (RmsScale(),)
NORMS = [
    spec(tile, epilogue=steps, **others)
    for steps in (NORMED, SCALED_BY_NORM)
    for tile, others in (
        ((128, 128), {"kernel_schedule": "pingpong", "cluster": (2, 1)}),
        ((128, 256), {"cluster": (2, 1)}),
        ((64, 48), {"consumers": 1, "raster": "along_n", "swizzle_size": 3}),
        ((128, 96), {"store": "direct"}),
        ((128, 128), {"a": "fp16", "d": "fp32", "layouts": "col row"}),
        ((128, 128), {"a": "e4m3", "accumulation": "promoted"}),
        ((128, 96), {"cluster_split_k": 3}),
        ((128, 128), {"stream_k": True}),
        ((64, 64), {"consumers": 1, "split_k": 5}),
        ((24, 64), {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((64, 128), {"swap_ab": True}),
        ((32, 128), {"swap_ab": True, "kernel_schedule": "pingpong", "stages": 3}),
        ((64, 64), {"swap_ab": True, "consumers": 1, "cluster_split_k": 4}),
        ((16, 128), {"swap_ab": True, "stream_k": True}),
        ((48, 128), {"swap_ab": True, "split_k": 3}),
    )
]
NORMS += [
    spec((128, 128), epilogue=(RmsScale(), *BIASED), cluster=(2, 1)),
    spec((16, 128), epilogue=(RmsScale(), *BIASED), swap_ab=True, store="direct"),
    spec((128, 96), epilogue=(Scale("row"), Activation("relu"), RmsScale(), MeanSquare())),
]

# D that is rounded at random: exact operations before, so that bits are those of the reference.
# (tile, d, steps, others)
ROUNDED = [
    spec(tile, d=d, epilogue=(*steps, StochasticRounding()), **others)
    for tile, d, steps, others in (
        ((128, 128), "bf16", (), {"kernel_schedule": "pingpong", "cluster": (2, 1)}),
        ((128, 256), "bf16", (Bias("bf16"),), {"cluster": (2, 1)}),
        ((128, 256), "e4m3", (Scale("host"),), {"cluster": (2, 1)}),
        ((128, 128), "e5m2", (Scale("host"),), {"kernel_schedule": "pingpong"}),
        ((128, 96), "fp16", (Scale("host"),), {"a": "fp16"}),
        ((64, 128), "bf16", (Preactivation("fp32"), Activation("relu")), {"consumers": 1}),
        ((64, 128), "e4m3", (Scale("host"),), {"consumers": 1, "store": "direct"}),
        ((128, 24), "bf16", (Scale("host"),), {"store": "direct"}),
        ((64, 64), "bf16", (Scale("host"),), {"consumers": 1, "cluster_split_k": 4}),
        ((128, 128), "bf16", (Scale("host"),), {"stream_k": True}),
        ((128, 128), "e4m3", (Scale("host"),), {"split_k": 3}),
        ((32, 64), "bf16", (Scale("host"),), {"swap_ab": True, "consumers": 1}),
        ((24, 64), "fp16", (), {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((32, 64), "e5m2", (), {"swap_ab": True, "consumers": 1, "store": "direct"}),
        ((96, 128), "bf16", (Scale("host"),), {"swap_ab": True, "split_k": 4}),
        ((128, 256), "bf16", (Gate("relu"),), {"cluster": (2, 1)}),
        ((128, 48), "bf16", (Gate("relu", "interleaved"),), {"store": "direct"}),
        ((16, 64), "bf16", (Gate("relu"),), {"swap_ab": True, "consumers": 1}),
        ((8, 128), "e4m3", (Gate("relu"),), {"swap_ab": True, "store": "direct"}),
    )
]

WIDER = (
    *NORMS,
    *ROUNDED,
    *GATED,
    *UNGATED,
    *QUANTIZED,
    *SCALED,
    *SCALED_BATCHED,
    *TRAINED,
    *OUTPUTS,
    *PROMOTED,
    *SWAPPED,
    *SPLIT,
    *STREAMED,
    *REDUCED,
    *BATCHED,
)
ALL = list(
    dict.fromkeys((*TYPES, *LAYOUTS, *SCHEDULES, *EPILOGUES, *WIDER, *SIMPLE.values(), *CHOSEN))
)
