// The steps of a consumer of a pair, one for each q tile: one after the other, so that a stage of q and do may
// be the only one. Within a step dp is multiplied while p is computed, dv while ds is, the block's own half of
// dq while the peer's ds is on its way, and dk while dq leaves.
struct Steps {
  __device__ __forceinline__ void begin(const Consumer&, Position) {}  // nothing runs ahead of a step

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[kGradients], Step step,
                                       Position at, bool) {
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights;  // p^T, then ds^T
    const uint64_t peer_ds = c.staged_ds(step) + (1 - c.box) * kDsBoxBytes / 16;
    const uint64_t own_ds = c.staged_ds(step) + c.box * kDsBoxBytes / 16;
    const uint64_t p = matrix(c.shared.p[step.parity], kDsBoxBytes, 8 * 128, 1);
    const uint64_t peer_k = matrix(c.shared.peer_k, Tile<kKvRows>::kBoxBytes, 8 * kSpan, {{ layout.layout_type }});
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k, c.staged_q(at) + c.row * kSpan / 16);
    c.shared.do_full[at.stage].wait(at.phase);
    multiply_scores(dp, c.v, c.staged_do(at) + c.row * kSpan / 16);
    cute::warpgroup_wait<1>();  // the scores are there; dp's products run on
    fence(scores);
    weigh(c, weights, scores, step, at);
    write(c, c.shared.p[step.parity], weights);
    meet();
    multiply_gradient(dv, p, c.staged_do(at) + c.columns<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dp is there; dv's products run on
    fence(dp);
    differentiate(c, dp, scores, at);
    pack(weights, dp);
    await_ds(c, step);
    write(c, c.own_ds(step), weights);
    meet();
    exchange(c, step);
    multiply_query(dq, own_ds, c.k + c.columns<kKvRows>(c.part), c.consumer);
    c.shared.peer_full.wait(step.parity);
    multiply_query<true>(dq, peer_ds, peer_k, c.consumer);
    multiply_gradient(dk, own_ds, c.staged_q(at) + c.columns<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dv and dq are there; dk's products run on
    fence(dv);
    fence(dq);
    release(c.shared.do_empty[at.stage]);
    release_ds(c);
    accumulate(c, dq, step);
    cute::warpgroup_wait<0>();
    fence(dk);
    release(c.shared.q_empty[at.stage]);
  }

  __device__ __forceinline__ void end(const Consumer& c, int count) { await_ds(c, {0, 0, count % 2u}); }
};
