// The q tile in place n of [begin, end). Nothing decides which of two CTAs adds to the dq of one q tile first.
__device__ __forceinline__ int walk(const Parameters&, const Work&, int n) { return n; }
