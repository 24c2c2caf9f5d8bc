// ---- Preprocess and postprocess: one block per q tile ----------------------------------------------
// Threads of a block; those that share a row, 8 columns each.
constexpr int kRowThreads = {{ row_threads }}, kRowLanes = {{ row_lanes }};

struct alignas(16) Eight {
  Element values[8];
};

{% if operation.bias != "none" %}
{% include "attention_backward/correction.cuh" %}

{% endif %}
{% if operation.masks_rows %}
{% if not column %}
// Whether a row is fully masked: its log-sum-exp is that of no score.
__device__ __forceinline__ bool is_fully_masked(const Parameters&, int, float lse) {
  return lse == __int_as_float(0xff800000);
}
{% else %}
// Whether a row is fully masked, or has weights that are nothing beside its sink's: its log-sum-exp is the sink.
__device__ __forceinline__ bool is_fully_masked(const Parameters& p, int head, float lse) {
  const float sink = {{ extra_score("p", "head") }};
  return lse == __int_as_float(0xff800000) || fabsf(lse - sink) <= 4e-7f * fabsf(sink);
}
{% endif %}

// Copies a q tile of do to where dq will be, with zeros in fully masked rows: main reads it there. Such rows have
// weights of 0, but 0 times the NaN or Inf of one would be NaN in all of dk and dv.
__device__ __forceinline__ void copy_unmasked(const Parameters& p, const Place& at) {
  const int column = threadIdx.x % kRowLanes * 8;
  CUTE_NO_UNROLL
  for (int i = threadIdx.x / kRowLanes; i < kQTile; i += kRowThreads / kRowLanes) {
    const int row = at.row + i;
{% if operation.dim_v %}
    // Main reads kDimV columns there: what do has not is 0, as it is beyond the end of a row of dq.
    if (row >= at.sequence.rows(p) || column >= min(kDimV, p.dim)) continue;
{% else %}
    if (row >= at.sequence.rows(p) || column >= p.dim) continue;
{% endif %}
    const bool masked = is_fully_masked(p, at.head, p.lse[at.sequence.lse_at(p, at.head, row)]);
    const int64_t do_row = at.sequence.row_at(p.do_batch, p.do_head, p.do_seq, at.head, row);
    const int64_t dq_row = at.sequence.row_at(p.dq_batch, p.dq_head, p.dq_seq, at.head, row);
    *reinterpret_cast<uint4*>(p.dq_rows + dq_row + column) =
{% if operation.dim_v %}
        masked || column >= p.dim_v ? uint4{0, 0, 0, 0} : *reinterpret_cast<const uint4*>(p.do_rows + do_row + column);
{% else %}
        masked ? uint4{0, 0, 0, 0} : *reinterpret_cast<const uint4*>(p.do_rows + do_row + column);
{% endif %}
  }
}

{% endif %}
{% if column %}
{% for part in parts %}{% include part ~ "#rows" ignore missing %}{% endfor %}

