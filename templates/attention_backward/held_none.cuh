// v stays in shared memory.
struct Held {
  __device__ __forceinline__ void take(const Consumer& c) { c.shared.v_full.wait(0); }

  // Issues dp^T = v do^T.
  __device__ __forceinline__ void multiply(const Consumer& c, float (&dp)[kScores], uint64_t d_o) const {
{% if operation.dim_v %}
    multiply_values(dp, c.own_v(), d_o);
{% else %}
    multiply_scores(dp, c.v + c.own, d_o);
{% endif %}
  }
};
