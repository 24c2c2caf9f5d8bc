// Raises a scalar in device memory to the largest magnitude that passes here; NaN outdoes every number.
struct Amax {
  float* amax;
  float largest = 0.f;  // of this thread
  __device__ __forceinline__ Amax(float* amax) : amax(amax) {}

  // What lies outside of D [m, n] does not count.
  __device__ __forceinline__ void apply(float (&x)[2][2], const Coordinates& at, int m, int n) {
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      int column = at.column[i % 2];
      asm volatile("" : "+r"(column));  // else comparisons are kept for the next 64 rows, and spill
      const bool inside = at.row[i / 2] < m && column < n;
      const float magnitude = inside ? fabsf(x[i / 2][i % 2]) : 0.f;
      asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(magnitude));
    }
  }

  // Magnitudes order like their bits, and the largest is the same in whatever order they come. Signed, so
  // that a scalar that starts below 0, or from -0, is raised too.
  __device__ __forceinline__ void finish() const {
    const int bits = __reduce_max_sync(~0u, __float_as_int(largest));
    if (threadIdx.x % 32 == 0) atomicMax(reinterpret_cast<int*>(amax), bits);
  }
};
