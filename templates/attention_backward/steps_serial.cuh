// The steps of a consumer, one for each q tile: one after the other, so that the fewest registers are in
// use at a time. Within a step dp is multiplied while p is computed, dv while ds is written, and dk while
// dq leaves.
struct Steps {
{% if held %}
  Held held;

  __device__ __forceinline__ void begin(const Consumer& c, Position) { held.take(c); }
{% else %}
  __device__ __forceinline__ void begin(const Consumer& c, Position) { c.shared.v_full.wait(0); }
{% endif %}

  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[{{ value_gradients }}], Step step,
                                       Position at) {
{% if single_do %}
    const Position of_do{0, step.parity};  // q has more stages
{% endif %}
    float scores[kScores], dp[kScores], dq[kQueries];
    Weights weights, ds;
    c.shared.q_full[at.stage].wait(at.phase);
    multiply_scores(scores, c.k + c.own, c.staged_q(at));
{% if operation.blocks and not reads_late %}
    c.read(step, at);
{% endif %}
    c.shared.do_full[{{ of_do }}.stage].wait({{ of_do }}.phase);
{% if held %}
    held.multiply(c, dp, c.staged_do({{ of_do }}));
{% elif operation.dim_v %}
    multiply_values(dp, c.own_v(), c.staged_do({{ of_do }}));
{% else %}
    multiply_scores(dp, c.v + c.own, c.staged_do({{ of_do }}));
{% endif %}
{% if reads_late %}
    c.read(step, at);
{% endif %}
{% if fused %}
    Words words;
    c.take(words, step);
    cute::warpgroup_wait<0>();
    fence(scores);
    fence(dp);
    weigh(c, weights, scores, step, at, words, dp);
{% else %}
    cute::warpgroup_wait<1>();  // the scores are there; dp's products run on
    fence(scores);
{% if operation.dropout %}
    Words words;
{% endif %}
    weigh(c, weights, scores, step, at{{ ", words" if operation.dropout }});
    cute::warpgroup_wait<0>();
    fence(dp);
    differentiate(c, dp, scores, at{{ ", words" if operation.dropout }});
{% endif %}
    {{ multiply_dv }}(dv, weights, c.staged_do({{ of_do }}) + c.{{ value_offset }}<kQTile>(c.part));
    pack(ds, dp);
{% if layout.ds_stages == 1 %}
    await_ds(c, step);
{% else %}
    // Nobody waits for a stage of ds: this one was read two steps ago, before the consumers met in the last step.
{% endif %}
    write(c, c.own_ds(step), ds);
{% if operation.bias_gradient and layout.ds_stages == 2 %}
    await_stored_ds(c);  // of the step before: the next one writes there
{% endif %}
    meet();
{% if operation.bias_gradient %}
    store_ds(c, step);
{% endif %}
{% if staged %}
    begin_staging_ahead(c, step);
{% endif %}
    multiply_query(dq, c.staged_ds(step), c.k + c.columns<kKvRows>(c.part), c.consumer);
    multiply_gradient(dk, ds, c.staged_q(at) + c.columns<kQTile>(c.part));
    cute::warpgroup_wait<1>();  // dv and dq are there; dk's products run on
    fence(dv);
    fence(dq);
    release(c.shared.do_empty[{{ of_do }}.stage]);
{% if layout.ds_stages == 1 %}
{% if operation.bias_gradient %}
    await_stored_ds(c);
{% endif %}
    release_ds(c);
{% endif %}
    accumulate(c, dq, step);
    cute::warpgroup_wait<0>();
    fence(dk);
    release(c.shared.q_empty[at.stage]);
  }
{% if operation.bias_gradient %}

  __device__ __forceinline__ void end(const Consumer& c) { await_stored_ds(c); }
{% endif %}
};
