  __device__ __forceinline__ float low() const { return float(reinterpret_cast<const cutlass::half_t(&)[2]>(scales)[0]); }
  __device__ __forceinline__ float high() const { return float(reinterpret_cast<const cutlass::half_t(&)[2]>(scales)[1]); }
