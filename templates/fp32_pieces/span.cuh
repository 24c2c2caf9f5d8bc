// ---- Whether two fp16 pieces hold the values of all rows ------------------------------------------------
// How many values of a row are small, below 2^-7 of its largest, and how many are lost: their pieces lack bits.
struct Counts {
  int small = 0, lost = 0;

  __device__ __forceinline__ void add(float scaled, float left, float level) {
    small += fabsf(scaled) < level;
    lost += left != 0.f && fabsf(scaled) < 0.25f;  // of a larger one the pieces miss at most 2^-23
  }
};

// The threshold of a row's small values: 2^-7 times its largest magnitude rounded down to a power of two.
__device__ __forceinline__ float small_level(uint32_t peak, float factor) {
  const float scaled = __uint_as_float(peak) * factor;  // 2^-23 or more
  return peak == 0 ? 0.f : __uint_as_float((__float_as_uint(scaled) & 0x7f800000) - (7 << 23));
}

// Raises the maxima over all rows to the counts of some rows. The last of the launch's `calls` writes them to p.span,
// from which GEMMs decide whether the one of fp16 or that of bf16 pieces computes D, and clears them.
__device__ __forceinline__ void raise_span(const Parameters& p, uint32_t most, uint32_t most_lost, uint32_t calls) {
  atomicMax(p.maxima, most);
  if (most_lost > 0) atomicMax(p.maxima + 1, most_lost);
  __threadfence();
  if (atomicAdd(p.maxima + 2, 1u) + 1 < calls) return;
  __threadfence();
  p.span[0] = atomicExch(p.maxima, 0u);
  p.span[1] = atomicExch(p.maxima + 1, 0u);
  p.span[2] = uint32_t(p.k);
  p.span[3] = 0;
  p.maxima[2] = 0;
}
