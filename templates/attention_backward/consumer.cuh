// ---- Consumer: 64 rows of k and v ----------------------------------------------------------------
{% include "_attention/registers.cuh" %}

// Issues scores = rows columns^T; they run on while the warpgroup goes on. s^T = k q^T, dp^T = v do^T.
__device__ __forceinline__ void multiply_scores(float (&scores)[kScores], uint64_t rows, uint64_t columns) {
  fence(scores);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kDim / ScoresWgmma::kK; ++step)
    ScoresWgmma::fma(rows + Tile<kKvRows>::columns(step), columns + Tile<kQTile>::columns(step), scores, step > 0);
  cute::warpgroup_commit_batch();
}

{% if operation.dim_v %}
// Issues dp^T = v do^T.
__device__ __forceinline__ void multiply_values(float (&dp)[kScores], uint64_t rows, uint64_t columns) {
  fence(dp);
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kDimV / ScoresWgmma::kK; ++step)
    ScoresWgmma::fma(rows + ValueTile<kKvRows>::columns(step), columns + ValueTile<kQTile>::columns(step), dp, step > 0);
  cute::warpgroup_commit_batch();
}

{% endif %}
{% include "attention_backward/query_" ~ query_part ~ ".cuh" %}

__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

{% if not operation.blocks %}
{% if bounds_right %}
// Whether rows [row, row + kQRows) and columns [column, column + 64) hold pairs that do not attend.
__device__ __forceinline__ bool partial(const Parameters& p, const Sequence& sequence, int row, int column) {
{% else %}
// Whether columns [column, column + 64) reach beyond the sequence.
__device__ __forceinline__ bool partial(const Parameters& p, const Sequence& sequence, int column) {
{% endif %}
{% if diagonal %}
  row += sequence.diagonal(p);
{% endif %}
  return column + kWgmmaM > sequence.columns(p)
{%- if bounds_right %} || column + kWgmmaM - 1 > row + p.right{% endif %}
{%- if bounds_left %} ||
         column < row + kQRows - 1 - p.left{% endif %};
}

// Hides what does not attend. wgmma gives lane l rows l / 4 and l / 4 + 8 of its warp's 16, which are
// columns of the scores, and of every 8 columns, rows of q, 2 (l % 4) and the next.
{% if bounds_right %}
__device__ __forceinline__ void mask(float (&scores)[kScores], const Parameters& p, const Sequence& sequence, int row,
                                     int column) {
  row += {{ "sequence.diagonal(p) + " if diagonal }}threadIdx.x % 4 * 2;
{% else %}
__device__ __forceinline__ void mask(float (&scores)[kScores], const Parameters& p, const Sequence& sequence,
                                     int column) {
{% endif %}
  column += threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r, column += 8) {
{% if bounds_right %}
    const int begin = column - p.right - row;
{% endif %}
    const int end = column >= sequence.columns(p) ? 0 : {{ "column + p.left + 1 - row" if bounds_left else "kQRows" }};
    CUTE_UNROLL
    for (int i = 0; i < kScores / 2; ++i) {
      const int place = i / 2 * 8 + i % 2;
      if (place >= end{% if bounds_right %} || place < begin{% endif %}) scores[i / 2 * 4 + 2 * r + i % 2] = __uint_as_float(kHidden);
    }
  }
}

{% endif %}
// The statistics of the two rows of q that a thread has of the 8 of fragment i.
__device__ __forceinline__ float2 statistics(const float* of_rows, int i) {
  return reinterpret_cast<const float2*>(of_rows)[i * 4 + threadIdx.x % 4];
}

// A q tile: its first row, its number in storage, and whether the step's number is odd{{ ", and half of it" if operation.dropout }}.
struct Step {
  int row, tile;
  uint32_t parity{{ ", half_parity" if operation.dropout }};
{% if operation.blocks %}
  int mask;  // of a listed tile, -1: all of it counts
{% endif %}
{% if scored %}
  int head;  // of q
{% endif %}
{% if staged %}
  int next_row, next_head;  // of the step after, -1: there is none
{% endif %}
};

// What a consumer's steps work with, beside registers.
struct Consumer {
  const Parameters& p;
  SharedStorage& shared;
  const Work& work;
  uint64_t k, v, q, d_o, ds;  // descriptors; of q and do the first stage's
  int consumer, part;  // its number; the work's part
  int row;             // of a q tile: the first that it has scores of
  int box, own, column;  // 64 rows of k and v of the tile: their number; in a descriptor; the first's column
  Scaling scaling;
{% if mask_alone %}
  bool hides;  // whether the mask may hide any of the tile
{% endif %}

  // From all columns of the head dimension to those of a part, in a descriptor.
  template <int kRows> __device__ __forceinline__ static int columns(int part) {
    return part * (kBoxes / kParts) * Tile<kRows>::kBoxBytes / 16;
  }
{% if operation.dim_v %}
  template <int kRows> __device__ __forceinline__ static int value_columns(int part) {
    return part * (kValueBoxes / kParts) * ValueTile<kRows>::kBoxBytes / 16;
  }
{% if schedule.cluster_split == "columns" %}
  __device__ __forceinline__ uint64_t own_v() const { return v + box * kWgmmaM * kValueSpan / 16; }
{% endif %}
{% endif %}
  __device__ __forceinline__ uint64_t staged_q(Position at) const { return q + at.stage * kQBytes / 16; }
  __device__ __forceinline__ uint64_t staged_do(Position at) const { return d_o + at.stage * {{ do_bytes }} / 16; }
{% if operation.blocks %}
  // What the producer says of a q tile that has arrived: under products, since shared memory takes its time.
  __device__ __forceinline__ void read(Step& step, Position at) const {
    step.mask = shared.mask[at.stage];
{% if schedule.accumulate == "direct" %}
    step.tile = shared.tile[at.stage];
{% endif %}
  }
{% endif %}
  __device__ __forceinline__ const uint8_t* own_ds(Step step) const {
    return shared.ds[{{ "step.parity" if layout.ds_stages == 2 else "0" }}][box];
  }
  __device__ __forceinline__ uint64_t staged_ds(Step step) const {
    return ds{{ " + step.parity * (kKvTile / kWgmmaM * kDsBoxBytes / 16)" if layout.ds_stages == 2 }};
  }
{% if operation.dropout %}

  // Reads which weights of a q tile are dropped.
  __device__ __forceinline__ void take(Words& words, Step step) const {
    const int lane = threadIdx.x % 32, patches = (consumer * 4 + threadIdx.x / 32 % 4) * (kQRows / 16);
    const auto* own = reinterpret_cast<const uint32_t(*)[8]>(shared.words[step.parity] + patches);
    shared.words_full[step.parity].wait(step.half_parity);
    CUTE_UNROLL
    for (int i = 0; i < kQRows / 16; ++i)
      words[i] = own[i][lane % 4 * 2 + lane / 16] >> (lane / 4 % 2 * 8 + 2 - lane / 8 % 2 * 2);
    release(shared.words_empty[step.parity]);
  }
{% endif %}
};

{% if operation.blocks %}
{% include "attention_backward/shown.cuh" %}

{% endif %}
{% if scored %}
{% if staged %}
__device__ __forceinline__ Staging& staging_of(const Consumer& c) {
  return c.shared.staging[c.consumer * 4 + threadIdx.x / 32 % 4];
}
// Begins to copy what changes the scores of a q tile.
__device__ __forceinline__ void begin_staging(const Consumer& c, int row, int head) {
{% if mask_alone %}
  if (!c.hides) return;
{% endif %}
  Score::stage(c.p, staging_of(c), c.work.sequence, head, row + c.row, c.column + threadIdx.x / 32 % 4 * 16);
}
// Begins to copy what changes those of the step after, when all warps have read this one's: after meet(), where
// the fewest registers are in use.
__device__ __forceinline__ void begin_staging_ahead(const Consumer& c, Step step) {
  if (step.next_row >= 0) begin_staging(c, step.next_row, step.next_head);
}
{% endif %}
// What is added to the scores of a step{{ ", in base 2" if operation.bias == "none" }}.
__device__ __forceinline__ Score score_of(const Consumer& c, Step step) {
  const int column = c.column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  return Score(c.p, {{ "staging_of(c), " if staged }}c.work.sequence, step.head, step.row + c.row + threadIdx.x % 4 * 2,
               column{{ ", kLog2E" if operation.bias == "none" }});
}
{% if operation.bias != "none" %}

{% if capped %}
// The number whose exponential the forward pass took, of the tanh of a score and what is added to it.
{% else %}
// The number whose exponential the forward pass took, of a score and what is added to it.
{% endif %}
__device__ __forceinline__ float biased(const Consumer& c, float x, float term) {
{% if capped %}
  if (x < -2) return __int_as_float(0xff800000);  // hidden: next to the largest biases kHidden would not be small enough
{% endif %}
  return fmaf(x, c.scaling.factor, term);
}

// A score less its row's lse, which is at least as large as any. Where both are large a score may be one step of fp32
// above what the forward pass had; NaN stays.
__device__ __forceinline__ float below(float lse, float score) {
  float difference;
  asm("min.NaN.f32 %0, %1, 0f00000000;" : "=f"(difference) : "f"(score - lse));
  return difference;
}
{% endif %}

{% endif %}
{% if mask_alone %}
// Hides the scores that the mask hides.
__device__ __forceinline__ void hide(const Consumer& c, float (&scores)[kScores], Step step) {
  const Score score = score_of(c, step);
  Score::await();
  CUTE_UNROLL
  for (int i = 0; i < kScores; i += 8) {
    const Score::Eight eight = score.read(i);
    CUTE_UNROLL
    for (int j = i; j < min(i + 8, kScores); ++j)
      if (score.hides(j, eight)) scores[j] = __uint_as_float(kHidden);
  }
}

{% endif %}
// p = exp(s - lse){{ " over what these sum to" if operation.bias != "none" }}; lse is inf for a fully masked row. s becomes p times its slope.
{% if fused %}
// dp, which is there, becomes ds = p (dp - delta), where dp is 0 if the weight is dropped.
{% endif %}
__device__ __forceinline__ void weigh(const Consumer& c, Weights& weights, float (&scores)[kScores], Step step,
                                      Position at{{ ", Words& words" if operation.dropout }}{{ ", float (&dp)[kScores]" if fused }}) {
{% if capped %}
  c.scaling.cap(scores);
{% endif %}
{% if operation.blocks %}
  if (step.mask >= 0) hide(c, scores, step.mask);
{% else %}
{% if bounds_right %}
  const int row = step.row + c.row;
  if (partial(c.p, c.work.sequence, row, c.column)) mask(scores, c.p, c.work.sequence, row, c.column);
{% else %}
  if (partial(c.p, c.work.sequence, c.column)) mask(scores, c.p, c.work.sequence, c.column);
{% endif %}
{% endif %}
{% if mask_alone %}
  if (c.hides) hide(c, scores, step);
{% elif scored %}
  const Score score = score_of(c, step);
{% if reads %}
  Score::Eight eight{};
{% endif %}
{% endif %}
{% if staged and not mask_alone %}
  Score::await();
{% endif %}
{% if operation.dropout and not fused %}
  c.take(words, step);
{% endif %}
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 lse = statistics(c.shared.statistics[at.stage].rows[0] + c.row, i);
{% if operation.bias != "none" %}
    const float2 correction = statistics(c.shared.statistics[at.stage].rows[2] + c.row, i);
{% endif %}
{% if reads and not mask_alone %}
    if (i % 2 == 0) eight = score.read(4 * i);
{% endif %}
    CUTE_UNROLL
    for (int j = 0; j < 4; j += 2) {
      float &x = scores[4 * i + j], &y = scores[4 * i + j + 1];
{% if scored and not mask_alone %}
{% if operation.masked %}
      if (score.hides(4 * i + j, eight)) x = __uint_as_float(kHidden);
      if (score.hides(4 * i + j + 1, eight)) y = __uint_as_float(kHidden);
{% endif %}
{% if operation.bias == "none" %}
      const float low = fast_exp2(fmaf(x, c.scaling.exponent, {{ "score.add(4 * i + j, -lse.x)" if adds else "-lse.x" }}));
      const float high = fast_exp2(fmaf(y, c.scaling.exponent, {{ "score.add(4 * i + j + 1, -lse.y)" if adds else "-lse.y" }}));
{% else %}
      const float low_score = biased(c, x, score.term(4 * i + j, eight));
      const float high_score = biased(c, y, score.term(4 * i + j + 1, eight));
      const float low = fast_exp2(fmaf(below(lse.x, low_score), c.scaling.exponent, -correction.x));
      const float high = fast_exp2(fmaf(below(lse.y, high_score), c.scaling.exponent, -correction.y));
{% endif %}
{% else %}
      const float low = fast_exp2(x * c.scaling.exponent - lse.x), high = fast_exp2(y * c.scaling.exponent - lse.y);
{% endif %}
{% if operation.dropout %}
      const bool drops_low = is_dropped(words, 4 * i + j), drops_high = is_dropped(words, 4 * i + j + 1);
      weights[i / 2][i % 2 * 2 + j / 2] = pair(drops_low ? 0 : low, drops_high ? 0 : high);
{% else %}
      weights[i / 2][i % 2 * 2 + j / 2] = pair(low, high);
{% endif %}
      x = {{ "steepen(low, x)" if capped else "low" }};
      y = {{ "steepen(high, y)" if capped else "high" }};
{% if fused %}
      const float2 delta = statistics(c.shared.statistics[at.stage].rows[1] + c.row, i);
      dp[4 * i + j] = fmaf(drops_low ? 0 : x, dp[4 * i + j], -x * delta.x);
      dp[4 * i + j + 1] = fmaf(drops_high ? 0 : y, dp[4 * i + j + 1], -y * delta.y);
{% endif %}
    }
  }
}

