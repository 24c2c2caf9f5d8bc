// Steps of the loop over kv tiles, one after the other: the scores become weights in place, and only
// another warpgroup's products run under the softmax.
struct Steps {
  // Scores that are there become weights, and the output's products are issued.
{% if mask_alone %}
  template <bool kFirst, bool kMasked, bool kEvery = false>
{% else %}
  template <bool kFirst, bool kMasked>
{% endif %}
  static __device__ __forceinline__ void weigh(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                               Weights& weights, Rows& rows, int n, bool masked) {
    const Position at = c.position;
{% if operation.blocks %}
    const Shown shown(c, n, masked);
{% endif %}
    c.release_operands({{ "n" if layout.q_stages == 1 }});
{% if capped %}
    c.scaling.cap(scores);
{% endif %}
{% if scored %}
    c.change{{ "<kEvery>" if mask_alone }}(scores, {{ "rows, " if leans }}n);
{% endif %}
    if (masked) {{ hide }};
    softmax<kFirst, kMasked>(scores, rows, c.scaling.exponent);
{% if operation.dropout %}
    Words words;
    c.take(words);
{% endif %}
    if (!kFirst) rescale(output, rows);
    pack(weights, scores);
{% if operation.dropout %}
    Weights dropped;
    expand(dropped, words);
    keep(weights, weights, dropped);
{% endif %}
    c.shared.v_full[at.stage].wait(at.phase);
    multiply_output(output, weights, c.staged_v(at.stage));
    c.position.advance();
  }

  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                               Weights& weights, Rows& rows, int n, bool masked) {
    cute::warpgroup_wait<0>();
    fence(scores);
    weigh<true, true>(c, scores, output, weights, rows, n, masked);
  }

{% if mask_alone %}
  template <bool kMasked, bool kEvery = false>
{% else %}
  template <bool kMasked>
{% endif %}
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                              Weights& weights, Rows& rows, int n) {
    const int before = c.before().stage;
    c.shared.k_full[c.position.stage].wait(c.position.phase);
{% if schedule.pingpong %}
    c.turns.begin();
{% endif %}
    multiply_scores(scores, c.q, c.staged_k());
{% if schedule.pingpong %}
    c.turns.pass();
{% endif %}
    cute::warpgroup_wait<0>();
    fence(scores);
    fence(output);
    release(c.shared.v_empty[before]);
    weigh<false, kMasked{{ ", kEvery" if mask_alone }}>(c, scores, output, weights, rows, n, kMasked);
  }
};
