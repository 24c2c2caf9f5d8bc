// Writes scale * gradient to the warpgroup's 64 rows of a kv tile, 16 columns of a warp's 16 rows at a
// time; TMA's swizzle XORs the 16-byte column of a row with bits of the row number.
__device__ __forceinline__ void stage(uint8_t* rows, const float (&gradient)[kGradients], float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  CUTE_UNROLL
  for (int i = 0; i < kColumns / 16; ++i) {
    const float* x = gradient + i * 8;
    const int offset = row * kSpan + i * 32 % kSpan + lane / 16 * 16;
    const uint32_t address = cute::cast_smem_ptr_to_uint(rows) + i * 32 / kSpan * Tile<kKvRows>::kBoxBytes +
                             (offset ^ ((offset >> 3) & (kSpan - 16)));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(address),
                 "r"(pair(x[0] * scale, x[1] * scale)), "r"(pair(x[2] * scale, x[3] * scale)),
                 "r"(pair(x[4] * scale, x[5] * scale)), "r"(pair(x[6] * scale, x[7] * scale))
                 : "memory");
  }
}

// Starts the stores of the warpgroup's part of a gradient's columns, of its 64 rows.
__device__ __forceinline__ void store(const cute::TmaDescriptor& map, const uint8_t* rows, const Consumer& c) {
  const Corner corner = c.work.sequence.columns_at<kWgmmaM>(c.column);
  for (int box = 0; box < kBoxes / kParts; ++box)
    store_box(map, rows + box * Tile<kKvRows>::kBoxBytes, {{ "c.consumer" if shares_rows else "c.part" }} * kColumns + box * kBoxColumns, corner,
              c.work.head);
  cute::tma_store_arrive();
}

{% if operation.dim_v %}
// The same of dv.
__device__ __forceinline__ void stage_dv(uint8_t* rows, const float (&gradient)[kValueGradients], float scale) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  CUTE_UNROLL
  for (int i = 0; i < kValueColumns / 16; ++i) {
    const float* x = gradient + i * 8;
    const int offset = row * kValueSpan + i * 32 % kValueSpan + lane / 16 * 16;
    const uint32_t address = cute::cast_smem_ptr_to_uint(rows) + i * 32 / kValueSpan * ValueTile<kKvRows>::kBoxBytes +
                             (offset ^ ((offset >> 3) & (kValueSpan - 16)));
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], { %1, %2, %3, %4 };" ::"r"(address),
                 "r"(pair(x[0] * scale, x[1] * scale)), "r"(pair(x[2] * scale, x[3] * scale)),
                 "r"(pair(x[4] * scale, x[5] * scale)), "r"(pair(x[6] * scale, x[7] * scale))
                 : "memory");
  }
}

__device__ __forceinline__ void store_dv(const cute::TmaDescriptor& map, const uint8_t* rows, const Consumer& c) {
  const Corner corner = c.work.sequence.columns_at<kWgmmaM>(c.column);
  for (int box = 0; box < kValueBoxes / kParts; ++box)
    store_box(map, rows + box * ValueTile<kKvRows>::kBoxBytes, {{ "c.consumer" if shares_rows else "c.part" }} * kValueColumns + box * kValueBoxColumns, corner,
              c.work.head);
  cute::tma_store_arrive();
}

{% endif %}
// The gradients leave through the memory of v and k: through the warpgroup's rows of them, or where it has
// the same rows as others, through the boxes of its columns.
__device__ __forceinline__ void store_gradients(const Consumer& c, const float (&dk)[kGradients],
                                                const float (&dv)[{{ value_gradients }}]) {
{# With trimming a pair's threads have no register to keep it in till here. #}
{% set own_consumer = "(int(threadIdx.x) / 128 - 1)" if operation.trims and schedule.cluster_split == "rows" else "c.consumer" %}
{% if shares_rows %}
  const int own = 16 * c.columns<kKvRows>({{ own_consumer }});
{% if operation.dim_v %}
  const int own_v = 16 * c.value_columns<kKvRows>({{ own_consumer }});
{% endif %}
  meet();  // the other warpgroup reads the same rows of v
{% else %}
  const int own = {{ own_consumer }} * kWgmmaM * kSpan;
{% if operation.dim_v %}
  const int own_v = {{ own_consumer }} * kWgmmaM * kValueSpan;
{% endif %}
{% endif %}
  {{ stage_dv }}(c.shared.v + {{ own_v }}, dv, {{ "1 / c.p.keep" if divides_gradients else "1" }});
  cute::tma_store_fence();  // make the writes visible to TMA before the barrier releases its thread
  meet();  // nobody reads k any more, either
  const bool leads = threadIdx.x % 128 == 0;
  if (leads) {{ store_dv }}(c.p.dv_map, c.shared.v + {{ own_v }}, c);
  stage(c.shared.k + own, dk, c.p.scale{{ " / c.p.keep" if divides_gradients }});
  cute::tma_store_fence();
  cutlass::arch::NamedBarrier::sync(128, 2 + {{ own_consumer }});
  if (leads) store(c.p.dk_map, c.shared.k + own, c);
  // Shared memory must outlive the stores that read it, of dq too.
  if (threadIdx.x % 32 == 0) cute::tma_store_wait<0>();
}
