// The steps of a consumer, one for each q tile: one after the other, so that the least registers are in
// use at a time. What overlaps is left to the warpgroups, which run freely.
struct Steps {
  static __device__ __forceinline__ void first(const Consumer&, float (&)[kScores], Position) {}

  static __device__ __forceinline__ void next(const Consumer& c, float (&)[kScores], float (&dk)[kGradients], float (&dv)[kGradients], Step step, Position at, bool) {
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights, ds;
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k + c.own, c.staged_q(at));
    c.shared.do_full[at.stage].wait(at.phase);
    multiply_scores(dp, c.v + c.own, c.staged_do(at));
    cute::warpgroup_wait<1>();  // the scores are there; dp's products run on
    fence(scores);
    weigh(c, weights, scores, step, at);
    cute::warpgroup_wait<0>();
    fence(dp);
    differentiate(c, dp, scores, at);
    multiply_gradient(dv, weights, c.staged_do(at) + c.columns<kQTile>());
    pack(ds, dp);
    await_ds(c, step);
    write(c, ds, step);
    meet();
    multiply_query(dq, c.staged_ds(step), c.k + c.columns<kKvTile>(), c.consumer);
    multiply_gradient(dk, ds, c.staged_q(at) + c.columns<kQTile>());
    cute::warpgroup_wait<1>();
    fence(dv);
    fence(dq);
    release(c.shared.do_empty[at.stage]);
    release_ds(c);
    accumulate(c, dq, step);
    cute::warpgroup_wait<0>();
    fence(dk);
    release(c.shared.q_empty[at.stage]);
  }

  static __device__ __forceinline__ void last(float (&)[kScores]) {}
};
