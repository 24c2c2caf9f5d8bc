// Steps of the loop over kv tiles, one after the other: the scores become weights in place, and only
// another warpgroup's products run under the softmax.
struct Steps {
  template <bool kFirst, bool kMasked>
  static __device__ __forceinline__ void step(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs], Weights& weights, Rows& rows, int n, bool masked) {
    c.shared.k_full[c.position.stage].wait(c.position.phase);
    c.turns.begin();
    multiply_scores(scores, c.q, c.k + c.position.stage * kStageBytes / 16);
    c.turns.pass();
    cute::warpgroup_wait<0>();
    fence(scores);
    fence(output);
    release(c.shared.k_empty[c.position.stage]);
    if (!kFirst) release(c.shared.v_empty[(c.position.stage == 0 ? kStages : c.position.stage) - 1]);
    c.scaling.cap(scores);
    if (masked) mask(scores, c.p, c.columns, c.row, n * kKvTile + c.column);
    softmax<kFirst, kMasked>(scores, rows, c.scaling.exponent);
    if (!kFirst) rescale(output, rows);
    pack(weights, scores);
    c.shared.v_full[c.position.stage].wait(c.position.phase);
    multiply_output(output, weights, c.v + c.position.stage * kStageBytes / 16);
    c.position.advance();
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

  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs], Weights& weights, Rows& rows, int n, bool masked, bool) {
    step<true, true>(c, scores, output, weights, rows, n, masked);
  }

  template <bool kMasked>
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs], Weights& weights, Rows& rows, int n, bool) {
    step<false, kMasked>(c, scores, output, weights, rows, n, kMasked);
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&output)[kOutputs], Weights&, Rows&) {
    cute::warpgroup_wait<0>();
    fence(output);
    release(c.shared.v_empty[(c.position.stage == 0 ? kStages : c.position.stage) - 1]);
  }
};
