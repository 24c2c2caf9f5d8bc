// The steps of a consumer of a pair, one for each q tile: one after the other, so that a stage of q may be the
// only one. Within a step dp is multiplied while p is computed, dv while ds is, the block's own half of dq
// while the peer's ds is on its way, and dk while dq leaves.
struct Steps {
  __device__ __forceinline__ void begin(const Consumer& c, Position) { c.shared.v_full.wait(0); }

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[{{ value_gradients }}], Step step,
                                       Position at) {
{% if single_do %}
    const Position of_do{0, step.parity};  // q has more stages
{% endif %}
    const int half = c.row * kSpan / 16;  // of the q tile, in a descriptor
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights;  // p^T, then ds^T
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k, c.staged_q(at) + half);
{% if operation.blocks and not reads_late %}
    c.read(step, at);
{% endif %}
    c.shared.do_full[{{ of_do }}.stage].wait({{ of_do }}.phase);
{% if operation.dim_v %}
    multiply_values(dp, c.v, c.staged_do({{ of_do }}) + c.row * kValueSpan / 16);
{% else %}
    multiply_scores(dp, c.v, c.staged_do({{ of_do }}) + half);
{% endif %}
{% if reads_late %}
    c.read(step, at);
{% endif %}
    cute::warpgroup_wait<1>();  // the scores are there; dp's products run on
    fence(scores);
{% if operation.dropout %}
    Words words;
{% endif %}
    weigh(c, weights, scores, step, at{{ ", words" if operation.dropout }});
    write(c, own_p(c, step), weights);
    meet();
    {{ multiply_dv }}(dv, staged_p(c, step), c.staged_do({{ of_do }}) + c.{{ value_offset }}<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dp is there; dv's products run on
    fence(dp);
    differentiate(c, dp, scores, at{{ ", words" if operation.dropout }});
    pack(weights, dp);
    await_ds(c, step);
    write(c, c.own_ds(step), weights);
    meet();
{% if operation.bias_gradient %}
    store_ds(c, step);
{% endif %}
{% if staged %}
    begin_staging_ahead(c, step);
{% endif %}
    exchange(c, step);
    multiply_own_query(c, dq, step);
    multiply_peer_query(c, dq, step);
    multiply_gradient(dk, own_ds(c, step), c.staged_q(at) + c.columns<kQTile>(c.consumer));
    cute::warpgroup_wait<1>();  // dv and dq are there; dk's products run on
    fence(dv);
    fence(dq);
    release(c.shared.do_empty[{{ of_do }}.stage]);
{% if operation.bias_gradient %}
    await_stored_ds(c);
{% endif %}
    release_ds(c);
    accumulate(c, dq, step);
    cute::warpgroup_wait<0>();
    fence(dk);
    release(c.shared.q_empty[at.stage]);
  }

  // The peer reads the last box of ds, and says that it has: after that nobody touches the block's memory.
  __device__ __forceinline__ void end(const Consumer& c, int count) { await_ds(c, {0, 0, count % 2u}); }
};
