// The index of the block's work.
__device__ __forceinline__ int number(const Parameters&, SharedStorage&) { return blockIdx.x{{ " / kCluster" if schedule.cluster > 1 }}; }
