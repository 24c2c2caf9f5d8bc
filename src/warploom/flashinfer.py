"""FlashInfer's wrappers of batch decode on Warploom's kernels: change the import, and nothing else.

from warploom.flashinfer import BatchDecodeWithPagedKVCacheWrapper
"""

from warploom.integrations.flashinfer import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
]
