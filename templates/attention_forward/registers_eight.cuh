
// What a product is to overwrite: nothing is live in it until then.
template <int kCount> __device__ __forceinline__ void anything(float (&accumulators)[kCount]) {
  CUTE_UNROLL
  for (int i = 0; i < kCount; ++i) asm volatile("" : "=f"(accumulators[i])::"memory");
}
{% if operation.scores == "int8" %}

// The sums of int8, in the registers that scores then have.
using Sums = int32_t[kScores];
__device__ __forceinline__ Sums& sums_of(float (&scores)[kScores]) { return reinterpret_cast<Sums&>(scores); }
{% endif %}
{% if operation.weights != "same" %}

__device__ __forceinline__ uint32_t four(float a, float b, float c, float d) {
  uint32_t four;
  asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(four)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return four;
}

// Of each 16 keys a thread has, in a row, 2 t, 2 t + 1, 8 + 2 t and 9 + 2 t: A's columns 4 t to 4 t + 3, in v's order.
__device__ __forceinline__ void pack(Weights& weights, const float (&scores)[kScores]) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 8; ++i) {
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
      const float* s = scores + i * 8 + 2 * r;
      weights[i / 2][i % 2 * 2 + r] = four(s[0], s[1], s[4], s[5]);
    }
  }
}
{% endif %}
{% if operation.promoted %}

// output = output * rescale + product. The tensor core's own sums of 8-bit products drop what is 2^13 below the
// largest; these are of one kv tile, and fp32 has all others.
__device__ __forceinline__ void add(float (&output)[kOutputs], const float (&product)[kOutputs], const Rows& rows) {
  CUTE_UNROLL
  for (int i = 0; i < kOutputs; ++i) output[i] = fmaf(output[i], rows.rescale[i / 2 % 2], product[i]);
  fence(output);  // else they sink below the next products, and the registers of both are needed
}
{% endif %}
