// ---- Consumer: scores, softmax, output of its 64 rows ---------------------------------------------
{% include "_attention/registers.cuh" %}
{% if operation.eight %}
{% include "attention_forward/registers_eight.cuh" %}
{% endif %}

// Issues scores = q k^T; they run on while the warpgroup goes on.
__device__ __forceinline__ void multiply_scores(float (&scores)[kScores], uint64_t q, uint64_t k) {
{{ "  anything(scores)" if operation.eight else "  fence(scores)" }};
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kDim / ScoresWgmma::kK; ++step)
    ScoresWgmma::fma(q + Tile<kWgmmaM>::columns(step), k + Tile<kKvTile>::columns(step), {{ "sums_of(scores)" if operation.scores == "int8" else "scores" }}, step > 0);
  cute::warpgroup_commit_batch();
}

{% if operation.promoted %}
// Issues output = weights v: the products of one kv tile.
{% else %}
// Issues output += weights v.
{% endif %}
__device__ __forceinline__ void multiply_output(float (&output)[kOutputs], const Weights& weights, uint64_t v) {
{{ "  anything(output)" if operation.promoted else "  fence(output)" }};
  cute::warpgroup_arrive();
  CUTE_UNROLL
  for (int step = 0; step < kKvTile / OutputWgmma::kK; ++step)
    OutputWgmma::fma(weights[step], v + {{ "Values::keys(step)" if values_apart else "step * OutputWgmma::kK * kSpan / 16" }}, output, {{ "step > 0" if operation.promoted else "true" }});
  cute::warpgroup_commit_batch();
}

{% if not operation.promoted %}
__device__ __forceinline__ void rescale(float (&output)[kOutputs], const Rows& rows) {
{% if schedule.rescale == "needed" %}
  // Only where the maximum of one of the warp's rows grew.
  if (!__any_sync(~0u, rows.rescale[0] != 1 || rows.rescale[1] != 1)) return;
{% endif %}
  CUTE_UNROLL
  for (int i = 0; i < kOutputs; ++i) output[i] *= rows.rescale[i / 2 % 2];
}
{% endif %}

// A thread's first row in its warpgroup's 64; the other is 8 below.
__device__ __forceinline__ int thread_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }

