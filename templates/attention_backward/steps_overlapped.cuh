// The steps of a consumer, one for each q tile: the scores of the next are multiplied while dq leaves, dp
// while p is computed, dv while ds is, dk while the consumers meet. The compiler must find no wait that
// leaves products of the step before in flight: it does not see around the loop, and would wait for all.
struct Steps {
  float scores[kScores];  // of the next step

  __device__ __forceinline__ void begin(const Consumer& c, Position at) {
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k + c.own, c.staged_q(at));
    c.shared.v_full.wait(0);
  }

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[{{ value_gradients }}], Step step,
                                       Position at, bool more) {
{% if single_do %}
    const Position of_do{0, step.parity};  // q has more stages
{% endif %}
    float dp[kScores], dq[kQueries];
    Weights weights;  // p^T, then ds^T
{% if operation.blocks %}
    c.read(step, at);
{% endif %}
    c.shared.do_full[{{ of_do }}.stage].wait({{ of_do }}.phase);
    cute::warpgroup_wait<0>();  // the scores are there
    fence(scores);
{% if operation.dim_v %}
    multiply_values(dp, c.own_v(), c.staged_do({{ of_do }}));
{% else %}
    multiply_scores(dp, c.v + c.own, c.staged_do({{ of_do }}));
{% endif %}
{% if operation.dropout %}
    Words words;
{% endif %}
    weigh(c, weights, scores, step, at{{ ", words" if operation.dropout }});
    {{ multiply_dv }}(dv, weights, c.staged_do({{ of_do }}) + c.{{ value_offset }}<kQTile>(c.part));
    cute::warpgroup_wait<1>();  // dp is there; dv's products run on
    fence(dp);
    differentiate(c, dp, scores, at{{ ", words" if operation.dropout }});
    await_ds(c, step);  // also keeps the arithmetic before it, under dv's products
    cute::warpgroup_wait<0>();
    fence(dv);
    release(c.shared.do_empty[{{ of_do }}.stage]);
    pack(weights, dp);
    write(c, c.own_ds(step), weights);
    multiply_gradient(dk, weights, c.staged_q(at) + c.columns<kQTile>(c.part));
    meet();
{% if operation.bias_gradient %}
    store_ds(c, step);
{% endif %}
{% if staged %}
    begin_staging_ahead(c, step);
{% endif %}
    multiply_query(dq, c.staged_ds(step), c.k + c.columns<kKvRows>(c.part), c.consumer);
    // After the last step this multiplies what the stage happens to hold, and nobody looks at it: a branch
    // around products in flight makes the compiler wait for them.
    Position ahead = at;
    ahead.advance();
    if (more) c.shared.q_full[ahead.stage].wait(ahead.phase);
    multiply_scores(scores, c.k + c.own, c.staged_q(ahead));
    cute::warpgroup_wait<1>();  // dk and dq are there; the next scores' products run on
    fence(dk);
    fence(dq);
    release(c.shared.q_empty[at.stage]);
{% if operation.bias_gradient %}
    await_stored_ds(c);
{% endif %}
    release_ds(c);
    accumulate(c, dq, step);
  }

  __device__ __forceinline__ void end(const Consumer&) {
    cute::warpgroup_wait<0>();  // what was multiplied ahead of the last step's end reads a stage of q
    fence(scores);
  }
};
