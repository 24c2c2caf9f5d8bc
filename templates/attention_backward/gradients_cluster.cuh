// The gradients of a cluster's blocks are summed through distributed shared memory: each block lays its own
// down as the accumulators lie, in fragments of a warp's 16 rows and 8 columns, and sums some fragments over
// all blocks, always in the order of ranks. They lie where k, v and the stages of q and do were.
//
// Fragments of a gradient: a warp's, a block's; those that a block sums, a warp of it at most.
constexpr int kWarps = kConsumers * 4, kWarpFragments = kGradients / 4, kFragments = kWarps * kWarpFragments;
constexpr int kOwnFragments = kFragments / kCluster, kWarpSums = (kOwnFragments + kWarps - 1) / kWarps;
constexpr int kFragmentBytes = 32 * sizeof(float4), kGradientBytes = kFragments * kFragmentBytes;
static_assert(kFragments % kCluster == 0 && {{ "2 * kGradientBytes <= 2 * kKvBytes + (kStages + kDoStages) * kQBytes" if together else "kGradientBytes <= 2 * kKvBytes" }});
static_assert(sizeof(SharedStorage::k) + sizeof(SharedStorage::v) == OFFSET(SharedStorage, q));
static_assert(OFFSET(SharedStorage, d_o) - OFFSET(SharedStorage, q) == kStages * kQBytes);

// What the threads of any block wrote before is visible to all after. Those that have exited do not count.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Lays down the warp's fragments of a gradient.
__device__ __forceinline__ void lay(uint8_t* fragments, const float (&gradient)[kGradients], int warp) {
  float4* own = reinterpret_cast<float4*>(fragments) + warp * kWarpFragments * 32 + threadIdx.x % 32;
  CUTE_UNROLL
  for (int i = 0; i < kWarpFragments; ++i)
    own[i * 32] = {gradient[4 * i], gradient[4 * i + 1], gradient[4 * i + 2], gradient[4 * i + 3]};
}

// Loads from `address` in the shared memory of the block with that rank. Volatile keeps it after the barrier
// before and ahead of the next.
__device__ __forceinline__ float4 load_remote(uint32_t address, int rank) {
  float4 four;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
               "ld.shared::cluster.v4.f32 { %0, %1, %2, %3 }, [remote];\n}"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(address), "r"(rank));
  return four;
}

// Writes scale * the sums of the block's own fragments; `tile` is the gradient's at the tile's first row. Of
// a fragment lane l has two columns of row l / 4, then those of the row 8 further down.
__device__ __forceinline__ void store_sums(const Consumer& c, const uint8_t* fragments, Element* tile,
                                           int64_t row_stride, float scale, int warp) {
  const int rows = c.work.sequence.columns(c.p) - c.work.column, first = rank() * kOwnFragments;
  const uint32_t address = cute::cast_smem_ptr_to_uint(fragments) + (first * 32 + threadIdx.x % 32) * sizeof(float4);
  float4 sums[kWarpSums];
  CUTE_UNROLL
  for (int i = 0; i < kWarpSums; ++i) {
    const int own = min(i * kWarps + warp, kOwnFragments - 1);
    sums[i] = load_remote(address + own * kFragmentBytes, 0);
    CUTE_UNROLL
    for (int block = 1; block < kCluster; ++block) {
      const float4 more = load_remote(address + own * kFragmentBytes, block);
      sums[i] = {sums[i].x + more.x, sums[i].y + more.y, sums[i].z + more.z, sums[i].w + more.w};
    }
  }
  CUTE_UNROLL
  for (int i = 0; i < kWarpSums; ++i) {
    const int own = i * kWarps + warp;
    const int row = (first + own) / kWarpFragments * 16 + int(threadIdx.x) % 32 / 4;
    const int column = c.part * kColumns + (first + own) % kWarpFragments * 8 + int(threadIdx.x) % 4 * 2;
    if (own >= kOwnFragments || column >= c.p.dim) continue;
    Element* place = tile + row * row_stride + column;
    if (row < rows) *reinterpret_cast<uint32_t*>(place) = pair(sums[i].x * scale, sums[i].y * scale);
    if (row + 8 < rows)
      *reinterpret_cast<uint32_t*>(place + 8 * row_stride) = pair(sums[i].z * scale, sums[i].w * scale);
  }
}

__device__ __forceinline__ void store_gradients(const Consumer& c, const float (&dk)[kGradients],
                                                const float (&dv)[kGradients]) {
  const Parameters& p = c.p;
  const Work& work = c.work;
  const int warp = c.consumer * 4 + threadIdx.x / 32 % 4;
  Element* const dk_tile =
      p.dk_rows + column_at(work.sequence, p.dk_batch, p.dk_head, p.dk_seq, work.head, work.column);
  Element* const dv_tile =
      p.dv_rows + column_at(work.sequence, p.dv_batch, p.dv_head, p.dv_seq, work.head, work.column);
  uint8_t *const of_dv = c.shared.k, *const of_dk = of_dv{{ " + kGradientBytes" if together }};
  meet();  // all have multiplied with k, v, q and do
  lay(of_dv, dv, warp);
{% if together %}
  lay(of_dk, dk, warp);
{% endif %}
  sync_cluster();  // the blocks' fragments are there
  store_sums(c, of_dv, dv_tile, p.dv_seq, {{ "1 / p.keep" if divides_gradients else "1" }}, warp);
{% if not together %}
  sync_cluster();  // every reader is done with dv, where dk goes
  lay(of_dk, dk, warp);
  sync_cluster();
{% endif %}
  store_sums(c, of_dk, dk_tile, p.dk_seq, p.scale{{ " / p.keep" if divides_gradients }}, warp);
  sync_cluster();  // shared memory must outlive the blocks that read it
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();  // and what still adds dq from it
}
