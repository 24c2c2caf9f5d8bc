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
// Waits until nobody reads the step's stage of ds any more. With two stages nobody does: the others read
// it two steps ago, and have come to meet() since, after their dq was there.
__device__ __forceinline__ void await_ds(const Consumer& c, Step step) {
  if constexpr (kDsStages == 1) c.shared.ds_empty.wait(step.parity ^ 1);
}

// Lets go of the only stage of ds, which dq has been multiplied with.
__device__ __forceinline__ void release_ds(const Consumer& c) {
  if constexpr (kDsStages == 1) release(c.shared.ds_empty);
}

// The part of dk's and dv's columns that the warpgroup has.
__device__ __forceinline__ int gradient_part(const Consumer& c) { return c.part; }

__device__ __forceinline__ void init_share(SharedStorage& shared) {
  shared.ds_empty.init(4 * kConsumers);
{% if number_part == "ticket_cluster" %}
  shared.ticket_full.init(1);
{% endif %}
}

{% if number_part == "ticket_cluster" %}
// Barriers are there for all who arrive at them, other blocks too.
__device__ __forceinline__ void sync_share() {
  cute::cluster_arrive_relaxed();
  cute::cluster_wait();
}
{% else %}
// Barriers are there for all who arrive at them.
__device__ __forceinline__ void sync_share() { __syncthreads(); }
{% endif %}
