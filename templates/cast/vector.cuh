// ---- Vectors of x -------------------------------------------------------------------------------------
// The larger one; NaN wins over every number.
__device__ __forceinline__ float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// That of threads whose numbers differ in the lowest bits, of so many threads; all of the warp take part.
template <int kWidth> __device__ __forceinline__ float largest(float value) {
  CUTE_UNROLL
  for (int apart = kWidth / 2; apart > 0; apart /= 2)
    value = larger(value, __shfl_xor_sync(0xffffffff, value, apart));
  return value;
}

// That of a CTA; `shared` has a number for each warp.
template <int kWarps> __device__ __forceinline__ float largest_of_cta(float value, float* shared) {
  value = largest<32>(value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % kWarps];
  return largest<kWarps>(value);
}

// Values of a row that follow each other: those past `count` are zeros.
struct Vector {
  static constexpr int kWords = kValues * sizeof(X) / sizeof(uint4);
  union {
    uint4 words[kWords];
    X values[kValues];
  };

  __device__ __forceinline__ Vector() {}

  __device__ __forceinline__ void load(const X* from, int count, bool aligned) {
    if (aligned && count >= kValues) {
      CUTE_UNROLL
      for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
    } else {
      CUTE_UNROLL
      for (int i = 0; i < kValues; ++i) values[i] = i < count ? from[i] : X(0.f);
    }
  }

  __device__ __forceinline__ float peak() const {
    float peak = fabsf(float(values[0]));
    CUTE_UNROLL
    for (int i = 1; i < kValues; ++i) peak = larger(peak, fabsf(float(values[i])));
    return peak;
  }
};

// Whether 16 bytes of each row can be moved at once.
template <class Element> __device__ __forceinline__ bool aligned(const Element* matrix, int64_t pitch) {
  return (reinterpret_cast<uint64_t>(matrix) | pitch * sizeof(Element)) % sizeof(uint4) == 0;
}

// Writes the first `count` of 16 bytes.
__device__ __forceinline__ void store(uint8_t* to, const uint4& bytes, int count, bool aligned) {
  if (aligned && count >= kValues) {
    *reinterpret_cast<uint4*>(to) = bytes;
  } else {
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
    CUTE_UNROLL
    for (int i = 0; i < kValues; ++i)
      if (i < count) to[i] = uint8_t(words[i / 4] >> i % 4 * 8);
  }
}
