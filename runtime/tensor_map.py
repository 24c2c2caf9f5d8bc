"""Encodes the tensor maps that a launch asks for, at the addresses of a call."""

from __future__ import annotations

import ctypes

from cuda.bindings import driver

from warploom.errors import ProblemError
from warploom.generator.tensor_maps import LARGEST_EXTENT, PITCH_BYTES, PITCH_END, TensorMap
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

    Raises ProblemError where TMA cannot address the tensor; dispatch never asks for that, but for
    extents and pitches that are too large.
    """
    if not request.fits(pointer):
        raise _refused(request, pointer)
    data_type = getattr(
        driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{request.element.tensor_map}"
    )
    result = driver.cuTensorMapEncodeTiled(
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
    if result[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # whatever else TMA does not take
        raise _refused(request, pointer)
    return ctypes.string_at(check(result).getPtr(), _BYTES)


def replace(request: TensorMap, place: int, pointer: int) -> None:
    """Let the tensor map of `request` that lies at the address `place` be one of `pointer`.

    Its bytes are then those of `encode`, at a small part of the host's time. Raises ProblemError
    where TMA cannot address the tensor there.
    """
    if pointer % PITCH_BYTES:  # all else that `fits` asks does not depend on the address
        raise _refused(request, pointer)
    result = driver.cuTensorMapReplaceAddress(driver.CUtensorMap(place), pointer)
    if result[0]:  # the driver's success is 0
        if result[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE:
            raise _refused(request, pointer)
        check(result)


def _refused(request: TensorMap, pointer: int) -> ProblemError:
    return ProblemError(
        f"{request.tensor} at {pointer:#x}, pitches {request.pitches} bytes, "
        f"extents {request.extents}",
        rule=f"must be as TMA takes it: address and pitches multiples of {PITCH_BYTES} bytes, "
        f"pitches below {PITCH_END} bytes, extents of 1 to {LARGEST_EXTENT}",
        fix="pad the rows or copy the tensor to smaller strides; leave `spec` out so that a "
        "fitting kernel is chosen",
    )
