"""Encodes the tensor maps that a launch asks for, at the addresses of a call."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from warploom.errors import ProblemError
from warploom.generator.tensor_maps import PITCH_BYTES, TensorMap, readable
from warploom.runtime.driver import check

_SWIZZLES = {
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    16: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
}
_PROMOTIONS = {
    0: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
    64: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    128: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    256: driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
}
_BYTES = 128  # sizeof(CUtensorMap)


def encode(request: TensorMap, pointer: int) -> bytes:
    """Return the 128 bytes of the tensor map of `request` over the tensor at `pointer`.

    Raises ProblemError where TMA cannot address the tensor; dispatch never asks for that.
    """
    if not readable(pointer, *request.pitches) or min(request.extents) < 1:
        raise ProblemError(
            f"{request.tensor} at {pointer:#x}, pitches {request.pitches} bytes, "
            f"extents {request.extents}",
            rule=f"TMA needs address and pitches in multiples of {PITCH_BYTES} bytes, none empty",
            fix="pad the rows, or leave `spec` out so that a fitting kernel is chosen",
        )
    data_type = getattr(
        driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{request.element.tensor_map}"
    )
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            data_type,
            len(request.extents),
            pointer,
            [driver.cuuint64_t(extent) for extent in request.extents],
            [driver.cuuint64_t(pitch) for pitch in request.pitches],
            [driver.cuuint32_t(extent) for extent in request.box],
            [driver.cuuint32_t(1)] * len(request.extents),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            _SWIZZLES[request.span],
            _PROMOTIONS[request.promotion],
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), _BYTES)