// What a consumer's steps work with, beside registers.
struct Consumer {
  const Parameters& p;
  SharedStorage& shared;
  int index;         // among the consumers
  uint64_t first_q, q, k, v;  // descriptors: of the first stages, and of the q that is worked on
  Scaling scaling;
{% if schedule.pingpong %}
  Turns turns;
{% endif %}
  Ring<kQStages> at_q;
  Position position;
  int begin;         // the last kv tile: they are walked from the right to the left
  int columns;       // of the sequence
{% if operation.blocks %}
  int row, column;   // the thread's first, in a tile
  int masks;         // the number of the mask of the tile in place 0 of its list, if it had one
{% else %}
{% if bounds_right %}
  int row;           // the thread's first, counted from where bounds are relative to
{% endif %}
  int column;        // the thread's first in a tile
{% endif %}
{% if scored %}
  Sequence sequence;
  int head, own_row;  // the thread's first row as it is
{% endif %}
{% if mask_alone %}
  int shown_begin, shown_end;  // tiles of which the mask hides nothing
{% endif %}
{% if operation.dropout %}
  Ring<kWordStages> at_words;
{% endif %}

{% if not operation.eight %}
  // Of the tile before; its v is read one step later than its k.
  __device__ __forceinline__ Position before() const {
    const bool wraps = position.stage == 0;
    return {wraps ? kStages - 1 : position.stage - 1, position.phase ^ wraps};
  }
{% endif %}
  // Waits for the next q, and with it for what is to be done.
  __device__ __forceinline__ Work await_work() {
    shared.q_full[at_q.stage][index].wait(at_q.phase);
    q = first_q + at_q.stage * (kConsumers * kQBytes / 16);
    return shared.work[at_q.stage][index];
  }
  __device__ __forceinline__ void release_q() const { release(shared.q_empty[at_q.stage][index]); }

{% if layout.q_stages == 1 %}
  // The scores of tile n are there: k's stage is released, and after the last tile q's only stage.
  __device__ __forceinline__ void release_operands(int n) const {
{% else %}
  // The scores of a tile are there: k's stage is released.
  __device__ __forceinline__ void release_operands() const {
{% endif %}
    release(shared.k_empty[position.stage]);
{% if layout.q_stages == 1 %}
    if (n == begin) release_q();
{% endif %}
  }
  __device__ __forceinline__ uint64_t staged_k() const { return k + position.stage * (kStageBytes / 16); }
  __device__ __forceinline__ uint64_t staged_v(int stage) const { return v + stage * ({{ "Values::kBytes" if values_apart else "kStageBytes" }} / 16); }

{% if scored %}
{% if staged %}
  __device__ __forceinline__ Staging& staging() const { return shared.staging[index * 4 + threadIdx.x / 32 % 4]; }
  // Begins to copy what changes the scores of tile n, of rows from the warp's first on.
  __device__ __forceinline__ void stage(const Sequence& sequence, int head, int row, int n) const {
    Score::stage(p, staging(), sequence, head, row, n * kKvTile);
  }
{% endif %}
{% if leans %}
  // Changes the scores of tile n, but for what rows.offset is to add to them.
  __device__ __forceinline__ void change(float (&scores)[kScores], Rows& rows, int n) const {
{% elif mask_alone %}
  // Hides the scores of tile n that the mask hides; kEvery: it may hide some of every tile, one after the other.
  template <bool kEvery = false>
  __device__ __forceinline__ void change(float (&scores)[kScores], int n) const {
    if (kEvery || hides(n)) hide(scores, n);
    if (n > begin && (kEvery || hides(n - 1)))
      stage(sequence, head, own_row - int(threadIdx.x) % 32 / 4, n - 1);
  }
  __device__ __forceinline__ bool hides(int n) const { return n < shown_begin || n >= shown_end; }
  __device__ __forceinline__ void hide(float (&scores)[kScores], int n) const {
{% else %}
  // Changes the scores of tile n.
  __device__ __forceinline__ void change(float (&scores)[kScores], int n) const {
{% endif %}
{% if operation.bias != "none" %}
    const Score score(p, {{ "staging(), " if staged }}sequence, head, own_row, n * kKvTile + column);
{% else %}
    {{ "const " if not leans }}Score score(p, {{ "staging(), " if staged }}sequence, head, own_row, n * kKvTile + column,
                      __fdividef(kLog2E, scaling.exponent));
{% endif %}
{% if staged %}
    Score::await();
{% endif %}
{% if leans %}
    const int first_row = own_row - int(threadIdx.x) % 32 / 4;
    if (score.leans(first_row + sequence.columns(p) - sequence.rows(p) - n * kKvTile)) {
      CUTE_UNROLL
      for (int r = 0; r < 2; ++r) rows.offset[r] = score.offset(2 * r);
      add<true>(scores, score);
    } else {
      rows.offset[0] = rows.offset[1] = 0;
      add<false>(scores, score);
    }
  }
  template <bool kLeans>
  __device__ __forceinline__ void add(float (&scores)[kScores], const Score& score) const {
{% endif %}
    CUTE_UNROLL
    for (int i = 0; i < kScores; i += 8) {
{% if reads %}
      const Score::Eight eight = score.read(i);
{% endif %}
      CUTE_UNROLL
      for (int j = i; j < i + 8; ++j)
        scores[j] = {{ changed }};
    }
{% if staged %}
    __syncwarp();  // all lanes have read what is staged, before one copies the next tile's there
{% if not mask_alone %}
    if (n > begin) stage(sequence, head, own_row - int(threadIdx.x) % 32 / 4, n - 1);
{% endif %}
{% endif %}
  }

{% endif %}
{% if skips %}
  // Passes over a tile that the CTA loads for rows further down: takes its turn, and releases k and v.
  __device__ __forceinline__ void skip() {
{% if schedule.pingpong %}
    turns.begin();
    turns.pass();
{% endif %}
    shared.k_full[position.stage].wait(position.phase);
    release(shared.k_empty[position.stage]);
    shared.v_full[position.stage].wait(position.phase);
    release(shared.v_empty[position.stage]);
    position.advance();
{% if operation.dropout %}
    shared.words_full[at_words.stage].wait(at_words.phase);
    release(shared.words_empty[at_words.stage]);
    at_words.advance();
{% endif %}
  }
{% endif %}
{% if operation.dropout %}

  // Reads which weights of the next tile are dropped.
  __device__ __forceinline__ void take(Words& words) {
    const int lane = threadIdx.x % 32, patches = (index * 4 + threadIdx.x / 32 % 4) * (kKvTile / 16);
    const auto* own = reinterpret_cast<const uint32_t(*)[8]>(shared.words[at_words.stage] + patches);
    shared.words_full[at_words.stage].wait(at_words.phase);
    CUTE_UNROLL
    for (int i = 0; i < kKvTile / 16; ++i)
      words[i] = own[i][lane / 8 * 2 + lane % 4 / 2] << (lane / 4 % 2 * 4 + lane % 2 * 2);
    release(shared.words_empty[at_words.stage]);
    at_words.advance();
  }
{% endif %}
};

{% if operation.blocks %}
{% include "attention_forward/shown.cuh" %}

{% endif %}
{% include "attention_forward/steps_" ~ steps_part ~ ".cuh" %}

// Turns the four lanes of a row around: each has a pair of every block of 8 columns, and gets the four
// pairs of one block, 16 bytes side by side.
__device__ __forceinline__ uint4 gather(uint32_t x0, uint32_t x1, uint32_t x2, uint32_t x3) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(~0u, odd ? x0 : x1, 1), b = __shfl_xor_sync(~0u, odd ? x2 : x3, 1);
  (odd ? x0 : x1) = a;
  (odd ? x2 : x3) = b;
  const uint32_t c = __shfl_xor_sync(~0u, high ? x0 : x2, 2), d = __shfl_xor_sync(~0u, high ? x1 : x3, 2);
  return high ? make_uint4(c, d, x2, x3) : make_uint4(x0, x1, c, d);
}

// Stores o and lse of the warpgroup's rows, from registers: nothing has to wait for staging that is still
// being read. A row that attends to nothing has sum 0: o 0, lse -inf.
{% if column %}
// Its head's sink is one score more, which has no value.
{% endif %}
__device__ __forceinline__ void store(const Consumer& c, const Work& work, const float (&output)[kOutputs],
                                      const Rows& rows) {
  const Sequence& sequence = work.sequence;
  const int lane = threadIdx.x % 4;
{% if operation.weights != "same" %}
  const float value_scale = c.p.v_descale[{{ number }} * c.p.v_descale_batch + work.head / c.p.sharing * c.p.v_descale_head];
{% endif %}
  CUTE_UNROLL
  for (int r = 0; r < 2; ++r) {
    const int row = work.row + thread_row() + 8 * r;
    const bool exists = row < sequence.rows(c.p);
{% if not column %}
    const float sum = quad_sum(rows.sum[r]), inverse = sum == 0 ? 0 : __fdividef({{ "value_scale" if operation.weights != "same" else "1" }}, sum{{ " * c.p.keep" if operation.dropout }});
    if (exists && lane == 0)
{% if operation.bias == "none" %}
      c.p.lse[sequence.lse_at(c.p, work.head, row)] = ({{ maximum }} + fast_log2(sum)) * kLn2;
{% else %}
      c.p.lse[sequence.lse_at(c.p, work.head, row)] = rows.maximum[r] + fast_log2(sum) * kLn2;
{% endif %}
{% else %}
{% if operation.bias == "none" %}
    const float sink = {{ extra_score("c.p", "work.head") }} * kLog2E, maximum = {{ maximum }};
    const float larger = fmaxf(maximum, sink), reference = larger == minus_infinity() ? 0 : larger;
    const float factor = fast_exp2(maximum - reference);
    const float sum = quad_sum(rows.sum[r]) * factor + fast_exp2(sink - reference);
{% else %}
    const float sink = {{ extra_score("c.p", "work.head") }}, maximum = rows.maximum[r];
    const float larger = fmaxf(maximum, sink), reference = larger == minus_infinity() ? 0 : larger;
    const float factor = fast_exp2((maximum - reference) * kLog2E);
    const float sum = quad_sum(rows.sum[r]) * factor + fast_exp2((sink - reference) * kLog2E);
{% endif %}
    const float inverse = sum == 0 ? 0 : __fdividef(factor{{ " * value_scale" if operation.weights != "same" }}, sum{{ " * c.p.keep" if operation.dropout }});
    if (exists && lane == 0)
      c.p.lse[sequence.lse_at(c.p, work.head, row)] = {{ "(reference + fast_log2(sum)) * kLn2" if operation.bias == "none" else "reference + fast_log2(sum) * kLn2" }};
{% endif %}
    Element* o = c.p.o + lane * 8 +
                 sequence.row_at(c.p.o_batch_stride, c.p.o_head_stride, c.p.o_row_stride, work.head, row);
    CUTE_UNROLL
    for (int column = 0; column < {{ value_dim }}; column += 32) {
      const float* x = output + column / 2 + 2 * r;
      const uint4 eight = gather(pair(x[0] * inverse, x[1] * inverse), pair(x[4] * inverse, x[5] * inverse),
                                 pair(x[8] * inverse, x[9] * inverse), pair(x[12] * inverse, x[13] * inverse));
      if (exists && column + lane * 8 < c.p.dim) *reinterpret_cast<uint4*>(o + column) = eight;
    }
  }
}

// Issues the first scores of a piece of work. Where it has none they are of anything and nobody reads them:
// the compiler keeps products asynchronous only where every path issues them.
__device__ __forceinline__ void begin(Consumer& c, float (&scores)[kScores], const Work& work) {
  const bool any = work.more && work.end > work.begin;
{% if mask_alone %}
  c.shown_begin = work.shown_begin;
  c.shown_end = work.shown_end;
  if (any && c.hides(work.end - 1)) c.stage(work.sequence, work.head, work.row + threadIdx.x / 32 % 4 * 16, work.end - 1);
{% elif staged %}
  if (any) c.stage(work.sequence, work.head, work.row + threadIdx.x / 32 % 4 * 16, work.end - 1);
{% endif %}
  if (any) {
    c.shared.k_full[c.position.stage].wait(c.position.phase);
{% if schedule.pingpong %}
    c.turns.begin();
{% endif %}
  }
  multiply_scores(scores, c.q, c.staged_k());
{% if schedule.pingpong %}
  if (any) c.turns.pass();
{% endif %}
}

{% if skips %}
// Passes over all such tiles at the beginning of a piece of work.
__device__ __forceinline__ void skip(Consumer& c, const Work& work) {
  CUTE_NO_UNROLL
  for (int i = 0; i < work.skipped; ++i) c.skip();
}

{% endif %}

// Gives back the last v of a piece of work, once the output's products with it are there.
__device__ __forceinline__ void release_last_v(Consumer& c, float (&output)[kOutputs], int stage) {
  fence(output);
  release(c.shared.v_empty[stage]);
}

__device__ __forceinline__ void consume(const Parameters& p, SharedStorage& shared, int consumer) {
  const uint64_t first_q = matrix(shared.q[0][consumer], 0, 8 * kSpan, {{ layout.layout_type }});
  const uint64_t k = matrix(shared.k[0], 0, 8 * kSpan, {{ layout.layout_type }});
{% if values_apart %}
  const uint64_t v = Values::descriptor(shared.v[0]);
{% else %}
  const uint64_t v = matrix(shared.v[0], Tile<kKvTile>::kBoxBytes, 8 * kSpan, {{ layout.layout_type }});
{% endif %}
  Consumer c{p, shared, consumer, first_q, 0, k, v, {{ "Scaling(p)" if capped or not operation.eight else "Scaling()" }}{{ ", Turns(consumer)" if schedule.pingpong }}};
  c.column = threadIdx.x % 4 * 2;
  float scores[kScores], output[kOutputs]{{ ", product[kOutputs]" if operation.promoted }};
  Work work = c.await_work();
{% if skips %}
  skip(c, work);
{% endif %}
  begin(c, scores, work);
  while (work.more) {
    c.begin = work.begin;
    c.columns = work.sequence.columns(p);
{% if operation.blocks %}
    c.row = consumer * kWgmmaM + thread_row();
    c.masks = work.masks - work.full_end;
{% else %}
{% if bounds_right %}
    c.row = work.row + {{ "work.sequence.diagonal(p) + " if diagonal }}thread_row();
{% endif %}
{% endif %}
{% if scored %}
    c.sequence = work.sequence;
    c.head = work.head;
    c.own_row = work.row + thread_row();
{% endif %}
{% if operation.eight %}
    c.scaling.begin(p, work.sequence, work.head, work.row + thread_row());
{% endif %}
    Rows rows{ {minus_infinity(), minus_infinity()}, {0, 0}, {{ "{0, 0}, " if leans }}{1, 1} };
    CUTE_UNROLL
    for (int i = 0; i < kOutputs; ++i) output[i] = 0;
    Work next;
    if (work.end > work.begin) {
      Weights weights;
      int n = work.end - 1;
{% if operation.eight %}
      Steps::first(c, scores, n);
      CUTE_NO_UNROLL
      for (; n > work.begin && n >= work.full_end; --n) Steps::next<true>(c, scores, {{ outputs }}, weights, rows, n);
      CUTE_NO_UNROLL
      for (; n > work.begin{% if bounds_left %} && n >= work.full_begin{% endif %}; --n) Steps::next<false>(c, scores, {{ outputs }}, weights, rows, n);
{% if bounds_left %}
      CUTE_NO_UNROLL
      for (; n > work.begin; --n) Steps::next<true>(c, scores, {{ outputs }}, weights, rows, n);
{% endif %}
      Steps::weigh(c, scores, {{ product }}, weights, rows, n, n >= work.full_end{% if bounds_left %} || n < work.full_begin{% endif %});
      const int stage = c.position.stage;
      Steps::last(c, {{ product }}, weights);
{% else %}
      Steps::first(c, scores, {{ "output, " if not schedule.overlap }}weights, rows, n, n >= work.full_end{% if bounds_left %} || n < work.full_begin{% endif %});
      CUTE_NO_UNROLL
      for (--n; n >= work.full_end; --n) Steps::next<true>(c, scores, output, weights, rows, n);
      CUTE_NO_UNROLL
{% if mask_alone %}
      for (; work.shown_begin >= work.shown_end && n >= work.{{ "full_begin" if bounds_left else "begin" }}; --n)  // without branches, which take time
        Steps::next<false, true>(c, scores, output, weights, rows, n);
      CUTE_NO_UNROLL
{% endif %}
      for (; n >= work.{{ "full_begin" if bounds_left else "begin" }}; --n) Steps::next<false>(c, scores, output, weights, rows, n);
{% if bounds_left %}
      CUTE_NO_UNROLL
      for (; n >= work.begin; --n) Steps::next<true>(c, scores, output, weights, rows, n);
{% endif %}
      const int stage = c.before().stage;
{% if schedule.overlap %}
      Steps::last(c, output, weights{{ ", rows" if rescales_between }});
{% endif %}
{% endif %}
{% if layout.q_stages > 1 %}
      c.release_q();
{% endif %}
      c.at_q.advance();
      next = c.await_work();
{% if skips %}
      if (next.skipped == 0) {
        // The next tile's first scores are multiplied while this tile's output is stored.
        begin(c, scores, next);
        cute::warpgroup_wait<1>();
        release_last_v(c, {{ product }}, stage);
      } else {  // what is skipped may be loaded to the stage of this tile's v, which must be released first
        cute::warpgroup_wait<0>();
        release_last_v(c, {{ product }}, stage);
        skip(c, next);
        begin(c, scores, next);
      }
{% else %}
      // The next tile's first scores are multiplied while this tile's output is stored.
      begin(c, scores, next);
      cute::warpgroup_wait<1>();
      release_last_v(c, {{ product }}, stage);
{% endif %}
{% if operation.promoted %}
      add(output, product, rows);
{% endif %}
    } else {
      cute::warpgroup_wait<0>();
      c.release_q();
      c.at_q.advance();
      next = c.await_work();
{% if skips %}
      skip(c, next);
{% endif %}
      begin(c, scores, next);
    }
    store(c, work, output, rows);
    work = next;
  }
  cute::warpgroup_wait<0>();
{% if schedule.pingpong %}
  c.turns.finish();
{% endif %}
}
