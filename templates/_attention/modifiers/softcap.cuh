{# gradient_note #}
//   where ds is also multiplied by the slope of tanh, 1 - tanh^2
{# scaling #}
// The softmax is of softcap tanh(scale q k^T / softcap): what becomes of a score here is the tanh.
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
  float argument;  // of a product in the argument of tanh

  __device__ __forceinline__ explicit Scaling(const Parameters& p)
      : {{ "exponent(p.softcap * kLog2E)" if operation.bias == "none" else "factor(p.softcap)" }}, argument(__fdividef(p.scale, p.softcap)) {}
  __device__ __forceinline__ void cap(float (&scores)[kScores]) const {
    CUTE_UNROLL
    for (int i = 0; i < kScores; ++i) asm("tanh.approx.f32 %0, %1;" : "=f"(scores[i]) : "f"(scores[i] * argument));
  }
};
{# slope #}
// The slope of softcap tanh(x / softcap), but for a factor that the gradients get in the end: 1 - tanh^2.
constexpr uint32_t kHidden = 0xdd800000;  // the tanh of what does not attend: -2^60, whose square is finite
__device__ __forceinline__ float steepen(float weight, float tanh) { return weight - weight * tanh * tanh; }
{# cap_again #}
      asm("tanh.approx.f32 %0, %1;" : "=f"(scores[i]) : "f"(scores[i] * scaling.argument));
{# decode_members #}
  float argument;  // of a product in the argument of tanh
{# decode_begin #}
    exponent = p.softcap * kLog2E;
    argument = __fdividef(scale, p.softcap);
{# decode_cap #}
  // The softmax is of softcap tanh(scale q k^T / softcap): what becomes of a score here is the tanh.
  __device__ __forceinline__ void cap(Scores& scores) const {
    CUTE_UNROLL
    for (int i = 0; i < kSlices * 8; ++i) {
      float& score = scores[i / 8][i / 4 % 2][i % 4];
      asm("tanh.approx.f32 %0, %1;" : "=f"(score) : "f"(score * argument));
    }
  }
