// Steps of the loop over kv tiles: the scores of one tile are multiplied, then the output of the tile
// before, and the softmax of the one runs under the other's products.
struct Steps {
  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], float (&)[kOutputs],
                                               Weights& weights, Rows& rows, int n, bool masked) {
{% if operation.blocks %}
    const Shown shown(c, n, masked);
{% endif %}
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands(n);
    c.scaling.cap(scores);
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
    c.turns.begin();
    multiply_scores(scores, c.q, c.staged_k());
    if (kRescalesBetween) rescale(output, rows);
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
    c.turns.pass();
{% if operation.blocks %}
    const Shown shown(c, n, kMasked);
{% endif %}
{% if takes_early %}
    Words words;
    c.take(words);
{% endif %}
    cute::warpgroup_wait<1>();  // the scores are there; the output's products run on
    fence(scores);
    c.release_operands(n);
    c.scaling.cap(scores);
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
    // The compiler moves arithmetic across a wait for products, but not across this one: with it all of the
    // softmax runs under the output's products, which only long ones gain from.
{% if waits_between %}
    // It moves weights even so, but for sums that the wait depends on: they are never below 0, which it does not know.
    if (n > c.begin) c.shared.k_full[c.position.stage].wait(c.position.phase ^ (rows.sum[0] + rows.sum[1] < 0));
{% else %}
    if (kRescalesBetween && n > c.begin) c.shared.k_full[c.position.stage].wait(c.position.phase);
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
    if (!kRescalesBetween) rescale(output, rows);
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&output)[kOutputs], Weights& weights, Rows& rows) {
    if (kRescalesBetween) rescale(output, rows);
    const Position before = c.before();
    c.shared.v_full[before.stage].wait(before.phase);
    multiply_output(output, weights, c.staged_v(before.stage));
  }
};
