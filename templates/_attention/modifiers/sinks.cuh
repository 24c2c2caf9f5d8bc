{# rows #}
// The gradient of a sink: the sum over its head's rows of -exp(sink - lse) delta. Tiles are added in an order that
// does not change.

// The sum of what all threads of the block have, in its first thread.
__device__ __forceinline__ float sum_of_block(float x) {
  __shared__ float warps[kRowThreads / 32];
  CUTE_UNROLL
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(~0u, x, lanes);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  CUTE_UNROLL
  for (int warp = 0; warp < kRowThreads / 32; ++warp) x += warps[warp];
  return x;
}

{% if operation.lengths == "packed" %}
// What follows the last sequence has results that nobody wrote.
__device__ __forceinline__ bool is_of_a_sequence(const Parameters& p, const Place& at, int row) {
  return at.sequence.first_row + row < offset(p.cu_seqlens_q, p.batch, p.total_q);
}

{% endif %}
// Adds up what the tiles of a head have: the block with the head's number does.
__device__ __forceinline__ void sum_sinks(const Parameters& p) {
  const int heads = {{ "p.all_kv_heads * p.sharing" if operation.lengths == "packed" else "p.heads" }};
  const int head = blockIdx.x;
  if (head >= heads) return;
  float sum = 0;
  for (int first = head * p.q_tiles; first < int(gridDim.x); first += heads * p.q_tiles)
    for (int tile = threadIdx.x; tile < p.q_tiles; tile += kRowThreads) sum += p.sink_sums[first + tile];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) p.dsinks[head] = {{ "sum" if operation.sinks == "fp32" else "Element(sum)" }};
}
{# preprocess #}
  const float sink = float(p.sinks[at.head]){{ " * kLog2E" if operation.bias == "none" }};
  float sink_sum = 0;
  if (at.row >= rows) {
    if (threadIdx.x == 0) p.sink_sums[blockIdx.x] = 0;
    return;
  }
{# preprocess_row #}
        if (lse < infinity && lse > -infinity{{ " && is_of_a_sequence(p, at, row)" if operation.lengths == "packed" }})
          sink_sum -= fast_exp2({{ "sink - lse * kLog2E" if operation.bias == "none" else "(sink - lse) * kLog2E - corrections[i]" }}) * (delta - dlse);
{# preprocess_end #}
  sink_sum = sum_of_block(sink_sum);
  if (threadIdx.x == 0) p.sink_sums[blockIdx.x] = sink_sum;
{# postprocess_note #}
// One block for each head sums the gradient of its sink.
{# postprocess #}
  sum_sinks(p);
