// To the dq of a q tile kv tiles add from left to right. Blocks wait for blocks with lower numbers only, and
// take numbers when they begin: so none waits for one that may never begin.
__device__ __forceinline__ int number(const Parameters& p, SharedStorage& shared) {
  if (threadIdx.x == 0) shared.ticket = atomicAdd(p.counter, 1);
  __syncthreads();
  return shared.ticket;
}

// The q tile in place n of [begin, end): from the last on, to which kv tiles further left come as early.
__device__ __forceinline__ int walk(const Work& work, int n) { return work.begin + work.end - 1 - n; }
