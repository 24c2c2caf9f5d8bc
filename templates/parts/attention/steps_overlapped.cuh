// Steps of the loop over kv tiles: the scores of one tile are multiplied, then the output of the tile
// before, and the softmax of the one runs under the other's products.
struct Steps {
  static __device__ __forceinline__ Position previous(Position position) {
    const bool wraps = position.stage == 0;
    return {wraps ? kStages - 1 : position.stage - 1, position.phase ^ wraps};
  }

  // Waits for the next tile of k. The compiler moves arithmetic across a wait for products, but not across
  // this one: softmax has to be done before the output's products are waited for, or nothing overlaps.
  static __device__ __forceinline__ void await_next(Consumer& c, bool more) {
    c.position.advance();
    if (more) c.shared.k_full[c.position.stage].wait(c.position.phase);
  }

  // The next tile is for rows further down.
  static __device__ __forceinline__ void skip(Consumer& c) {
    const Position at = c.position;
    c.turns.begin();
    c.turns.pass();
    c.shared.k_full[at.stage].wait(at.phase);
    release(c.shared.k_empty[at.stage]);
    c.shared.v_full[at.stage].wait(at.phase);
    release(c.shared.v_empty[at.stage]);
    c.position.advance();
  }

  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], float (&)[kOutputs], Weights& weights, Rows& rows, int n, bool masked, bool more) {
    c.shared.k_full[c.position.stage].wait(c.position.phase);
    c.turns.begin();
    multiply_scores(scores, c.q, c.k + c.position.stage * kStageBytes / 16);
    c.turns.pass();
    cute::warpgroup_wait<0>();
    fence(scores);
    release(c.shared.k_empty[c.position.stage]);
    c.scaling.cap(scores);
    if (masked) mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column);
    softmax<true, true>(scores, rows, c.scaling.exponent);
    await_next(c, more);
    pack(weights, scores);
  }

  template <bool kMasked>
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs], Weights& weights, Rows& rows, int n, bool more) {
    const Position before = previous(c.position);
    const int stage = c.position.stage;
    c.turns.begin();
    multiply_scores(scores, c.q, c.k + stage * kStageBytes / 16);
    if (kRescalesBetween) rescale(output, rows);
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.v + before.stage * kStageBytes / 16);
    c.turns.pass();
    cute::warpgroup_wait<1>();  // the scores are there; the output's products run on
    fence(scores);
    release(c.shared.k_empty[stage]);
    c.scaling.cap(scores);
    if (kMasked) mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column);
    softmax<false, kMasked>(scores, rows, c.scaling.exponent);
    await_next(c, more);
    cute::warpgroup_wait<0>();
    fence(output);
    release(c.shared.v_empty[before.stage]);
    pack(weights, scores);
    if (!kRescalesBetween) rescale(output, rows);
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&output)[kOutputs], Weights& weights, Rows& rows) {
    if (kRescalesBetween) rescale(output, rows);
    const Position before = previous(c.position);
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.v + before.stage * kStageBytes / 16);
    cute::warpgroup_wait<0>();
    fence(output);
    release(c.shared.v_empty[before.stage]);
  }
};
