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
_BYTES = 128  # sizeof(CUtensorMap)


def encode(request: TensorMap, pointer: int) -> bytes:
    """Return the 128 bytes of the tensor map of `request` over the matrix at `pointer`.

    Raises ProblemError where TMA cannot address the matrix; dispatch never asks for that.
    """
    if not readable(pointer, request.pitch_bytes) or min(request.extents) < 1:
        raise ProblemError(
            f"{request.tensor} at {pointer:#x}, pitch {request.pitch_bytes} bytes, "
            f"extents {request.extents}",
            rule=f"TMA needs address and pitch in multiples of {PITCH_BYTES} bytes, none empty",
            fix="pad the rows, or leave `spec` out so that a fitting kernel is chosen",
        )
    data_type = getattr(
        driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{request.element.tensor_map}"
    )
    tensor_map = check(
        driver.cuTensorMapEncodeTiled(
            data_type,
            2,
            pointer,
            [driver.cuuint64_t(extent) for extent in request.extents],
            [driver.cuuint64_t(request.pitch_bytes)],
            [driver.cuuint32_t(extent) for extent in request.box],
            [driver.cuuint32_t(1)] * 2,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            _SWIZZLES[request.span],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(tensor_map.getPtr(), _BYTES)
