// The index of the CTA's work: a ticket, taken when it begins.
__device__ __forceinline__ int number(const Parameters& p, SharedStorage&) { return atomicAdd(p.counter, 1); }
