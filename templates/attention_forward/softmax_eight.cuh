// Turns scores into exp2(factor score - maximum{{ " + kOffset" if operation.weights != "same" }}) and takes note of maximum and sum. The maximum is one
// of exponents, since factors may differ from tile to tile. A row may have met nothing but -inf so far, and its maximum
// must not become a NaN.
__device__ __forceinline__ void softmax(float (&scores)[kScores], Rows& rows, const Scaling& scaling) {
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const float factor = scaling.factor(r);
    float maximum = fmaxf(scores[2 * r], scores[2 * r + 1]);
    CUTE_UNROLL
    for (int i = 4; i < kScores; i += 4) maximum = fmaxf(maximum, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
    maximum *= factor;
    maximum = fmaxf(maximum, rows.maximum[r]);
    maximum = quad_maximum(maximum);
{% if schedule.rescale == "needed" %}
    if (!(maximum - rows.maximum[r] > kSlack)) maximum = rows.maximum[r];
{% endif %}
    const float reference = maximum == minus_infinity() ? 0 : maximum;
    const float shift = reference{{ " - kOffset" if operation.weights != "same" }};
    rows.rescale[r] = fast_exp2(rows.maximum[r] - reference);  // just 1 where it stays
    rows.maximum[r] = maximum;
    float sum = 0;
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 4) {
      float &x = scores[i + 2 * r], &y = scores[i + 2 * r + 1];
      x = fast_exp2(x * factor - shift);
      y = fast_exp2(y * factor - shift);
      sum += x + y;
    }
    rows.sum[r] = rows.sum[r] * rows.rescale[r] + sum;
  }
}
