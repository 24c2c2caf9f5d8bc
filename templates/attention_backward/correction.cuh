// ---- Rows whose log-sum-exp is too coarse ------------------------------------------------------------
// A bias of, say, -1e9 over a whole row makes its lse -1e9 too, an fp32 number whose neighbours are 64 away: the log
// of how many columns share the row is lost in it. From this size on the sum of exp(score - lse) is computed again.
constexpr float kCoarse = {{ coarse_lse }};
// A warp has 16 rows, and where there are more warps than such groups a share of the columns.
constexpr int kRowWarps = kRowThreads / 32, kGroups = kQTile / 16;
constexpr int kShares = kGroups < kRowWarps ? kRowWarps / kGroups : 1;

{% include "_attention/mma.cuh" %}

// Adds exp(score - lse) of a lane's two rows of 16 (l / 4, and 8 below) over its share of the columns. Rows that do
// not exist have an lse of 0; nobody reads what is summed of them.
__device__ __forceinline__ void sum_weights(const Parameters& p, const Place& at, int first_row, int share,
                                            const float (&lse)[2], float (&sums)[2]) {
  const Sequence& sequence = at.sequence;
  const int columns = sequence.columns(p), rows = sequence.rows(p), lane = threadIdx.x % 32, pair = lane % 4 * 2;
  const int64_t number = Score::number_of(sequence);
  const int row[2] = {min(first_row + lane / 4, rows - 1), min(first_row + lane / 4 + 8, rows - 1)};
  const Element* q[2];
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) q[r] = p.q_rows + sequence.row_at(p.q_batch, p.q_head, p.q_seq, at.head, row[r]) + pair;
  const Scaling scaling(p);
{% for part in parts %}{% include part ~ "#begin_again" ignore missing %}{% endfor %}
  CUTE_NO_UNROLL
  for (int first = share * 8; first < columns; first += kShares * 8) {
    const Element* k = p.k_rows + key_at(p, at, min(first + lane / 4, columns - 1)) + pair;
    float scores[4] = {0, 0, 0, 0};
#pragma unroll 2  // loads of several steps are on their way at a time
    for (int i = 0; i < p.dim; i += 16) {
      const bool more = i + 8 < p.dim;  // of 8 columns after these
      const auto two = [](const Element* at) { return *reinterpret_cast<const uint32_t*>(at); };
      const uint32_t rows_of_q[4] = {two(q[0] + i), two(q[1] + i), more ? two(q[0] + i + 8) : 0,
                                     more ? two(q[1] + i + 8) : 0};
      multiply(scores, rows_of_q, two(k + i), more ? two(k + i + 8) : 0);
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int r = i / 2, column = first + pair + i % 2;
{% if bounds_right %}
      const int diagonal = row[r]{{ " + sequence.diagonal(p)" if diagonal }};
{% endif %}
      if (column >= columns
{%- if bounds_right %} || column > diagonal + p.right{% endif %}
{%- if bounds_left %} || column < diagonal - p.left{% endif %}) continue;
{% if operation.masked %}
      if (p.shown[number * p.shown_batch + at.head * p.shown_head + row[r] * p.shown_row + column] == 0) continue;
{% endif %}
{% for part in parts %}{% include part ~ "#cap_again" ignore missing %}{% endfor %}
      const float bias = p.bias[number * p.bias_batch + at.head * p.bias_head + row[r] * p.bias_row + column];
{% if added_again("bias") != "bias" %}
      const float term = {{ added_again("bias") }};
      sums[r] += fast_exp2(below(lse[r], fmaf(scores[i], scaling.factor, term)) * scaling.exponent);
{% else %}
      sums[r] += fast_exp2(below(lse[r], fmaf(scores[i], scaling.factor, bias)) * scaling.exponent);
{% endif %}
    }
  }
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    sums[r] += __shfl_xor_sync(~0u, sums[r], 1);
    sums[r] += __shfl_xor_sync(~0u, sums[r], 2);
  }
}

// log2 of these sums for the rows of a q tile, by all threads of a block: 0 where lse is exact enough.
__device__ __forceinline__ void find_corrections(const Parameters& p, const Place& at, float (&corrections)[kQTile]) {
  __shared__ float sums_of_shares[kShares][kQTile];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = at.sequence.rows(p) - at.row;
  const auto lse_of = [&](int i) { return i < rows ? p.lse[at.sequence.lse_at(p, at.head, at.row + i)] : 0; };
  const auto is_coarse = [](float lse) { return fabsf(lse) >= kCoarse && fabsf(lse) < __int_as_float(0x7f800000); };
  CUTE_NO_UNROLL
  for (int group = warp / kShares; group < kGroups; group += kRowWarps / kShares) {
    const int first = group * 16, share = warp % kShares;
    const float lse[2] = {lse_of(first + lane / 4), lse_of(first + lane / 4 + 8)};
    float sums[2] = {0, 0};
    if (__any_sync(~0u, is_coarse(lse[0]) || is_coarse(lse[1])))
      sum_weights(p, at, at.row + first, share, lse, sums);
    if (lane % 4 == 0) {
      sums_of_shares[share][first + lane / 4] = sums[0];
      sums_of_shares[share][first + lane / 4 + 8] = sums[1];
    }
  }
  __syncthreads();
  CUTE_NO_UNROLL
  for (int i = threadIdx.x; i < kQTile; i += kRowThreads) {
    const float lse = lse_of(i);
{% if not column %}
    float sum = 0;
{% else %}
    float sum = fast_exp2(({{ extra_score("p", "at.head") }} - lse) * kLog2E);
{% endif %}
    CUTE_UNROLL
    for (int share = 0; share < kShares; ++share) sum += sums_of_shares[share][i];
    corrections[i] = is_coarse(lse) ? log2f(sum) : 0;
  }
  __syncthreads();
}