{% if not fused %}
// dp becomes ds = p (dp - delta); `weights` are p times its slope, which weigh() left.
__device__ __forceinline__ void differentiate(const Consumer& c, float (&dp)[kScores], const float (&weights)[kScores],
                                              Position at{{ ", const Words& words" if operation.dropout }}) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 delta = statistics(c.shared.statistics[at.stage].rows[1] + c.row, i);
    CUTE_UNROLL
{% if operation.dropout %}
    for (int j = 0; j < 4; ++j) {  // dp is 0 where the weight is dropped
      const float weight = weights[4 * i + j], less = -weight * (j % 2 ? delta.y : delta.x);
      dp[4 * i + j] = is_dropped(words, 4 * i + j) ? less : fmaf(weight, dp[4 * i + j], less);
    }
{% else %}
    for (int j = 0; j < 4; ++j) dp[4 * i + j] = weights[4 * i + j] * (dp[4 * i + j] - (j % 2 ? delta.y : delta.x));
{% endif %}
  }
}
{% endif %}

// Writes p^T or ds^T transposed for all to read: rows of q, 64 rows of k side by side in a swizzled row of
// 128 bytes.
__device__ __forceinline__ void write(const Consumer& c, const uint8_t* box, const Weights& weights) {
  const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, piece = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  const uint32_t address = cute::cast_smem_ptr_to_uint(box) + (c.row + row) * 128 + (piece ^ lane % 8) * 16;
  constexpr int kPairs = kQRows / 16;  // of fragments
  CUTE_UNROLL
  for (int i = 0; i < kPairs; ++i)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], { %1, %2, %3, %4 };"
                 ::"r"(address + i * 16 * 128), "r"(weights[i][0]), "r"(weights[i][1]), "r"(weights[i][2]),
                 "r"(weights[i][3])
                 : "memory");
  if constexpr (kQRows % 16 != 0)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], { %1, %2 };"
                 ::"r"(address + kPairs * 16 * 128), "r"(weights[kPairs][0]), "r"(weights[kPairs][1])
                 : "memory");
  cutlass::arch::fence_view_async_shared();  // make the writes visible to wgmma before meet() lets it read
}

