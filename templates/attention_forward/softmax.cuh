// The softmax by rows, in base 2.
__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float fast_log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The largest, or the sum, of what the four lanes that share a row hold.
__device__ __forceinline__ float quad_maximum(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// What a thread knows of its two rows. Sums are its own columns' only, until the end.
struct Rows {
  float maximum[2];  // of the scores so far{{ ", or kSlack below it" if schedule.rescale == "needed" }}{{ ", times their factor in the exponent" if operation.eight }}
  float sum[2];
{% if leans %}
  float offset[2];  // what is added to all scores of a tile
{% endif %}
  float rescale[2];  // by how much what was summed before shrinks under the new maximum
};

{% if not operation.blocks %}
{% if bounds_right %}
// Hides the columns of a KV tile that rows do not attend to, of `columns` in the sequence. Bounds are relative to
// `row`. wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, and columns 2 (l % 4) and the next of every 8.
__device__ __forceinline__ void mask(float (&scores)[kScores], const Parameters& p, int columns, int row, int column) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
{% else %}
// Hides what is beyond the `columns` of the sequence. wgmma gives a lane columns 2 (l % 4) and the next of every 8.
__device__ __forceinline__ void mask(float (&scores)[kScores], int columns, int column) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
{% endif %}
{% if bounds_right %}
    const int end = min(columns, row + 8 * r + p.right + 1) - column;
{% else %}
    const int end = columns - column;
{% endif %}
{% if bounds_left %}
    const int begin = row + 8 * r - p.left - column;
{% endif %}
    CUTE_UNROLL
    for (int i = 0; i < kScores / 2; ++i) {
      const int place = i / 2 * 8 + i % 2;
      if (place >= end{% if bounds_left %} || place < begin{% endif %}) scores[i / 2 * 4 + 2 * r + i % 2] = minus_infinity();
    }
  }
}

{% endif %}
{% if operation.eight %}
{% include "attention_forward/softmax_eight.cuh" %}
{% else %}
// Turns scores into exp2(scale (score - maximum)) and takes note of maximum and sum. kMasked: a row may
// have met nothing but -inf so far, and its maximum must not become a NaN.
template <bool kFirst, bool kMasked>
__device__ __forceinline__ void softmax(float (&scores)[kScores], Rows& rows, float scale) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    float maximum = fmaxf(scores[2 * r], scores[2 * r + 1]);
    CUTE_UNROLL
    for (int i = 4; i < kScores; i += 4) maximum = fmaxf(maximum, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
{% if leans %}
    maximum += rows.offset[r];
{% endif %}
    if (!kFirst) maximum = fmaxf(maximum, rows.maximum[r]);
    maximum = quad_maximum(maximum);
{% if schedule.rescale == "needed" %}
    if (!kFirst && !((maximum - rows.maximum[r]) * scale > kSlack)) maximum = rows.maximum[r];
{% endif %}
{% if hides %}
    const float reference = maximum == minus_infinity() ? 0 : maximum{{ ", shift = reference * scale" if operation.bias == "none" }};
{% else %}
    const float reference = kMasked && maximum == minus_infinity() ? 0 : maximum{{ ", shift = reference * scale" if not leans }};
{% endif %}
{% if leans %}
    const float shift = (reference - rows.offset[r]) * scale;
{% endif %}
    rows.rescale[r] = kFirst ? 1 : fast_exp2((rows.maximum[r] - reference) * scale);  // just 1 where it stays
    rows.maximum[r] = maximum;
    float sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 4) {
      float &x = scores[i + 2 * r], &y = scores[i + 2 * r + 1];
{% if operation.bias != "none" %}
      // The difference is exact where both are large; their products with `scale` would be rounded by more than 1.
      x = fast_exp2((x - reference) * scale);
      y = fast_exp2((y - reference) * scale);
{% else %}
      x = fast_exp2(x * scale - shift);
      y = fast_exp2(y * scale - shift);
{% endif %}
      sum += x + y;
    }
    rows.sum[r] = kFirst ? sum : rows.sum[r] * rows.rescale[r] + sum;
  }
}
{% endif %}