// delta = rowsum(do * o) - dlse and lse{{ " in base 2" if operation.bias == "none" }}, for main to read; zeros where main adds dq; what the tile's
// rows add to the gradient of its head's sink.
{% else %}
// delta = rowsum(do * o) - dlse and lse{{ " in base 2" if operation.bias == "none" }}, for main to read; zeros where main adds dq.
{% endif %}
extern "C" __global__ void __launch_bounds__(kRowThreads)
    {{ spec.name }}_preprocess(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
{% if operation.deterministic %}
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.counter = 0;
  if (threadIdx.x < kParts) p.turns[int64_t(blockIdx.x) * kParts + threadIdx.x] = 0;
{% endif %}
{% if operation.trims %}
  if (int(blockIdx.x) < p.keys_rows) find_keys(p, blockIdx.x);
{% endif %}
  const Place at = place_q(p, blockIdx.x);
  const int rows = at.sequence.rows(p);
{% if not column %}
  if (at.row >= rows) return;
{% endif %}
{% for part in parts %}{% include part ~ "#preprocess" ignore missing %}{% endfor %}
{% if operation.bias != "none" %}
  __shared__ float corrections[kQTile];
  find_corrections(p, at, corrections);
{% endif %}
{% if operation.masks_rows %}
  bool non_finite = false;  // whether do of a fully masked row is
{% endif %}
  const int column = threadIdx.x % kRowLanes * 8;
  float* statistics = p.statistics + int64_t(blockIdx.x) * (kStatistics * kQTile);
  CUTE_UNROLL
  for (int i = threadIdx.x / kRowLanes; i < kQTile; i += kRowThreads / kRowLanes) {
    const int row = at.row + i;
    float delta = 0;
    if (row < rows && column < {{ "p.dim_v" if operation.dim_v else "p.dim" }}) {
      const int64_t o_row = at.sequence.row_at(p.o_batch, p.o_head, p.o_seq, at.head, row);
      const int64_t do_row = at.sequence.row_at(p.do_batch, p.do_head, p.do_seq, at.head, row);
      const Eight o = *reinterpret_cast<const Eight*>(p.o_rows + o_row + column);
      const Eight d_o = *reinterpret_cast<const Eight*>(p.do_rows + do_row + column);
      CUTE_UNROLL
      for (int j = 0; j < 8; ++j) delta += float(o.values[j]) * float(d_o.values[j]);
    }
    CUTE_UNROLL
    for (int lanes = kRowLanes / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(~0u, delta, lanes);
    if (threadIdx.x % kRowLanes == 0) {
      const float infinity = __int_as_float(0x7f800000);  // exp2 of what is below it is 0
      float lse = infinity;
      if (row < rows) {
        const int64_t place = at.sequence.lse_at(p, at.head, row);
        lse = p.lse[place];
        const float dlse = p.dlse == nullptr ? 0 : p.dlse[place];
{% if operation.masks_rows %}
        const bool masked = is_fully_masked(p, at.head, lse);
        if (masked && !(fabsf(delta) < infinity)) {  // o is 0 there, times NaN or Inf
          non_finite = true;
          delta = 0;
        }
{% endif %}
{% for part in parts %}{% include part ~ "#preprocess_row" ignore missing %}{% endfor %}
{% if operation.masks_rows %}
        if (!masked || fabsf(dlse) < infinity) delta -= dlse;
{% else %}
        delta -= dlse;
{% endif %}
      }
{% if operation.bias == "none" %}
      statistics[i] = lse == -infinity ? infinity : lse * kLog2E;
{% else %}
{% if divides_weights %}
      // With which weights are divided by p.keep: ds then leaves as it is.
{% endif %}
      statistics[i] = lse == -infinity ? infinity : lse;
      statistics[2 * kQTile + i] = corrections[i]{{ " + log2f(p.keep)" if divides_weights }};
{% endif %}
      statistics[kQTile + i] = delta{{ " * p.keep" if operation.dropout }};
    }
  }
{% if operation.masks_rows %}
  const bool copies = __syncthreads_or(non_finite);
  if (threadIdx.x == 0) p.non_finite[blockIdx.x] = copies;
  if (copies) copy_unmasked(p, at);
{% endif %}
{% for part in parts %}{% include part ~ "#preprocess_end" ignore missing %}{% endfor %}
  auto* sums = reinterpret_cast<float4*>(p.dq_sum + int64_t(blockIdx.x) * (kParts * kPartSums));
  CUTE_UNROLL
  for (int i = threadIdx.x; i < kParts * kPartSums / 4; i += kRowThreads) sums[i] = {0, 0, 0, 0};
}

// dq in 16 bits, by rows: scale times the sums.
{% for part in parts %}{% include part ~ "#postprocess_note" ignore missing %}{% endfor %}
extern "C" __global__ void __launch_bounds__(kRowThreads)
    {{ spec.name }}_postprocess(const __grid_constant__ Parameters p) {
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
{% for part in parts %}{% include part ~ "#postprocess" ignore missing %}{% endfor %}
  const Place at = place_q(p, blockIdx.x);
  const int rows = at.sequence.rows(p);
  if (at.row >= rows) return;
  const auto* sums = reinterpret_cast<const float4*>(p.dq_sum + int64_t(blockIdx.x) * (kParts * kPartSums));
  Element* dq = p.dq_rows + at.sequence.row_at(p.dq_batch, p.dq_head, p.dq_seq, at.head, at.row);
  CUTE_UNROLL
  for (int i = threadIdx.x; i < kParts * kPieces; i += kRowThreads) {
    const int part = i / kPieces;
    unpack(sums + part * (kPartSums / 4), i - part * kPieces, [&](int row, int part_column, const float (&values)[8]) {
      const int column = part * kColumns + part_column;
      if (at.row + row >= rows || column >= p.dim) return;
      Eight eight;
      CUTE_UNROLL
      for (int i = 0; i < 8; ++i) eight.values[i] = Element(values[i] * {{ "(p.scale / p.keep)" if divides_gradients else "p.scale" }});
      *reinterpret_cast<Eight*>(dq + row * p.dq_seq + column) = eight;
    });
  }
}