// Where the consumers meet: in a step, when all of ds is written; at the end, when all have multiplied.
__device__ __forceinline__ void meet() { cutlass::arch::NamedBarrier::sync(kConsumers * 128, 1); }

{% if operation.bias_gradient %}
{% include "attention_backward/scores.cuh" %}

{% endif %}
{% include "attention_backward/share_" ~ schedule.cluster_split ~ ".cuh" %}

{% include "attention_backward/accumulate_" ~ schedule.accumulate ~ ".cuh" %}

{% if held %}
{% include "attention_backward/held_some.cuh" %}

{% endif %}
{% include "attention_backward/steps_" ~ steps_part ~ ".cuh" %}

{% include "attention_backward/gradients_" ~ gradients_part ~ ".cuh" %}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, const Work{{ "" if operation.dropout else "&" }} work, int consumer) {
{% if layout.parts > 1 %}
  const int part = __shfl_sync(~0u, work.part, 0);  // the shuffle makes it warp-uniform
{% else %}
  constexpr int part = 0;
{% endif %}
{% if shares_rows %}
  const int box = part, row = consumer * kQRows;
  constexpr int own = 0;
{% else %}
  const int box = consumer, own = box * kWgmmaM * kSpan / 16;
  constexpr int row = 0;
{% endif %}
  const uint64_t k = matrix(shared.k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, {{ layout.layout_type }});
  const uint64_t v = matrix(shared.v, {{ value_tile }}<kKvRows>::kBoxBytes, 8 * {{ value_span }}, {{ layout.v_layout_type }});
  const uint64_t q = matrix(shared.q[0], Tile<kQTile>::kBoxBytes, 8 * kSpan, {{ layout.layout_type }});
  const uint64_t d_o = matrix(shared.d_o[0], {{ value_tile }}<kQTile>::kBoxBytes, 8 * {{ value_span }}, {{ layout.v_layout_type }});
  const uint64_t ds = matrix(shared.ds[0][0], kDsBoxBytes, 8 * 128, 1);
  const Consumer c{p, shared, work, k, v, q, d_o, ds, consumer, part, row, box, own, work.column + box * kWgmmaM,
{% if mask_alone %}
                   Scaling(p), __shfl_sync(~0u, work.hides, 0) != 0};
{% else %}
                   Scaling(p)};
{% endif %}
{% if operation.dim_v %}
  float dk[kGradients], dv[kValueGradients];
  CUTE_UNROLL
  for (int i = 0; i < kGradients; ++i) dk[i] = 0;
  CUTE_UNROLL
  for (int i = 0; i < kValueGradients; ++i) dv[i] = 0;
{% else %}
  float dk[kGradients], dv[kGradients];
  CUTE_UNROLL
  for (int i = 0; i < kGradients; ++i) dk[i] = dv[i] = 0;
{% endif %}
  fence(dk);  // else the compiler takes the zeros before setmaxnreg, and has too few registers for them there
  fence(dv);
  if (work.begin < work.end) {
    Steps steps;
    Position position{0, 0};
{% if operation.blocks %}
    const int count = work.end;
{% else %}
    const int count = (work.end - work.begin) * {{ "((p.sharing - rank() + kCluster - 1) / kCluster)" if schedule.cluster > 1 else "p.sharing" }};
{% endif %}
{% if staged %}
    begin_staging(c, walk(p, work, work.begin) * kQTile, work.head * p.sharing{{ plus_rank }});
{% endif %}
    shared.k_full.wait(0);
    steps.begin(c, position);  // waits for v, too
{% if operation.blocks %}
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      steps.next(c, dk, dv, {0, 0, i % 2u{{ ", i / 2 % 2u" if operation.dropout }}}, position{{ ", i + 1 < count" if schedule.overlap }});
      position.advance();
    }
{% else %}
    int n = work.begin, tile = work.first_tile{{ " + rank() * p.q_tiles" if schedule.cluster > 1 }};  // of the head's first q tile
{% if scored %}
    int head = work.head * p.sharing{{ plus_rank }};
{% endif %}
    CUTE_NO_UNROLL
    for (int i = 0; i < count; ++i) {
      const int m = walk(p, work, n);
{% if staged %}
      Step step{m * kQTile, tile + m, i % 2u{{ ", i / 2 % 2u" if operation.dropout }}, head};
{% else %}
      steps.next(c, dk, dv, {m * kQTile, tile + m, i % 2u{{ ", i / 2 % 2u" if operation.dropout }}{{ ", head" if scored }}}, position{{ ", i + 1 < count" if schedule.overlap }});
      position.advance();
{% endif %}
      if (++n == work.end) {  // on to the next head
        n = work.begin;
        tile += {{ "kCluster * " if schedule.cluster > 1 }}p.q_tiles;
{% if scored %}
        head += {{ "kCluster" if schedule.cluster > 1 else "1" }};
{% endif %}
      }
{% if staged %}
      step.next_row = i + 1 < count ? walk(p, work, n) * kQTile : -1;
      step.next_head = head;
      steps.next(c, dk, dv, step, position{{ ", i + 1 < count" if schedule.overlap }});
      position.advance();
{% endif %}
    }
{% endif %}
{% if ends %}
    steps.end(c{{ ", count" if shares_rows }});
{% endif %}
  }
  store_gradients(c, dk, dv);
}
