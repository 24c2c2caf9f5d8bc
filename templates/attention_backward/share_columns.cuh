// Each warpgroup has 64 rows of k and v, and multiplies their gradients with p^T and ds^T as it computed them;
// ds goes through shared memory for dq.
//
// Issues gradient += weights rows. dv += p^T do, dk += ds^T q.
__device__ __forceinline__ void multiply_gradient(float (&gradient)[kGradients], const Weights& weights,
                                                  uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / KeyWgmma::kK; ++step)
    KeyWgmma::fma(weights[step], rows + step * KeyWgmma::kK * kSpan / 16, gradient, true);
  cute::warpgroup_commit_batch();
}

{% if operation.dim_v %}
__device__ __forceinline__ void multiply_dv(float (&gradient)[kValueGradients], const Weights& weights, uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / ValueWgmma::kK; ++step)
    ValueWgmma::fma(weights[step], rows + step * ValueWgmma::kK * kValueSpan / 16, gradient, true);
  cute::warpgroup_commit_batch();
}

{% endif %}
{% if layout.ds_stages == 1 %}
// Waits until all consumers have multiplied the dq of the step before with ds.
__device__ __forceinline__ void await_ds(const Consumer& c, Step step) { c.shared.ds_empty.wait(step.parity ^ 1); }

// Releases the only stage of ds, once dq has been multiplied with it.
__device__ __forceinline__ void release_ds(const Consumer& c) { release(c.shared.ds_empty); }

{% endif %}
