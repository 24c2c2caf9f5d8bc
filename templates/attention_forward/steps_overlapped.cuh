// Steps of the loop over kv tiles: the scores of one tile are multiplied, then the output of the tile
// before, and the softmax of the one runs under the other's products.
struct Steps {
  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], Weights& weights,
                                               Rows& rows, int n, bool masked) {
{% if operation.blocks %}
    const Shown shown(c, n, masked);
{% endif %}
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands({{ "n" if layout.q_stages == 1 }});
{% if capped %}
    c.scaling.cap(scores);
{% endif %}
{% if scored %}
    c.change(scores, {{ "rows, " if leans }}n);
{% endif %}
    if (masked) {{ hide }};
    softmax<true, true>(scores, rows, c.scaling.exponent);
{% if operation.dropout %}
    Words words;
    c.take(words);
{% endif %}
    c.position.advance();
    pack(weights, scores);
{% if operation.dropout %}
    Weights dropped;
    expand(dropped, words);
    keep(weights, weights, dropped);
{% endif %}
  }

{% if mask_alone %}
  template <bool kMasked, bool kEvery = false>
{% else %}
  template <bool kMasked>
{% endif %}
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                              Weights& weights, Rows& rows, int n) {
    const Position before = c.before();
    c.shared.k_full[c.position.stage].wait(c.position.phase);
{% if schedule.pingpong %}
    c.turns.begin();
{% endif %}
    multiply_scores(scores, c.q, c.staged_k());
{% if rescales_between %}
    rescale(output, rows);  // under the MMA of the scores
{% endif %}
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
{% if schedule.pingpong %}
    c.turns.pass();
{% endif %}
{% if operation.blocks %}
    const Shown shown(c, n, kMasked);
{% endif %}
{% if takes_early %}
    Words words;
    c.take(words);
{% endif %}
    cute::warpgroup_wait<1>();  // the scores are there; the output's products run on
    fence(scores);
    c.release_operands({{ "n" if layout.q_stages == 1 }});
{% if capped %}
    c.scaling.cap(scores);
{% endif %}
{% if scored %}
    c.change{{ "<kEvery>" if mask_alone }}(scores, {{ "rows, " if leans }}n);
{% endif %}
    if (kMasked) {{ hide }};
    softmax<false, kMasked>(scores, rows, c.scaling.exponent);
{% if takes_early %}
    Weights packed, dropped;
    pack(packed, scores);
    expand(dropped, words);
    fence(packed), fence(dropped);  // else the compiler does all of it when all products are there
{% elif operation.dropout %}
    Words words;
    c.take(words);
{% endif %}
    c.position.advance();
{% if waits_between or rescales_between %}
    // ptxas moves the softmax behind the wait for the output's MMA, where the tensor core idles. It moves nothing across
    // a wait for a barrier, so that the next k, which is waited for anyway, keeps the softmax here.
{% endif %}
{% if waits_between %}
    // It moves weights even so, unless the wait depends on their sums. These are never below 0, which ptxas does not
    // know, and NaN is not below 0 either: the parity is always that of the phase.
    if (n > c.begin) c.shared.k_full[c.position.stage].wait(c.position.phase ^ (rows.sum[0] + rows.sum[1] < 0));
{% elif rescales_between %}
    if (n > c.begin) c.shared.k_full[c.position.stage].wait(c.position.phase);
{% endif %}
    cute::warpgroup_wait<0>();
    fence(output);
    release(c.shared.v_empty[before.stage]);
{% if takes_early %}
    keep(weights, packed, dropped);
{% else %}
    pack(weights, scores);
{% endif %}
{% if operation.dropout and not takes_early %}
    Weights dropped;
    expand(dropped, words);
    keep(weights, weights, dropped);
{% endif %}
{% if not rescales_between %}
    rescale(output, rows);
{% endif %}
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&output)[kOutputs], Weights& weights{{ ", Rows& rows" if rescales_between }}) {
{% if rescales_between %}
    rescale(output, rows);
{% endif %}
    const Position before = c.before();
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
  }
};
