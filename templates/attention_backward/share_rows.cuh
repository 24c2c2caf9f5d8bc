// The two blocks of a pair exchange ds. A block writes its 64 columns to its own box of ds, when the copy
// before has arrived: the peer says so with `peer_empty`, when it has multiplied dq with it. When all is
// written one thread copies the box to the same place in the peer's memory, and the bytes come to the peer's
// `peer_full`. Both blocks go through the same q tiles, those that see any of the pair's 128 rows of k, even
// if one block's rows are all past the end of the sequence: its ds is 0, but nobody waits in vain.
//
// Issues gradient += weights rows, where `weights` is a box. dv += p^T do, dk += ds^T q.
__device__ __forceinline__ void multiply_gradient(float (&gradient)[kGradients], uint64_t weights, uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / KeyWgmma::kK; ++step)
    KeyWgmma::fma(weights + step * KeyWgmma::kK * 128 / 16, rows + step * KeyWgmma::kK * kSpan / 16, gradient, true);
  cute::warpgroup_commit_batch();
}

{% if operation.dim_v %}
__device__ __forceinline__ void multiply_dv(float (&gradient)[kValueGradients], uint64_t weights, uint64_t rows) {
  fence(gradient);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kQTile / ValueWgmma::kK; ++step)
    ValueWgmma::fma(weights + step * ValueWgmma::kK * 128 / 16, rows + step * ValueWgmma::kK * kValueSpan / 16, gradient,
                    true);
  cute::warpgroup_commit_batch();
}

{% endif %}
// The block's own box of ds.
__device__ __forceinline__ uint64_t own_ds(const Consumer& c, Step step) {
  return c.staged_ds(step) + c.box * kDsBoxBytes / 16;
}

// Waits until the peer has the box of the step before, and has done with it. The block's own warpgroups have
// as well: they have come to meet() since, with p.
__device__ __forceinline__ void await_ds(const Consumer& c, Step step) {
  c.shared.peer_empty.wait(step.parity ^ 1);
}

// p's stage, which others may still read in the step after, but not in the one after that: all have come to
// meet() with that one's p.
__device__ __forceinline__ const uint8_t* own_p(const Consumer& c, Step step) { return c.shared.p[step.parity]; }
__device__ __forceinline__ uint64_t staged_p(const Consumer& c, Step step) {
  return matrix(own_p(c, step), kDsBoxBytes, 8 * 128, 1);
}

// Sends the peer the block's box of ds, when all have written it, and expects the peer's.
__device__ __forceinline__ void exchange(const Consumer& c, Step step) {
  if (threadIdx.x != 128) return;  // the consumers' first
  c.shared.peer_full.arrive_and_expect_tx(kDsBoxBytes);
  asm volatile("{\n.reg .b32 box, full;\nmapa.shared::cluster.u32 box, %0, %3;\n"
               "mapa.shared::cluster.u32 full, %1, %3;\n"
               "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [box], [%0], %2, [full];\n}"
               ::"r"(cute::cast_smem_ptr_to_uint(c.own_ds(step))),
               "r"(cute::cast_smem_ptr_to_uint(&c.shared.peer_full)), "n"(kDsBoxBytes), "r"(1 - c.part)
               : "memory");
}

// Issues dq's products over the block's own rows of k, then adds those over the peer's, when its ds is there.
__device__ __forceinline__ void multiply_own_query(const Consumer& c, float (&dq)[kQueries], Step step) {
  multiply_query(dq, own_ds(c, step), c.k + c.columns<kKvRows>(c.part), c.consumer);
}
__device__ __forceinline__ void multiply_peer_query(const Consumer& c, float (&dq)[kQueries], Step step) {
  const uint64_t peer_k = matrix(c.shared.peer_k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, {{ layout.layout_type }});
  c.shared.peer_full.wait(step.parity);
  multiply_query<true>(dq, c.staged_ds(step) + (1 - c.box) * kDsBoxBytes / 16, peer_k, c.consumer);
}

// Tells the peer that dq has been multiplied with the box that it sent.
__device__ __forceinline__ void release_ds(const Consumer& c) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) c.shared.peer_empty.arrive(1 - c.part);
}
