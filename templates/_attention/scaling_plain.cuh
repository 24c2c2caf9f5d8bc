// The softmax is of scale q k^T.
{% if operation.bias != "none" %}
// A score is multiplied by `factor`, and gets its bias in one rounding to fp32, before anything else: a row that a
// large finite bias hides then has the scores that torch's has, all alike, whose weights are alike too.
{% endif %}
struct Scaling {
{% if operation.bias == "none" %}
  float exponent;  // the factor of a score in the argument of exp2
{% else %}
  static constexpr float exponent = kLog2E;  // the factor of a biased score in the argument of exp2
  float factor;                              // of a score before the bias is added
{% endif %}

  __device__ __forceinline__ explicit Scaling(const Parameters& p) : {{ "exponent(p.scale * kLog2E)" if operation.bias == "none" else "factor(p.scale)" }} {}
};
