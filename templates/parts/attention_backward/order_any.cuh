// Which of the block's steps adds to dq before another block's is left to chance.
__device__ __forceinline__ int number(const Parameters&, SharedStorage&) { return blockIdx.x; }

// The q tile in place n of [begin, end).
__device__ __forceinline__ int walk(const Work&, int n) { return n; }
